"""Tasks: each draws `Example(prompt, steps, answer)` from a random generator; `TASKS` is the table of them."""
from __future__ import annotations

import random
from dataclasses import fields, is_dataclass, replace
from typing import Protocol

from minits.supervision import Example
from minits.tasks.parity import Parity
from minits.tasks.vars import Vars


class Task(Protocol):
    """What training and evaluation need of a task: a frozen dataclass whose fields are its options."""

    name: str
    opening: str  # the words that every answer begins with

    def draw(self, rng: random.Random, operations: int) -> Example:
        """An example with that many operations, a function of its arguments."""
        ...


TASKS: dict[str, type] = {"parity": Parity, "vars": Vars}


def make_task(name: str, **options) -> Task:
    """The task called `name`. Raises ValueError naming the tasks there are, or an option the task lacks."""
    if name not in TASKS:
        raise ValueError(f"task {name!r} is not known; the tasks are: {', '.join(TASKS)}.")
    if not is_dataclass(TASKS[name]):  # draw_example seeds with its repr, which must be the same in every process
        raise ValueError(f"task {name}: {TASKS[name].__name__} is no dataclass; put @dataclass(frozen=True) above it.")
    known = {field.name for field in fields(TASKS[name])}
    if lacks := [option for option in options if option not in known]:
        raise ValueError(f"--{lacks[0]}: the task {name} has no such option; leave it out.")
    return TASKS[name](**options)


def draw_example(task: Task, *, seed: int, split: str, index: int, operations: tuple[int, int]) -> Example:
    """Example number `index` of a stream: a function of its arguments alone, so any part can be drawn again.

    operations: (least, most), drawn uniformly.
    """
    rng = random.Random(f"{task}/{seed}/{split}/{index}")
    size = rng.randint(*operations)
    return replace(task.draw(rng, size), size=size)


def extract_answer(text: str, opening: str) -> str:
    """The answer in a generated text: from the last `opening` on (a chain of thought stands before it)."""
    start = text.rfind(opening)
    return (text[start:] if start >= 0 else text).strip()
