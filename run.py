#!/usr/bin/env python3
"""The command line of minits: train, infer, eval, bench, report, data. `run.py COMMAND --help` lists units and defaults."""
from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import typing

from minits.training import distributed
from minits.cli import commands
from minits.training.recipe import RECIPES, BenchConfig, DataConfig, EvalConfig, InferConfig, ReportConfig, TrainCommand, flag
from minits.tasks import TASKS
from minits.training.loop import TrainingError

COMMANDS = {
    "train": (TrainCommand, commands.train, "train on a task and evaluate, in and beyond the trained lengths"),
    "infer": (InferConfig, commands.infer, "answer prompts and show every thought where it arose"),
    "eval": (EvalConfig, commands.evaluate, "evaluate a trained run on a task"),
    "bench": (BenchConfig, commands.bench, "measure speed beside the limits of the machine"),
    "report": (ReportConfig, commands.report, "print the tables of results, made of the records of real runs"),
    "data": (DataConfig, commands.data, "show an example of a task with its chunks, markers and targets"),
}

EPILOGS = {"train": "recipes (task, model: settings):\n" + "\n".join(
    f"  {task}, {kind}: " + " ".join(f"{flag(key)} {value}" for key, value in recipe.items())
    for (task, kind), recipe in RECIPES.items())}


def add_flags(parser: argparse.ArgumentParser, config: type) -> None:
    """A flag for each field of the dataclass `config`; fields without a default are positional.

    Flags that are not given are left out of the namespace: the dataclass is the only place that knows a default.
    """
    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        name, text = field.name, field.metadata.get("help", "")
        kind = (typing.get_args(hints[name]) or [hints[name]])[0]  # str for `str` and for `str | None`
        if field.metadata.get("positional"):
            parser.add_argument(name, nargs="?", metavar=name.upper(), help=text)
        elif field.default is dataclasses.MISSING:
            parser.add_argument(name, metavar=name.upper(), help="one of: " + ", ".join(TASKS))
        elif kind is bool:
            parser.add_argument(flag(name), action="store_true", help=text)
        else:
            shown = "" if field.default is None else f" (default: {field.default})"
            parser.add_argument(flag(name), type=kind, metavar=kind.__name__.upper(), help=text + shown)


def make_parser() -> argparse.ArgumentParser:
    """The parser with all commands."""
    parser = argparse.ArgumentParser(prog="run.py", description=__doc__)
    parser.add_argument("--traceback", action="store_true", help="show the full traceback of an error")
    choices = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (config, _, text) in COMMANDS.items():
        command = choices.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".",
                                     epilog=EPILOGS.get(name), formatter_class=argparse.RawDescriptionHelpFormatter,
                                     argument_default=argparse.SUPPRESS)
        command.add_argument("--traceback", action="store_true", help=argparse.SUPPRESS)
        add_flags(command, config)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0, 1 (training failed), 2 (bad input), 130 (interrupted)."""
    given = vars(make_parser().parse_args(arguments))
    traceback, name = given.pop("traceback"), given.pop("command")
    config, command, _ = COMMANDS[name]
    try:
        result, status = command(config(**given), frozenset(given))
        if given.get("json") and distributed.rank() == 0:
            print(json.dumps(result), flush=True)
        return status
    except BrokenPipeError:  # the reader (head, less) has gone
        sys.stderr.close()
        return 141
    except (ValueError, OSError, TrainingError) as error:
        if traceback:
            raise
        if distributed.rank() == 0 or not isinstance(error, TrainingError):  # which all processes meet alike
            print(f"run.py {name}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1 if isinstance(error, TrainingError) else 2
    except KeyboardInterrupt:
        print(f"run.py {name}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
