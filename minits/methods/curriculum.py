"""What iCoT, Coconut and its control share: from a chain of thought to none, stage by stage."""
from collections.abc import Sequence
from dataclasses import dataclass

from minits.methods.method import Stage
from minits.methods.plain import CoT
from minits.settings import setting


@dataclass(frozen=True)
class Curriculum(CoT):
    """A method whose stages take more and more of the chain, and whose last one has none of it."""

    stage_samples: int | None = setting(
        None,
        "samples a stage before the last one, rounded to whole optimizer steps; default: icot "
        "8000, by steps 21000; coconut and pause 7000",
        least=1,
    )
    keep_optimizer: bool = setting(False, "stages after the first do not reset the optimizer")

    def in_stages(
        self,
        names: Sequence[str],  # of the stages before the last one
        samples: int,  # of each of these, unless --stage-samples says otherwise
        steps: int,  # of the optimizer, in all
        batch_size: int,
        *,
        block: int = 1,  # stages that share sizes of batches, and an evaluation after them
    ) -> tuple[Stage, ...]:
        """Stages of these names, and one of all steps left. Raises ValueError if none is."""
        samples, resets = self.stage_samples or samples, not self.keep_optimizer
        each = max(round(samples / batch_size), 1)
        before = each * len(names)
        if steps <= before:
            raise ValueError(
                f"--steps {steps}: the {len(names)} stages before the last one take {each} each "
                f"(of {batch_size} samples), {before} in all. Raise it, or lower --stage-samples "
                f"{samples}."
            )
        partial = [
            Stage(name, each, resets, fresh=number % block == 0, partial=True)
            for number, name in enumerate(names)
        ]
        return *partial, Stage("the last stage", steps - before, resets)
