"""The command line: train, infer, eval, bench, report, data. `run.py COMMAND --help` tells more."""
import argparse
import errno
import json
import os
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from minits.checkpoint.files import printable
from minits.cli import bench, data, eval, infer, report, train
from minits.settings import flag
from minits.training import distributed
from minits.training.loop import TrainingError
from minits.training.session import ran_out

COMMANDS = {
    "train": train,
    "infer": infer,
    "eval": eval,
    "bench": bench,
    "report": report,
    "data": data,
}
# What errors of files do not say.
ADVICE = dict.fromkeys(
    (errno.EACCES, errno.EPERM, errno.EROFS),
    ". Change who may read and write there, or name another place.",
)
ADVICE[errno.ENOSPC] = ". Make room, or name another place."
LONGEST = 1000  # characters of a message; the middle of a longer one is left out


class Parser(argparse.ArgumentParser):
    """Tells what is wrong in one line, as every other error is told."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {one_line(message)} ({self.prog} --help lists what there is)\n")


def make_parser() -> argparse.ArgumentParser:
    """The parser with all commands.

    Each module has a DESCRIPTION, `add_arguments` and `run`, which takes the flags that were given
    and returns (figures, exit status). --json prints the figures, where there are any.
    """
    parser = Parser(prog="run.py", description=__doc__)
    parser.add_argument("--traceback", action="store_true", help="show tracebacks of errors")
    choices = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        command = choices.add_parser(
            name,
            help=module.DESCRIPTION,
            description=module.DESCRIPTION.capitalize() + ".",
            epilog=getattr(module, "EPILOG", None),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            argument_default=argparse.SUPPRESS,
        )
        command.add_argument("--traceback", action="store_true", help=argparse.SUPPRESS)
        module.add_arguments(command)
        command.set_defaults(parser=command)
    return parser


def one_line(message: object) -> str:
    """A message on one line, its middle left out where it is very long."""
    return printable(" ".join(str(message).split()), LONGEST)


def with_flags(message: object, parser: argparse.ArgumentParser) -> str:
    """A message of the library, on one line, with settings spelled as the command's flags.

    One about a file of ours stays as it is: there the name is that of a key.
    """
    text, flags = one_line(message), parser.format_help()
    if re.search(r"\b(run|thinking|config)\.json", text):
        return text

    def spelled(found: re.Match) -> str:
        return flag(found[0]) if flag(found[0]) in flags else found[0]

    # A word with an underscore in it, but no part of a path.
    return re.sub(r"(?<![\w/.-])[a-z]+(_[a-z]+)+(?!\w|[/.-]\w)", spelled, text)


def make_streams_safe() -> None:
    """Output fails only where the disk is full or the reader has gone.

    Each line is shown at once; characters that an encoding lacks become ?. A closed stream takes
    all and shows nothing.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace", line_buffering=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns the exit status: 0, 1 (training failed), 2 (bad input), 130 (interrupted), 141 (the
    reader of the output has gone).
    """
    make_streams_safe()
    name = "(starting)"
    try:
        known, others = make_parser().parse_known_args(arguments)
        if others:  # told by the command's own parser, whose help lists its flags
            known.parser.error(f"unrecognized arguments: {' '.join(others)}")
        given = vars(known)
        traceback, name, parser = (given.pop(key) for key in ("traceback", "command", "parser"))
        lead, as_json = distributed.rank() == 0, given.get("json")
        figures, status = COMMANDS[name].run(given)
        if as_json and lead and figures:
            print(json.dumps(figures))
        return status
    except BrokenPipeError:
        sys.stderr.close()
        return 141
    except (ValueError, OSError, TrainingError) as error:
        if traceback:
            raise
        failed = isinstance(error, TrainingError)  # which all processes meet alike
        advice = ADVICE.get(getattr(error, "errno", None), "")
        if lead or not failed:
            print(f"run.py {name}: {with_flags(error, parser)}{advice}", file=sys.stderr)
        return 1 if failed else 2
    except (MemoryError, RuntimeError) as error:
        if traceback or not ran_out(error):
            raise
        less = "Shorter prompts, a smaller --batch-size or --dtype bfloat16 need less."
        print(f"run.py {name}: no memory left ({one_line(error)}). {less}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"run.py {name}: interrupted", file=sys.stderr)
        return 130
