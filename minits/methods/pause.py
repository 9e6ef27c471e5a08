"""Coconut's prompt, and its control: the same places, filled with one learned embedding.

    prompt  begin  latent … latent  end  what is left of the steps  answer  EOS

The three are rows of the vocabulary that no token of the tokenizer uses (Qwen's is padded), so
nothing is resized, and no model ever says one. Loss is on all that follows `end`.
"""
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import torch

from minits.checkpoint.tokenizer import Tokenizer
from minits.methods.curriculum import Curriculum
from minits.methods.method import Stage
from minits.settings import setting
from minits.supervision import Example, Row, encode_prompt
from minits.thinking import ThinkingConfig, ThinkingStates

START = "."  # the token whose weights the three begin with
MARKED = ("pause", "coconut")  # methods that have trained the three


@lru_cache(maxsize=1)  # it scans the whole vocabulary
def begin_id(tokenizer: Tokenizer) -> int:
    """The first of three consecutive ids: begin, end, latent."""
    return max(tokenizer.known_ids) + 1


@dataclass(frozen=True)
class Pause(Curriculum):
    """Each stage lacks one more of the first steps and has one more share of the latents.

    How many never depends on a row's gold steps: at test nobody knows their number.
    """

    latents: int = setting(6, "coconut, pause: latents in the end", least=1, most=10**5)
    latent_stages: int = setting(
        3,
        "coconut, pause: stages in which the number of latents grows to that",
        least=1,
        most=10**5,
    )
    first_stage: int = setting(
        1,
        "coconut, pause: steps that the first stage lacks; 0, without a latent: for weights that "
        "were not trained on CoT",
        least=0,
    )

    name: ClassVar = "pause"
    title: ClassVar = "Pause tokens"
    spare: ClassVar = 3

    def stages(self, steps: int, batch_size: int) -> tuple[Stage, ...]:
        lacking = range(self.first_stage, self.latent_stages + 1)
        names = [f"{self.count(gone)} latents, {gone} steps gone" for gone in lacking]
        # An epoch of GSM8K; the public recipe has three, and its author fewer for larger models.
        return self.in_stages(names, 7_000, steps, batch_size)

    def count(self, gone: int) -> int:
        """The number of latents in the stage from which so many steps are gone."""
        return self.latents * min(gone, self.latent_stages) // self.latent_stages

    def prompt(self, text: str, tokenizer: Tokenizer) -> list[int]:
        begin = begin_id(tokenizer)
        return [*encode_prompt(tokenizer, text), begin, *[begin + 2] * self.latents, begin + 1]

    def encode(
        self,
        example: Example,
        tokenizer: Tokenizer,
        config: ThinkingConfig,
        name: str = "row",
        stage: int = -1,
    ) -> Row:
        # The last stage is the one past those in which the latents grow, and has no steps at all.
        gone = self.latent_stages + 1 if stage < 0 else self.first_stage + stage
        kept = example.steps[gone:] if gone <= self.latent_stages else ()
        example, now = replace(example, steps=kept), replace(self, latents=self.count(gone))
        return Curriculum.encode(now, example, tokenizer, config, name)

    @torch.no_grad()
    def prepare(self, model: ThinkingStates, tokenizer: Tokenizer, about: dict[str, Any]) -> None:
        begin, backbone = begin_id(tokenizer), model.backbone
        spare = backbone.config.vocab_size - begin
        if spare < self.spare:
            raise ValueError(
                f"--method {self.name} needs {self.spare} rows of the vocabulary that no token "
                f"uses; this model has {spare}. Qwen2.5 has them, and so has the tiny model that "
                "this method makes for itself: train that from its start (--first-stage 0)."
            )
        if about.get("method") in MARKED:
            return
        if self.first_stage and about.get("method") != "cot":
            warnings.warn(
                f"--first-stage {self.first_stage}: the published recipe starts from a run of CoT "
                "(--model RUN), and this model is none; 0 begins with a stage of CoT."
            )
        for weight in (backbone.model.embed_tokens.weight, backbone.lm_head.weight):
            weight[begin : begin + self.spare] = weight[tokenizer.encode(START)[0]]


def latents_of(prompt: Sequence[int]) -> int:
    """How many latents a prompt has, which ends with `end`."""
    return prompt.count(prompt[-1] + 1)
