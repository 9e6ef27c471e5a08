"""The command line: train, infer, eval, bench, report, data. `run.py COMMAND --help` tells more."""
import argparse
import json
import sys
from collections.abc import Sequence
from typing import NoReturn

from minits.cli import bench, data, eval, infer, report, train
from minits.cli.flags import add_options
from minits.cli.streams import make_safe
from minits.methods import METHODS
from minits.tasks import TASKS
from minits.training import distributed
from minits.training.loop import TrainingError

COMMANDS = {
    "train": train,
    "infer": infer,
    "eval": eval,
    "bench": bench,
    "report": report,
    "data": data,
}
TABLES = {"task": TASKS, "method": METHODS}


class Parser(argparse.ArgumentParser):
    """Tells what is wrong in one line, as every other error is told."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} ({self.prog} --help lists what there is)\n")


def make_parser() -> argparse.ArgumentParser:
    """The parser with all commands.

    Each module has WORDS on what it does, `add_arguments`, OPTIONS (whose options it takes) and
    `run`, which takes the flags that were given and returns (figures, exit status).
    """
    parser = Parser(prog="run.py", description=__doc__)
    parser.add_argument("--traceback", action="store_true", help="show tracebacks of errors")
    choices = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        command = choices.add_parser(
            name,
            help=module.WORDS,
            description=module.WORDS.capitalize() + ".",
            epilog=getattr(module, "EPILOG", None),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            argument_default=argparse.SUPPRESS,
        )
        command.add_argument("--traceback", action="store_true", help=argparse.SUPPRESS)
        module.add_arguments(command)
        for kind in module.OPTIONS:
            add_options(command, TABLES[kind], kind)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns the exit status: 0, 1 (training failed), 2 (bad input), 130 (interrupted), 141 (the
    reader of the output has gone).
    """
    make_safe()
    given = vars(make_parser().parse_args(arguments))
    traceback, name = given.pop("traceback"), given.pop("command")
    lead, as_json = distributed.rank() == 0, given.get("json")
    try:
        figures, status = COMMANDS[name].run(given)
        if as_json and lead:
            print(json.dumps(figures), flush=True)
        return status
    except BrokenPipeError:
        sys.stderr.close()
        return 141
    except (ValueError, OSError, TrainingError) as error:
        if traceback:
            raise
        failed = isinstance(error, TrainingError)  # which all processes meet alike
        if lead or not failed:
            print(f"run.py {name}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1 if failed else 2
    except KeyboardInterrupt:
        print(f"run.py {name}: interrupted", file=sys.stderr)
        return 130
