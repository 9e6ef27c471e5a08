"""How the tests of the command line call it, and the commands that most of them begin with."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import run

ROOT = Path(__file__).parents[1]
PROMPT = "The coin starts at state heads. Alice flips the coin. Bob doesn't flip the coin."
SHORT = "--batch-size 4 --eval-samples 4 --eval-max-ops 12 --max-thought-tokens 4".split()
FAST = ["--max-new-tokens", "6", "--max-thought-tokens", "4"]
QUICK = ["train", "parity", "--steps", "3", *SHORT]
TRAIN = ["train", "parity", "--steps", "1", *SHORT]
INFER = ["infer", "--run", "trained"]
EVAL = [
    *["eval", "parity", "--run", "trained", "--samples", "2"],
    *["--max-ops", "12", "--max-thought-tokens", "4"],
]


def call(*arguments: Any) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of run.py, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = run.main([str(each) for each in arguments])
        except SystemExit as stop:  # argparse's way out
            status = stop.code
    return status, out.getvalue(), err.getvalue()


def result(out: str) -> dict[str, Any]:
    """The JSON object on the last line of stdout."""
    return json.loads(out.splitlines()[-1])


def without_seconds(answer: dict[str, Any]) -> dict[str, Any]:
    """What `infer --json` says of a prompt, less the time that it took."""
    return {key: value for key, value in answer.items() if key != "seconds"}
