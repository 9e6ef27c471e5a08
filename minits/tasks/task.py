"""What training and evaluation need of a task."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from textwrap import shorten
from typing import ClassVar, Protocol

from minits.checkpoint.files import Json
from minits.supervision import Example
from minits.tasks.answers import SCORINGS, normalised


# Settings that serve Parity, and small tasks of its kind.
USUAL: dict[tuple[str, str], Json] = {
    ("*", "tiny"): {
        "chunk_size": 8, "layout": "rows", "steps": 400, "batch_size": 32, "lr": 3e-3,
        "warmup": 20, "decay": 1.0,
    },
    ("*", "real"): {
        "chunk_size": 8, "layout": "pack", "steps": 250, "batch_size": 64, "lr": 2e-5,
        "warmup": 10, "decay": 1.0,
    },
}


class Task(Protocol):
    """What training and evaluation need. The fields of the dataclass are the task's options."""

    name: ClassVar[str]
    # What is trained on, then the named evaluation sets; a property where options decide them.
    splits: ClassVar[tuple[str, ...]]
    unit: ClassVar[str] = "steps"  # what Example.size counts
    bucket: ClassVar[int | None] = None  # how many units share a line of a report; None: no lines
    # The words that every answer begins with; what a model says before them is not its answer.
    opening: ClassVar[str] = ""
    scoring: ClassVar[str] = "text"  # how answers are compared: a name in answers.py's SCORINGS
    # Good settings (fields of TrainSettings) by (method, kind of model). Method "*": any other;
    # kind: "tiny" for the model made on the spot, "real" for pretrained weights.
    recipes: ClassVar[dict[tuple[str, str], Json]] = USUAL

    paths: ClassVar[tuple[str, ...]] = ()  # options that name files
    # Options that go with a checkpoint, in thinking.json; None: all but paths.
    kept: ClassVar[tuple[str, ...] | None] = None

    @classmethod
    def recipe(cls, method: str, kind: str) -> Json:
        """The good settings for a method and a kind of model; perhaps none."""
        return cls.recipes.get(("*", kind), {}) | cls.recipes.get((method, kind), {})

    @property
    def data_key(self) -> str:
        """All that the examples depend on, spelled out: their random numbers are seeded with it."""
        return repr(self)

    def check(self) -> None:
        """Raises ValueError for options that do not go together."""

    def title(self, split: str) -> str:
        """A split in words, for reports."""
        return "training" if split == "train" else split

    def group(self, example: Example) -> str | None:
        """The line of a report that an example belongs to; None: that of its size, see `bucket`."""
        return None

    def cluster(self, example: Example) -> str | None:
        """What examples share that are no independent draws, a subject say; None: they are."""
        return None

    @classmethod
    def trained_on(cls, about: Json) -> str:
        """What a checkpoint's thinking.json says of the options that are `kept`, in words."""
        return ""

    def demo(self) -> Example:
        """The example that `infer` shows where no prompt is given."""
        return self.example(self.splits[-1], 0, 0)

    def size(self, split: str) -> int | None:
        """Its number of examples; None: endless."""
        return None

    def example(self, split: str, index: int, seed: int | str) -> Example:
        """Example number `index` of a split: a function of its arguments and the task's options.

        Of an endless split any index and seed give another example. Of a finite one they are the
        row and, in training, a seed that is another in every epoch, which need not change anything.
        """
        ...

    def overlap_key(self, split: str, index: int) -> str:
        """What no two finite splits may share: the prompt of an example."""
        return self.example(split, index, 0).prompt

    def asked(self, question: str) -> str:
        """The prompt that asks a question of a user's, as training asked its own."""
        return question

    def score(self, text: str, example: Example) -> Json:
        """`answer`: what was taken out of the generated text; `right`; and what else counts."""
        return SCORINGS[self.scoring](text, example.answer, self.opening)

    def score_steps(
        self,
        text: str,
        thoughts: Sequence[str] | None,  # of a model that thinks
        example: Example,
        right: bool,  # the answer
    ) -> dict[str, bool | None]:
        """What the steps that were thought, or written in `text`, say.

        None does not count, nor does what is left out.
        """
        return {}

    def texts(self) -> Iterator[str] | None:
        """All texts of the training split, for a tokenizer of its own; None: that which ships."""
        return None

    def sources(self) -> dict[str, Json]:
        """The files that examples come from, by option. A resumed run must find the same."""
        return {}

    def coverage(self, split: str, n: int) -> dict[str, float]:
        """Shares that `data` tells of a split's first n examples, beside those of any task."""
        return {}

    def evaluated(self, given: Json) -> tuple[Task, str]:
        """(task, split) that `eval` looks at, given the options among its flags."""
        return replace(self, **given), self.splits[-1]

    def sized(self, size: int | None) -> Task:
        """The task with examples of `size`, which `data` shows; None: of a size that is usual."""
        if size is not None:
            raise ValueError(f"--ops {size}: {self.name} has no such option; leave it out.")
        return self


def table(*kinds: type) -> dict[str, type]:
    """Tasks, or methods, by their names. Raises TypeError where a copy still has the other's."""
    found: dict[str, type] = {}
    for kind in kinds:
        if (other := found.setdefault(kind.name, kind)) is not kind:
            raise TypeError(
                f"{other.__name__} and {kind.__name__} are both named {kind.name!r}; give the "
                "second one a name of its own."
            )
    return found


def check_dataclass(kind: type, what: str) -> None:
    """Raises ValueError for a class whose options, a parent's aside, would be none."""
    if "__dataclass_fields__" not in kind.__dict__:
        raise ValueError(
            f"{what} {kind.name}: {kind.__name__} is no dataclass; put @dataclass(frozen=True) "
            "above it."
        )


def describe_sources(task: Task) -> list[str]:
    """A line for each file that the examples were read from."""
    return [
        f"{option}: " + ", ".join(f"{key} {value}" for key, value in source.items())
        for option, source in task.sources().items()
    ]


def check_overlap(task: Task) -> None:
    """Raises ValueError if two finite splits share a prompt, naming both places."""
    places = {  # the first, where a split has a prompt twice; none of a split without an end
        split: {
            normalised(task.overlap_key(split, i)): i
            for i in reversed(range(task.size(split) or 0))
        }
        for split in task.splits
    }
    for one, other in combinations(places, 2):
        if both := places[one].keys() & places[other].keys():
            first = min(both, key=places[one].get)
            here, there = (place_of(task, split, places[split][first]) for split in (one, other))
            raise ValueError(
                f"{there} asks what {here} asks: {shorten(first, 160)!r} "
                f"({len(both)} such in {task.title(one)} and {task.title(other)}). What was seen "
                "in training measures nothing: take the rows out of one of them."
            )


def place_of(task: Task, split: str, index: int) -> str:
    """Where an example of a finite split was read, or its number."""
    return task.example(split, index, 0).name or f"{split} row {index}"
