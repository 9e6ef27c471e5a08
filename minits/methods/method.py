"""What training and evaluation need of a method."""
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

from minits.checkpoint.tokenizer import Tokenizer
from minits.fast.flat_batch import FlatBatch, collate, flat_losses
from minits.fast.layouts import LAYOUTS
from minits.generation import GenerationConfig, GenerationResult, Listener, decode_all, prefill
from minits.prefill import Reading
from minits.supervision import Example, Row, encode_prompt
from minits.tasks.task import Task
from minits.teacher_forcing import Losses
from minits.thinking import Engine, ThinkingConfig, ThinkingStates


class Stage(NamedTuple):
    """A part of a training, which sees the data in its own way."""

    name: str
    steps: int  # optimizer steps
    resets: bool = True  # whether the optimizer's state begins anew
    fresh: bool = True  # whether sizes of batches, and CUDA graphs of these sizes, begin anew
    # Whether its rows still hold what the last stage leaves out. Such weights are evaluated on
    # rows like these, before the next fresh stage at the latest, and are never the best.
    partial: bool = False


class Method(Protocol):
    """How examples become rows, losses and answers. The fields of the dataclass are its options."""

    name: ClassVar[str]
    title: ClassVar[str]  # in tables
    thinks: ClassVar[bool]  # whether the model has T and C
    has_states: ClassVar[bool] = False  # vectors that an `Intervention` may replace
    spare: ClassVar[int] = 0  # embedding rows that it needs and that no token uses
    paths: ClassVar[tuple[str, ...]] = ()  # options that name files
    # Options that go with a checkpoint, in thinking.json; None: all but paths.
    kept: ClassVar[tuple[str, ...] | None] = None
    layouts: ClassVar[tuple[str, ...]] = LAYOUTS  # how its samples may be laid into rows

    def check(self, task: Task) -> None:
        """Raises ValueError for a task whose answers could not be found in the generated text."""

    def stages(self, steps: int, batch_size: int) -> tuple[Stage, ...]:
        """The stages of a training of so many optimizer steps, in order.

        Raises ValueError if they are too few.
        """
        return (Stage("training", steps),)

    def prepare(self, model: ThinkingStates, tokenizer: Tokenizer, about: dict[str, Any]) -> None:
        """Makes weights ready to be trained; about: what their thinking.json says.

        Raises ValueError if they cannot be.
        """

    def prompt(self, text: str, tokenizer: Tokenizer) -> list[int]:
        """A prompt's ids, as `read` takes them."""
        return encode_prompt(tokenizer, text)

    def encode(
        self,
        example: Example,
        tokenizer: Tokenizer,
        config: ThinkingConfig,
        name: str = "row",  # in errors; in training another for every sample of an endless split
        stage: int = -1,  # -1: the last one, as in evaluation
    ) -> Row:
        """The example as it is trained on in that stage. Raises ValueError naming the row."""
        ...

    def collate(self, rows: Sequence[Row], config: ThinkingConfig, **how: Any) -> FlatBatch:
        """The batch of `rows`; how: as for flat_batch.py's `collate`.

        A batch of another class derives from `Tensors` there and has `counts`, too.
        """
        return collate(rows, config, **how)

    def losses(self, model: ThinkingStates, batch: FlatBatch) -> Losses:
        """Summed losses, and the numbers of tokens that they are over.

        A step divides the sums by the `counts` of its batches, which must be those numbers: weights
        of single tokens belong in the sums. On CUDA the pass is captured as a graph, so the host
        may look at no value.
        """
        return flat_losses(model, batch)

    def read(
        self, engine: Engine, prompts: Sequence[Sequence[int]], config: GenerationConfig
    ) -> Reading:
        """Reads prompts (ids) as one batch, up to where the answers begin."""
        return prefill(engine, prompts, config)

    def answer(
        self,
        engine: Engine,
        prompts: Sequence[Sequence[int]],
        config: GenerationConfig,
        listen: Listener | None = None,
    ) -> list[GenerationResult]:
        """Answers for prompts (ids) as one batch; listen: as for `generate_ids`."""
        return decode_all(engine, self.read(engine, prompts, config), config, listen)
