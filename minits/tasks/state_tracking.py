"""What Parity and Vars share: endless examples of a chosen number of operations (paper, 4.2)."""
from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import ClassVar

from minits.checkpoint.files import Json
from minits.settings import setting
from minits.supervision import Example
from minits.tasks.task import Task


@dataclass(frozen=True)
class StateTracking(Task):
    """Trained on 1 … max_ops operations; evaluated in distribution and on longer examples."""

    max_ops: int = setting(10, "longest training example, in operations", least=1)
    min_ops: int = setting(
        1,
        "shortest one; lengths are uniform in between. eval begins at the longest that was trained "
        "on, if --max-ops is more than that",
        least=0,
    )
    eval_max_ops: int = setting(
        100, "longest evaluation example, in operations; --max-ops if that is more", least=0
    )

    splits: ClassVar = ("train", "id", "ood")
    unit: ClassVar = "operations"
    bucket: ClassVar = 20

    def check(self) -> None:
        if self.min_ops > self.max_ops:
            raise ValueError(
                f"--min-ops {self.min_ops} is more than --max-ops {self.max_ops}; exchange them."
            )

    def draw(self, rng: random.Random, operations: int) -> Example:
        """An example with that many operations, a function of its arguments."""
        raise NotImplementedError

    def operations(self, split: str) -> tuple[int, int]:
        """(least, most) operations of the examples of a split."""
        if split == "ood":
            return self.max_ops, max(self.eval_max_ops, self.max_ops)
        return self.min_ops, self.max_ops

    def title(self, split: str) -> str:
        least, most = self.operations(split)
        words = {"train": "training", "id": "in distribution", "ood": "longer"}[split]
        return f"{words} ({least} … {most} operations)"

    @classmethod
    def trained_on(cls, about: Json) -> str:
        return f" up to {about.get('max_ops')} operations"

    def example(self, split: str, index: int, seed: int) -> Example:
        # Both evaluation sets draw from one word, so that longer examples are the same for all N.
        word = "train" if split == "train" else "eval"
        return self.drawn(word, index, seed, self.operations(split))

    def demo(self) -> Example:
        return self.drawn("demo", 0, 0, (5, 5))

    def drawn(self, word: str, index: int, seed: int, operations: tuple[int, int]) -> Example:
        """Example number `index` of the stream called `word`, (least, most) operations long."""
        rng = random.Random(f"{self.data_key}/{seed}/{word}/{index}")
        size = rng.randint(*operations)
        return replace(self.draw(rng, size), size=size)

    def evaluated(self, given: Json) -> tuple[StateTracking, str]:
        most = given.get("max_ops", given.get("eval_max_ops", self.eval_max_ops))
        least = self.max_ops if most > self.max_ops else min(self.min_ops, most)
        lengths = {"min_ops": least, "max_ops": most}
        return replace(self, **(lengths | given)), "id"

    def sized(self, size: int | None) -> StateTracking:
        size = 4 if size is None else size
        return replace(self, min_ops=size, max_ops=size)
