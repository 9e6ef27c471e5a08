"""What stops a training without losing it: signals, at whatever moment, and output that fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from training_helpers import (
    FLAGS,
    ROOT,
    Ended,
    Processes,
    assert_same_bits,
    begin,
    checkpoints_in,
    metrics_of,
    silent,
    snapshot,
    train,
)

from minits.training import loop, run_folder
from minits.training.loop import TrainingError
from minits.training.stopping import SIGNALS, Stop

LINUX = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@LINUX
def test_signals_at_random_moments_lose_nothing():
    """A small version of what `python tests/signals.py 200` does."""
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "signals.py", "4", "1"],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    found = json.loads(done.stdout[done.stdout.index("{\n") :])
    assert found["trials"] == 4 and sum(found["signals"].values()) > 0
    names = ("lost", "resumed to other weights", "halves left after a resume")
    assert {name: found[name] for name in names} == dict.fromkeys(names, 0), done.stdout


# -- answers within a slow step --------------------------------------------------------------------

# One instruction of Python that lasts for more than a second, in the third step. A thread sends
# signals meanwhile.
SLOW_STEP = """
import os, sys, threading, time, torch
from minits.training import loop

torch.set_num_threads(1)
take = loop.take_step
one = torch.ones(1000, 1000)
one @ one
started = time.perf_counter()
one @ one
size = int(1000 * (2.0 / (time.perf_counter() - started)) ** (1 / 3))
slow = torch.ones(min(size, 9000), min(size, 9000))

def send():
    for number in {signals}:
        time.sleep(0.4)
        os.kill(os.getpid(), number)

def take_slowly(training, *batch):
    if training.done == 2:
        threading.Thread(target=send).start()
        slow @ slow
        print("over", file=sys.stderr, flush=True)
    return take(training, *batch)

loop.take_step = take_slowly
"""


def disturb(folder: Path, processes: Processes, *signals: int) -> Ended:
    """A training in `folder` that gets `signals` within its slow third step."""
    flags = ["train", "parity", "--out", str(folder), "--steps", "9", "--save-every", "2", *FLAGS]
    before = SLOW_STEP.format(signals=[int(number) for number in signals])
    return processes.run(folder.parent, flags, before=before)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_is_answered_within_a_slow_step_and_the_step_is_saved(
    number, tmp_path, processes
):
    ended = disturb(tmp_path / "run", processes, number)
    _, answer, over, last = ended.stderr.split("\n", 1)[1].splitlines()
    assert answer.startswith("stopping after this step and saving; once more: stop now")
    assert over == "over" and last.startswith("interrupted after step 3; continue with")
    assert ended.codes == [130]
    assert checkpoints_in(tmp_path / "run") == ["step-000002", "step-000003"]


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_of_any_kind_ends_a_slow_step_at_once(second, tmp_path, processes):
    ended = disturb(tmp_path / "run", processes, signal.SIGINT, second)
    *_, first, last = ended.stderr.splitlines()
    assert first.startswith("stopping after this step")
    assert last.startswith("stopped at once") and "--resume" in last
    assert ended.codes == [130]
    assert checkpoints_in(tmp_path / "run") == ["step-000002"]
    assert begin(tmp_path / "run", steps=9).done == 2


# -- the handlers ----------------------------------------------------------------------------------


def test_the_same_signal_twice_in_a_moment_is_one_call():
    """A terminal that closes sends SIGHUP twice, from the shell and from the kernel."""
    said = []
    with Stop(said.append) as stop:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
    assert stop.asked and len(said) == 1 and said[0].startswith("stopping after this step")


def test_signals_that_were_ignored_stay_ignored():
    """`nohup` starts a process so that it outlives its terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stop(silent) as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert not stop.asked
    finally:
        signal.signal(signal.SIGHUP, before)


def test_afterwards_handlers_and_wakeup_are_those_from_before():
    handlers = [signal.getsignal(number) for number in SIGNALS]
    with Stop(silent):
        pass
    assert [signal.getsignal(number) for number in SIGNALS] == handlers
    assert signal.set_wakeup_fd(-1) == -1


# -- a signal while saving and evaluating ----------------------------------------------------------


def test_a_signal_within_the_last_save_does_not_cut_it(tmp_path, monkeypatch):
    training, save, said = begin(tmp_path, steps=3), torch.save, []

    def interrupted(*arguments):
        os.kill(os.getpid(), signal.SIGINT)
        save(*arguments)

    monkeypatch.setattr(torch, "save", interrupted)
    with Stop(said.append) as stop:
        train(training, silent, stop)
    assert stop.asked and len(said) == 1
    assert_same_bits(snapshot(begin(tmp_path, steps=3)), snapshot(training))


@pytest.mark.parametrize("error", [None, RuntimeError])
def test_a_signal_leaves_an_evaluation_between_steps_and_the_training_is_saved(
    error, tmp_path, monkeypatch
):
    """What the interrupt comes out as, a graph's error say, does not matter."""
    training = begin(tmp_path, steps=9, eval_every=2)

    def interrupted(*_, **__):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        except KeyboardInterrupt:
            raise error if error else KeyboardInterrupt

    monkeypatch.setattr(loop, "predict", interrupted)
    started = time.monotonic()
    assert train(training, silent) is False
    assert time.monotonic() - started < 30
    assert training.done <= 3 and begin(tmp_path, steps=9).done == training.done


def test_an_error_of_an_evaluation_is_none_of_an_interrupt(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "predict", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(begin(tmp_path, steps=9, eval_every=2), silent)


# -- output ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        BrokenPipeError(32, "Broken pipe"),
        OSError(5, "Input/output error"),
        UnicodeEncodeError("ascii", "…", 0, 1, "ordinal not in range(128)"),
    ],
    ids=["reader gone", "terminal gone", "character lacking"],
)
def test_a_training_whose_output_fails_is_saved_and_goes_on(error, tmp_path):
    def fail(text: str) -> None:
        if text.startswith("step 4/"):
            raise error

    training = begin(tmp_path, log_every=1)
    with pytest.raises(TrainingError, match=r"cannot be written .* after step \d, all is saved"):
        train(training, fail)
    assert 4 <= training.done <= 5
    whole, resumed = begin(tmp_path / "whole", log_every=1), begin(tmp_path, log_every=1)
    assert resumed.done == training.done
    train(whole, silent)
    train(resumed, silent)
    assert_same_bits(snapshot(resumed), snapshot(whole))
    assert metrics_of(tmp_path) == metrics_of(tmp_path / "whole")


def test_metrics_that_cannot_be_written_do_not_lose_the_training(tmp_path, monkeypatch):
    class Full(loop.StringIO):
        def write(self, text: str) -> int:
            if '"step": 6' in text:
                raise OSError(28, "No space left on device")
            return super().write(text)

    training, opened = begin(tmp_path, log_every=1), Path.open

    def full(path: Path, *how, **more):
        return Full() if path.name == "metrics.jsonl" else opened(path, *how, **more)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(TrainingError, match="No space left on device"):
        train(training, silent)
    monkeypatch.undo()
    assert checkpoints_in(tmp_path) == [f"step-{training.done:06d}"]


def test_lines_of_metrics_are_kept_by_their_step(tmp_path):
    """A full disk may have lost one."""
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(f'{{"step": {step}}}\n' for step in (1, 2, 4, 5, 6)) + '{"st')
    run_folder.keep_metrics(file, 5)
    assert [line["step"] for line in metrics_of(tmp_path)] == [1, 2, 4, 5]


def test_train_piped_into_head_saves_and_tells_so_in_one_line(tmp_path):
    flags = [*FLAGS, "--steps", "60", "--log-every", "1"]
    out = tmp_path / "run"
    train_it = [sys.executable, ROOT / "run.py", "train", "parity", "--out", out, *flags]
    process = subprocess.Popen(
        train_it, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=0
    )
    assert process.stdout.readline().startswith("step 1/60")
    process.stdout.close()
    err = process.stderr.read()
    process.wait()
    remarks = [line for line in err.splitlines() if "WARNING" not in line]
    assert process.returncode == 1 and "Exception" not in err and "Traceback" not in err
    assert len(remarks) == 3 and "output cannot be written ([Errno 32]" in remarks[-1], err
    assert checkpoints_in(out) != []
