"""Tasks: where examples come from, in splits, and how answers are scored. `TASKS` is the table.

A task of one's own is one file: a frozen dataclass that derives from `Task` (or from
`StateTracking`, as Parity and Vars do), and a line in `TASKS`. Where the tiny model lacks its words
it has `texts`, too.
"""
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

from minits.settings import check_settings, flag
from minits.tasks.gsm import Gsm
from minits.tasks.parity import Parity
from minits.tasks.rows import Rows
from minits.tasks.task import Task, check_dataclass, table
from minits.tasks.two_hop import TwoHop
from minits.tasks.vars import Vars

TASKS: dict[str, type[Task]] = table(Parity, Vars, Rows, Gsm, TwoHop)


def make_task(name: str, *, spell: Callable[[str], str] = flag, **options: Any) -> Task:
    """The task called `name`.

    Raises ValueError as `check_options`, or for a value that cannot be; spell: how its giver spells
    options.
    """
    check_options(name, options, spell)
    task = check_settings(TASKS[name](**options), spell)
    task.check()
    return task


def check_options(
    name: str, options: Iterable[str] = (), spell: Callable[[str], str] = flag
) -> None:
    """Raises ValueError naming the tasks there are, or one of `options` that the task lacks."""
    if name not in TASKS:
        raise ValueError(f"task {name!r} is not known; the tasks are: {', '.join(TASKS)}.")
    check_dataclass(TASKS[name], "task")
    known = {field.name for field in fields(TASKS[name])}
    for option in options:
        if option not in known:
            raise ValueError(f"{spell(option)}: the task {name} has no such option; leave it out.")
