"""Records of real runs: one JSON line each, with what is needed to trust and to repeat it (read by `run.py report`)."""
from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch


def record(figures: dict, *, device: str, seed: int | None = None) -> dict:
    """`figures` with command, date, source revision, machine and library versions beside them."""
    command = " ".join(["python", Path(sys.argv[0]).name, *sys.argv[1:]])  # no path of this machine
    return {"command": command, "date": datetime.date.today().isoformat(),
            "revision": revision(), "seed": seed, "machine": machine(device), "torch": torch.__version__,
            "python": platform.python_version()} | figures


def machine(device: str) -> str:
    """The card, or the processor and the number of threads in use."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"CPU {platform.machine()}, {torch.get_num_threads()} threads"


def revision() -> str:
    """The commit of the source, "+" where files differ from it; from MINITS_REVISION where there is no repository."""
    root = Path(__file__).parents[2]

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True).stdout

    try:
        changed = git("status", "--porcelain", "--untracked-files=no").strip()
        return git("rev-parse", "--short", "HEAD").strip() + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("MINITS_REVISION", "unknown")
