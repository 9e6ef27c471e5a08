"""iCoT, internalised chain of thought: trained as CoT, with ever less of the chain, at last none.

What is removed stands at the chain's beginning. `--removal tokens` is stepwise internalisation
(Deng et al. 2024); `--removal steps` takes whole steps, as the public code of Coconut does
(`no_thoughts` there). The codes on GitHub: `Internalize_CoT_Step_by_Step`, `coconut`.
"""
import random
from dataclasses import dataclass, replace
from math import log
from typing import ClassVar, NamedTuple

from minits.checkpoint.tokenizer import Tokenizer
from minits.methods.curriculum import Curriculum
from minits.methods.method import Stage
from minits.settings import setting
from minits.supervision import Example, Row
from minits.thinking import ThinkingConfig


class Removal(NamedTuple):
    """A way of removing: what is right for GSM8K's chains in Qwen's tokens."""

    samples: int  # a stage
    all_at: int  # tokens or steps at which all are removed
    block: int  # see `Curriculum.in_stages`


# - tokens: the public code removes all at 39, but its tokenizer joins digits: in Qwen's tokens
#   22 % of GSM8K's chains are longer. Capturing CUDA graphs takes seconds, so ten stages of one
#   token each share their sizes.
# - steps: one more every three epochs, as in Coconut's code, but of GSM8K's 7,000 rows; the set
#   used there is far larger.
REMOVALS = {"tokens": Removal(8_000, 60, 10), "steps": Removal(21_000, 4, 1)}


@dataclass(frozen=True)
class ICoT(Curriculum):
    """Prompt, what is left of the steps, answer."""

    removal: str = setting(
        "tokens", "icot: what a stage takes one more of from the chain", choices=tuple(REMOVALS)
    )
    remove_all_at: int | None = setting(
        None,
        "icot: tokens or steps at which all are taken; default: 60, by steps 4",
        least=1,
        most=10**5,
    )
    smoothing: float = setting(
        4.0,
        "icot, by tokens: a sample loses o more than its stage says, with p(o) ~ exp(-o * this)",
        above=0,
    )

    name: ClassVar = "icot"
    title: ClassVar = "iCoT"

    @property
    def all_at(self) -> int:
        """Tokens or steps at which all are removed."""
        return self.remove_all_at or REMOVALS[self.removal].all_at

    def stages(self, steps: int, batch_size: int) -> tuple[Stage, ...]:
        names = [f"{number} {self.removal} removed" for number in range(self.all_at)]
        samples, _, block = REMOVALS[self.removal]
        return self.in_stages(names, samples, steps, batch_size, block=block)

    def encode(
        self,
        example: Example,
        tokenizer: Tokenizer,
        config: ThinkingConfig,
        name: str = "row",
        stage: int = -1,
    ) -> Row:
        removed = self.all_at if stage < 0 else stage
        if self.removal == "steps":
            kept = example.steps[removed:] if removed < self.all_at else ()
            return super().encode(replace(example, steps=kept), tokenizer, config, name)
        # What `smoothing` adds: a function of sample and stage, so that a run can be resumed.
        rng = random.Random(f"{name}/{stage}/{example.prompt}")
        removed += int(-log(1 - rng.random()) / self.smoothing)  # geometric
        row = super().encode(example, tokenizer, config, name)
        start, chain = row.prompt_length, len(self.chain(example, tokenizer))
        gone = min(removed, chain) if removed < self.all_at else chain
        return replace(row, ids=row.ids[:start] + row.ids[start + gone :])
