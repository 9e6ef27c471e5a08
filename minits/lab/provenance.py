"""Records of real runs: a JSON line each, with what is needed to trust and to repeat it."""
import datetime
import os
import platform
import re
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch


Record = dict[str, Any]


def record(figures: Record, *, device: str, seed: int | None = None) -> Record:
    """`figures` with command, date, source revision, machine and library versions beside them."""
    program = Path(sys.argv[0]).name
    return {
        "command": shlex.join(["python", program, *map(without_folders, sys.argv[1:])]),
        "date": datetime.date.today().isoformat(),
        "revision": revision(),
        "seed": seed,
        "machine": machine(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
    } | without_paths(figures)


def without_folders(text: str) -> str:
    """A word of a command, or a value: of absolute paths that are there the names alone."""

    def name(found: re.Match) -> str:
        path = Path(found[0])
        return path.name if os.path.exists(path) and path.name else found[0]

    return re.sub(r"(?:^|(?<=[,=]))/[^,=]+", name, text)


def without_paths(value: Any) -> Any:
    """A value without paths of this machine, but for the folder of a run, which must be found."""
    if isinstance(value, dict):
        return {key: each if key == "run" else without_paths(each) for key, each in value.items()}
    return without_folders(value) if isinstance(value, str) else value


def machine(device: str) -> str:
    """The card, or the processor and the number of threads in use."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"CPU {platform.machine()}, {torch.get_num_threads()} threads"


def revision() -> str:
    """The commit of the source, "+" where files differ from it.

    From MINITS_REVISION where there is no repository, or where it is not this project's own.
    """
    root = Path(__file__).parents[2]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    with suppress(OSError, subprocess.CalledProcessError):
        git("ls-files", "--error-unmatch", __file__)
        if root.samefile(git("rev-parse", "--show-toplevel")):
            changed = git("status", "--porcelain", "--untracked-files=no")
            return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    return os.environ.get("MINITS_REVISION", "unknown")
