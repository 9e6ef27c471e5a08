"""Records of real runs: a JSON line each, with what is needed to trust and to repeat it."""
import datetime
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch


Record = dict[str, Any]


def record(figures: Record, *, device: str, seed: int | None = None) -> Record:
    """`figures` with command, date, source revision, machine and library versions beside them."""
    program = Path(sys.argv[0]).name  # no path of this machine
    return {
        "command": " ".join(["python", program, *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "revision": revision(),
        "seed": seed,
        "machine": machine(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
    } | figures


def machine(device: str) -> str:
    """The card, or the processor and the number of threads in use."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"CPU {platform.machine()}, {torch.get_num_threads()} threads"


def revision() -> str:
    """The commit of the source, "+" where files differ from it.

    From MINITS_REVISION where there is no repository, or only one of others around a copy of us.
    """
    root = Path(__file__).parents[2]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", __file__)
        if not root.samefile(git("rev-parse", "--show-toplevel")):
            return os.environ.get("MINITS_REVISION", "unknown")
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("MINITS_REVISION", "unknown")
