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
    """A part of a training. Each has its own optimizer state and sees the data in its own way."""

    name: str
    steps: int  # optimizer steps


class Method(Protocol):
    """How examples become rows, losses and answers. The fields of the dataclass are its options."""

    name: ClassVar[str]
    title: ClassVar[str]  # in tables
    thinks: ClassVar[bool]  # whether the model has T and C

    def check(self, task: Task) -> None:
        """Raises ValueError for a task whose answers could not be found in what is said."""

    def stages(self, steps: int) -> tuple[Stage, ...]:
        """The stages of a training of so many optimizer steps, in order."""
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
