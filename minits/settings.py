"""A setting and what it means. Default, bounds and words stand in one place: its dataclass field.

Flags, checks and presets are made from these fields.
"""
from collections.abc import Callable
from dataclasses import MISSING, field, fields
from operator import ge, gt, le
from typing import Any, get_args, get_type_hints

BOUNDS = {"least": (ge, "at least"), "above": (gt, "more than"), "most": (le, "at most")}


def setting(default: Any = MISSING, text: str = "", **about: Any) -> Any:
    """A dataclass field. text: meaning and unit.

    about: least, most (inclusive bounds), above (an exclusive one), choices (all values), empty (an
    empty text is a value, too), positional (an argument, not a flag), free (may be given beside a
    preset).
    """
    return field(default=default, metadata={"text": text, **about})


def check_settings(config: Any, spell: Callable[[str], str] = str) -> Any:
    """`config` itself; raises ValueError for the first setting whose type or value cannot be.

    spell: how messages spell the names: as keys of a file or, with `flag`, as flags.
    """
    hints = get_type_hints(type(config))
    for each in fields(config):
        value, about = getattr(config, each.name), each.metadata
        name, hint = spell(each.name), hints[each.name]
        kinds = get_args(hint) or (hint,)
        whole = type(value) is int and float in kinds  # an int will do for a float
        # Fields that are no `setting` (a hook, say) have no text; they may hold anything.
        if "text" in about and type(value) not in kinds and not whole:
            raise ValueError(f"{name} is {value!r}, which is no value for it.")
        if value is None:
            continue
        choices = about.get("choices")
        if choices and value not in choices:
            known = ", ".join(map(str, choices))
            raise ValueError(f"{name} {value!r} is not known; use one of {known}.")
        for bound, (holds, words) in BOUNDS.items():
            # `not holds`, so that nan fails.
            if bound in about and not holds(value, about[bound]):
                raise ValueError(f"{name} {value}: must be {words} {about[bound]}.")
    return config


def flag(name: str) -> str:
    """How the command line spells a setting."""
    return "--" + name.replace("_", "-")
