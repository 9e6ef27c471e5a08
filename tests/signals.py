"""`python tests/signals.py 200`: signals at random moments of tiny trainings; what each one lost.

Each trial is a training in a process of its own, which gets SIGINT, SIGTERM or SIGHUP at a random
moment, and half of them a second signal after a random delay. Then it is resumed. Counted are
trainings that lost what they should not, went on to other weights than an undisturbed one, or did
not say what they do in time. The processes are forked from one that has imported everything.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import select
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from statistics import median
from typing import Any

sys.path[:0] = [str(Path(__file__).parent.parent)]

import torch
import torch._dynamo  # which an optimizer imports

import run

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STEPS = 14
TRAIN = [
    *["train", "parity", "--device", "cpu", "--batch-size", "4", "--max-ops", "3"],
    *["--eval-max-ops", "4", "--eval-samples", "4", "--max-thought-tokens", "8", "--warmup", "2"],
    *["--steps", str(STEPS), "--save-every", "3", "--eval-every", "5", "--log-every", "5"],
]
IN_TIME = 0.2  # seconds until a signal is answered


def start(arguments: list[str], err: int) -> int:
    """Starts `run.py` with its stderr written to `err`; the process's number."""
    child = os.fork()
    if child:
        return child
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(err, 2)
    sys.stdout, sys.stderr = (os.fdopen(i, "w", buffering=1) for i in (1, 2))
    status = 3
    try:
        status = run.main(arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


class Trial:
    """A training and what it says, with the moments at which it says it."""

    def __init__(self, arguments: list[str]) -> None:
        self.begun = time.monotonic()
        self.ear, mouth = os.pipe()
        self.process = start(arguments, mouth)
        os.close(mouth)
        self.said: list[tuple[float, str]] = []
        self.ended: float | None = None

    def listen(self, until: float = float("inf")) -> None:
        """Takes down what is said until then, or until the process has ended."""
        while self.ended is None and time.monotonic() < until:
            left = min(until - time.monotonic(), 60)
            if not select.select([self.ear], [], [], max(left, 0))[0]:
                continue
            text = os.read(self.ear, 65536).decode(errors="replace")
            if text:
                self.said.append((time.monotonic(), text))
            else:
                self.ended = time.monotonic()
                self.status = os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])
                os.close(self.ear)

    def kill(self, number: int) -> float:
        """Sends a signal; the moment of it."""
        now = time.monotonic()
        os.kill(self.process, number)
        return now

    def answered(self, sent: float) -> float:
        """Seconds from a signal to the next word, or to the end."""
        moments = [when for when, _ in self.said if when >= sent]
        return min([*moments, self.ended]) - sent

    @property
    def text(self) -> str:
        return "".join(text for _, text in self.said)


def weights(folder: Path) -> str:
    """A hash of the newest checkpoint's weights."""
    checkpoint = max((folder / "checkpoints").glob("step-*[0-9]"))
    files = (checkpoint / name for name in ("model.safetensors", "thinking.safetensors"))
    return (
        checkpoint.name + hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    )


def lines(folder: Path) -> int:
    """Steps in metrics.jsonl."""
    file = folder / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def steps_saved(folder: Path) -> int:
    """The step of the newest checkpoint, 0 for none."""
    found = (folder / "checkpoints").glob("step-*[0-9]")
    return max((int(path.name.removeprefix("step-")) for path in found), default=0)


def undisturbed(folder: Path) -> tuple[str, float, float]:
    """Weights at the end, seconds until it has a folder, seconds until its end."""
    trial = Trial([*TRAIN, "--out", str(folder)])
    trial.listen()
    assert trial.status == 0, trial.text
    first = next(when for when, text in trial.said if "run folder" in text)
    return weights(folder), first - trial.begun, trial.ended - trial.begun


def disturbed(
    folder: Path, rng: random.Random, right: str, begin: float, end: float
) -> dict[str, Any]:
    """One trial, and what came of it."""
    trial = Trial([*TRAIN, "--out", str(folder)])
    number, second = rng.choice(SIGNALS), rng.choice((None, rng.choice(SIGNALS)))
    trial.listen(trial.begun + rng.uniform(begin * 0.8, end))
    found: dict[str, Any] = {"signal": number.name, "second": second and second.name}
    if trial.ended is not None:
        return found | {"kind": "over before"}
    before = lines(folder)
    sent = trial.kill(number)
    if second:
        delay = rng.uniform(0, rng.choice((0.03, 0.5)))  # most have saved and ended soon
        found["delay"] = delay
        trial.listen(sent + delay)
        if trial.ended is None:
            at_once = trial.kill(second)
        else:
            second = None
    trial.listen()
    found |= {"status": trial.status, "answered": trial.answered(sent), "before": before}
    done, saved = lines(folder), steps_saved(folder)
    found |= {"done": done, "saved": saved, "text": trial.text[-300:]}
    if second:
        found["ended"] = trial.ended - at_once
        lost = done - saved > 4  # it saves every third step
    else:
        lost = saved < done
    found["kind"] = "lost" if lost else "before the first step" if not done else "kept"
    if (folder / "run.json").exists():
        resumed = Trial([*TRAIN[:2], "--resume", "--out", str(folder)])
        resumed.listen()
        same = resumed.status == 0 and weights(folder) == right
        found |= {"resumed": same, "words": "" if same else resumed.text[-500:]}
        found["left"] = [str(path.relative_to(folder)) for path in folder.rglob("*.tmp")]
    else:
        found["resumed"] = not done  # there is nothing to go on with, and nothing was lost
    return found


def trials(seed: int, number: int) -> list[dict[str, Any]]:
    """`number` trials, one after another."""
    rng, found = random.Random(seed), []
    with tempfile.TemporaryDirectory() as at:
        right, begin, end = undisturbed(Path(at) / "whole")
        for i in range(number):
            found.append(disturbed(Path(at) / str(i), rng, right, begin, end))
    return found


def counted(found: list[dict[str, Any]]) -> dict[str, Any]:
    """What 0 is wanted of, and what happened how often."""
    reached = [each for each in found if each["kind"] != "over before"]
    times = sorted(each["answered"] for each in reached)
    ends = sorted(each["ended"] for each in reached if "ended" in each)
    kinds = [each["kind"] for each in found]
    return {
        "lost": sum(each["kind"] == "lost" for each in reached),
        "resumed to other weights": sum(not each["resumed"] for each in reached),
        "answered late": sum(each > IN_TIME for each in times),
        "halves left after a resume": sum(len(each.get("left", ())) for each in reached),
        "kinds": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
        "signals": {each.name: sum(e["signal"] == each.name for e in reached) for each in SIGNALS},
        "seconds to the answer, median and most": [median(times), times[-1]],
        "seconds from the second signal to the end": ends and [median(ends), ends[-1]],
        "second signals": len(ends),
        "trials": len(found),
    }


def main(number: int = 200, seed: int = 0) -> None:
    """Two processes at a time share the trials."""
    torch.set_num_threads(1)
    ears = []
    for hand in range(2):
        ear, mouth = os.pipe()
        if os.fork() == 0:
            with os.fdopen(mouth, "w") as file:
                json.dump(trials(seed * 2 + hand, number // 2), file)
            os._exit(0)
        os.close(mouth)
        ears.append(ear)
    found = []
    for ear in ears:
        with os.fdopen(ear) as file:
            found += json.load(file)
    for each in found:
        late = each.get("answered", 0) > IN_TIME
        if each["kind"] == "lost" or late or each.get("left") or not each.get("resumed", True):
            print(json.dumps(each))
    print(json.dumps(counted(found), indent=1))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(*map(int, sys.argv[1:]))
