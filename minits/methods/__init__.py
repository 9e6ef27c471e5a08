"""Methods: how a model is trained on examples and how it answers. `METHODS` is the table.

A method of one's own is one file: a frozen dataclass that derives from `Method`, and a line here.
"""
from collections.abc import Callable
from typing import Any

from minits.methods.coconut import Coconut
from minits.methods.icot import ICoT
from minits.methods.method import Method
from minits.methods.pause import Pause
from minits.methods.plain import CoT, NoCoT
from minits.methods.thinking import Thinking
from minits.settings import check_settings, flag
from minits.tasks.task import check_dataclass, table

METHODS: dict[str, type[Method]] = table(Thinking, NoCoT, CoT, ICoT, Coconut, Pause)


def make_method(name: str, *, spell: Callable[[str], str] = flag, **options: Any) -> Method:
    """The method called `name`. Raises ValueError naming the methods there are, or an option.

    spell: how its giver spells options.
    """
    if name not in METHODS:
        known = ", ".join(METHODS)
        raise ValueError(f"{spell('method')} {name!r} is not known; use one of {known}.")
    check_dataclass(METHODS[name], "method")
    return check_settings(METHODS[name](**options), spell)
