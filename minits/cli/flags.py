"""Flags from dataclass fields: their names, types, defaults, choices and words."""
import argparse
import sys
from collections.abc import Iterable
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from pathlib import Path
from tempfile import TemporaryFile
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from minits.checkpoint.files import present
from minits.methods import METHODS
from minits.settings import check_settings, flag, setting
from minits.tasks import TASKS
from minits.training.recipe import names_of, pop_fields

# (a setting, its value): the flags that do nothing then. None: not given; True: given.
IDLE = {
    ("prefill", "sequential"): "draft lookahead",
    ("model", None): "revision",
    ("model", "tiny"): "revision",
    ("file", None): "batch_size",
    ("stream", True): "batch_size",
    ("json", True): "stream table",
    ("teacher_url", None): "teacher_model teacher_threads",
    ("ask_model", False): "device dtype",
    ("ask_model", True): "split index samples seed ops teacher_url",
    ("removal", "steps"): "smoothing",
    ("layout", "rows"): "row_tokens",
    ("no_save", True): "save_every save_dtype keep",
    ("facts", None): "fact_repeats fact_thoughts",
    ("valid", True): "valid_share",
}
# A method that does not think has no loss of T, and nothing is taken from or added to its layers.
IDLE |= {
    ("method", name): "thought_weight inject_after extract_after"
    for name, method in METHODS.items()
    if not method.thinks
}

SET_BY_FLAGS = {bool, int, float, str, NoneType}
Given = dict[str, Any]  # the flags that were given, by the names of their settings


def note(text: str) -> None:
    """A line for the person at the terminal that is not part of the result."""
    print(text, file=sys.stderr)


def check_new_file(
    out: str | None, grows: bool = False, name: str = "--out", kind: str = "file"
) -> None:
    """Raises ValueError where the file of the flag `name` cannot be written.

    grows: an existing file is continued. kind: what the flag names.
    """
    if not out:
        return
    if present(Path(out)) and not grows:
        raise ValueError(f"{name} {out} exists. Nothing is overwritten: name another {kind}.")
    try:  # before any work that would be lost
        TemporaryFile(dir=Path(out).absolute().parent).close()
    except OSError as error:
        raise ValueError(
            f"{name} {out}: its folder does not exist, or takes no file ({error.strerror}); make "
            f"it first, or name another {kind}."
        ) from error


@dataclass(frozen=True)
class Output:
    """How a command gives its result."""

    json: bool = setting(False, "make the last line of stdout one JSON object")


@dataclass(frozen=True)
class Weights:
    """Where weights come from."""

    model: str | None = setting(None, "model folder or hub id")
    revision: str | None = setting(None, "branch, tag or commit of a hub id")


def add_flags(parser: Any, config: type, omit: Iterable[str] = ()) -> None:
    """A flag for each setting of the dataclass `config` but those called `omit`."""
    for each in fields(config):
        if each.name not in omit and "text" in each.metadata:
            add_flag(parser, each, get_type_hints(config)[each.name])


def add_flag(parser: Any, each: Field, hint: Any) -> None:
    """The flag of one setting.

    One that is not given is left out of the namespace: the dataclass alone knows a default.
    """
    about, default = each.metadata, each.default
    kind = kind_of(hint)
    choices, text = about.get("choices"), about["text"]
    name = flag(each.name)
    if about.get("positional"):
        # argparse checks even a suppressed default against the choices (Python 3.11).
        name, how = each.name, {"nargs": "?", "metavar": each.name.upper()}
        known = TASKS if each.name == "task" else choices
        text += f"; one of {', '.join(known)}" if known else ""
        how["default"] = default if choices else argparse.SUPPRESS
    elif kind is bool:
        parser.add_argument(name, action="store_true", help=text)
        return
    elif kind is list:
        how = {"action": "append", "type": not_empty, "metavar": "STR"}
    else:
        full = kind is str and not about.get("empty")
        metavar = None if choices else kind.__name__.upper()
        how = {"type": not_empty if full else kind, "metavar": metavar}
    text += "" if default is None else f" (default: {default})"
    parser.add_argument(name, help=text, choices=choices, **how)


def kind_of(hint: Any) -> type:
    """What a flag takes for a setting of this type: str for `str` and for `str | None`."""
    return (get_args(hint) or [hint])[0]


def not_empty(text: str) -> str:
    """What was given to a flag; an empty text, which would pass for none at all, is refused."""
    if not text:
        raise argparse.ArgumentTypeError("an empty text was given; leave the flag out, or fill it")
    return text


def add_options(parser: argparse.ArgumentParser, table: dict[str, type], kind: str) -> None:
    """The options of all tasks or methods in `table`, each flag once, under those who have it.

    Raises TypeError for an option that no flag can set, or whose flag has another meaning already.
    """
    owners: dict[str, list[str]] = {}
    for name, each in table.items():
        # A task that is no dataclass yet must not stop the others: `check_options` tells of it.
        for option in fields(each) if is_dataclass(each) else ():
            if "text" not in option.metadata:
                continue  # it has no flag
            check_flag(f"{kind} {name}", option, get_type_hints(each)[option.name])
            having = owners.setdefault(option.name, [])
            if having and form_of(each, option.name) != form_of(table[having[0]], option.name):
                raise TypeError(
                    f"{kind} {name}: its option {option.name} takes other values than that of "
                    f"{having[0]}, and they share a flag; rename it."
                )
            having.append(name)
    for names in dict.fromkeys(map(tuple, owners.values())):
        group = parser.add_argument_group(f"options of the {kind} {', '.join(names)}")
        theirs = [option for option, having in owners.items() if tuple(having) == names]
        owner = table[names[0]]
        try:
            add_flags(group, owner, names_of(owner).difference(theirs))
        except argparse.ArgumentError as error:
            raise TypeError(
                f"{kind} {', '.join(names)}: {error}: the command has such a flag already; rename "
                "the option."
            ) from error


def check_flag(owner: str, option: Field, hint: Any) -> None:
    """Raises TypeError for an option that a flag cannot set, or sets to what it is anyway."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    bare = option.default is True or option.default is MISSING
    if bare or not {*kinds} <= SET_BY_FLAGS:
        raise TypeError(
            f"{owner}: no flag can set its option {option.name}, whose type is {hint}. It must be "
            "a bool that is False by default, or an int, float, str or None with any default. "
            "Change it, or make it a plain field, which has no flag."
        )


def form_of(owner: type, option: str) -> tuple[type, Any]:
    """What the flag of an option of a task or method takes: (type, the values there are)."""
    choices = owner.__dataclass_fields__[option].metadata.get("choices")
    return kind_of(get_type_hints(owner)[option]), choices


def take(given: Given, config: type) -> Any:
    """The settings of `config` among the flags that were given, which are taken out of them.

    Raises ValueError for a value that cannot be, or for a flag that would do nothing.
    """
    mine = pop_fields(given, config)
    return check_idle(check_settings(config(**mine), flag), mine)


def check_idle(found: Any, given: Given) -> Any:
    """The settings `found` themselves; raises ValueError for a given one that is IDLE there."""
    for (other, value), names in IDLE.items():
        now = getattr(found, other, "")  # "": these settings have no such one
        idle = [name for name in names.split() if name in given]
        if idle and (bool(now) if value is True else now == value):
            how = "with" if value else "without"
            shown = f" {value}" if isinstance(value, str) else ""
            which = "one of them" if other in given else "it"
            raise ValueError(
                f"{flag(idle[0])} does nothing {how} {flag(other)}{shown}; leave {which} out."
            )
    return found
