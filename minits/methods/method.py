"""What training and evaluation need of a method."""
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

from minits.checkpoint.tokenizer import Tokenizer
from minits.fast.flat_batch import FlatBatch, collate, flat_losses
from minits.generation import Event, GenerationConfig, GenerationResult, generate_ids
from minits.supervision import Example, Row
from minits.tasks.task import Task
from minits.teacher_forcing import Losses
from minits.thinking import Engine, ThinkingConfig, ThinkingStates


class Stage(NamedTuple):
    """A part of a training, which sees the data in its own way."""

    name: str
    steps: int  # optimizer steps
    resets: bool = True  # whether the optimizer's state begins anew
    fresh: bool = True  # whether sizes of batches do, too, and the CUDA graphs that know them
    # Whether its rows still hold what the last stage leaves out. Such weights are evaluated on
    # rows like these, before the next fresh stage at the latest, and are never the best.
    partial: bool = False


def curriculum(
    names: Sequence[str],  # of the partial stages
    samples: int,  # of each of them
    steps: int,  # of the whole training
    batch_size: int,
    *,
    resets: bool,
    block: int = 1,  # stages that share sizes
) -> tuple[Stage, ...]:
    """Stages of a number of samples each, and one of all steps that are left.

    Raises ValueError if none is.
    """
    each = max(round(samples / batch_size), 1)
    before = each * len(names)
    if steps <= before:
        raise ValueError(
            f"--steps {steps}: the {len(names)} stages before the last one take {each} each (of "
            f"{batch_size} samples), {before} in all. Raise it, or lower --stage-samples {samples}."
        )
    partial = [
        Stage(name, each, resets, fresh=number % block == 0, partial=True)
        for number, name in enumerate(names)
    ]
    return *partial, Stage("the last stage", steps - before, resets)


class Method(Protocol):
    """How examples become rows, losses and answers. The fields of the dataclass are its options."""

    name: ClassVar[str]
    title: ClassVar[str]  # in tables
    thinks: ClassVar[bool]  # whether the model has T and C

    def check(self, task: Task) -> None:
        """Raises ValueError for a task whose answers could not be found in what is said."""

    def stages(self, steps: int, batch_size: int) -> tuple[Stage, ...]:
        """The stages of a training of so many optimizer steps, in order.

        Raises ValueError if they are too few.
        """
        return (Stage("training", steps),)

    def encode(
        self,
        example: Example,
        tokenizer: Tokenizer,
        config: ThinkingConfig,
        name: str = "row",  # in errors
        stage: int = -1,  # the last one is that of evaluation
    ) -> Row:
        """The example as it is trained on in that stage. Raises ValueError naming the row."""
        ...

    def collate(self, rows: Sequence[Row], config: ThinkingConfig, **how: Any) -> FlatBatch:
        """The batch of `rows`; how: as for flat_batch.py's `collate`."""
        return collate(rows, config, **how)

    def losses(self, model: ThinkingStates, batch: FlatBatch) -> Losses:
        """Summed losses, and the numbers of tokens that they are over."""
        return flat_losses(model, batch)

    def answer(
        self,
        engine: Engine,
        prompts: Sequence[Sequence[int]],
        config: GenerationConfig,
        listen: Callable[[int, Event], None] | None = None,
    ) -> list[GenerationResult]:
        """Answers for prompts (ids) as one batch; listen: as for `generate_ids`."""
        return generate_ids(engine, prompts, listen=listen, **vars(config))
