"""A training from its first step to its last: rates, interrupts, resuming, saving."""

from __future__ import annotations

import errno
import gc
import json
import signal
from contextlib import nullcontext
from pathlib import Path

import pytest
import run as command_line
import torch
from training_helpers import (
    FLAGS,
    QUICK,
    assert_same_bits,
    begin,
    break_loss,
    checkpoints_in,
    metrics_of,
    press_ctrl_c,
    settings,
    silent,
    snapshot,
    train,
    train_step,
)

from minits.training import loop
from minits.training.loop import TrainingError
from minits.training.recipe import learning_rate
from minits.training.stream import POOL, SIGNALS

# -- the schedule ----------------------------------------------------------------------------------


def test_learning_rate_is_constant_until_its_decay_begins():
    chosen = settings(lr=0.4, warmup=4, steps=20, decay=0.5)
    rates = [learning_rate(chosen, step) for step in range(21)]
    assert rates[4:13] == pytest.approx([0.4] * 9)
    assert rates[16] == pytest.approx(0.2)
    assert rates[20] == pytest.approx(0.0)
    constant = settings(lr=0.4, warmup=0, steps=9, decay=0.0)
    assert [learning_rate(constant, step) for step in range(9)] == [0.4] * 9


def test_learning_rate_warms_up_linearly_and_falls_to_zero_as_a_cosine():
    chosen = settings(lr=0.4, warmup=4, steps=20)
    rates = [learning_rate(chosen, step) for step in range(21)]
    assert rates[:5] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4])
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[8] == pytest.approx(0.4 * (1 + 0.5**0.5) / 2)
    assert rates[12] == pytest.approx(0.2)
    assert rates[20] == pytest.approx(0.0)


def test_each_step_uses_and_reports_the_rate_of_the_schedule(tmp_path):
    training, used = begin(tmp_path, steps=5), []
    training.optimizer_step.optimizer.register_step_pre_hook(
        lambda optimizer, *_: used.append(optimizer.param_groups[0]["lr"])
    )
    train(training, silent)
    assert used == [learning_rate(training.settings, step) for step in range(5)]
    assert used == [line["lr"] for line in metrics_of(tmp_path)]


def test_training_lowers_the_loss(tmp_path):
    train(begin(tmp_path, steps=40, warmup=5, batch_size=8), silent)
    first, *_, last = metrics_of(tmp_path)
    assert last["lm_loss"] < first["lm_loss"] / 3
    assert last["thought_loss"] < first["thought_loss"] / 2


def test_evaluation_between_steps_works_with_few_samples_and_changes_no_step(tmp_path):
    plain = begin(tmp_path / "plain", steps=3)
    watched = begin(tmp_path / "watched", steps=3, eval_every=1, eval_samples=10)
    said = []
    train(plain, silent)
    train(watched, said.append)
    assert sum("on 2 samples" in text for text in said) == 2  # a fifth, and not after the last step
    assert_same_bits(snapshot(watched), snapshot(plain))


def test_evaluation_makes_no_graphs_of_compiled_layers(tmp_path, graphs):
    """Its shapes are others, and dynamo gives up after eight graphs."""
    plain, compiled = (begin(tmp_path / str(on), compile=on) for on in (False, True))
    rows = loop.evaluation_rows(plain, plain.task.splits[1], 2)
    assert loop.measure(compiled, rows) == loop.measure(plain, rows) and not graphs
    train_step(compiled, compiled.stream.rows(0))
    assert graphs


# -- resume ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> dict[int, tuple[dict, list[dict]]]:
    """accumulate -> (weights and optimizer, metrics) of a training that nothing disturbed."""
    found = {}
    for accumulate in (1, 2):
        folder = tmp_path_factory.mktemp("whole")
        training = begin(folder, accumulate=accumulate, row_tokens=1)
        assert train(training, silent)
        found[accumulate] = snapshot(training), metrics_of(folder)
    return found


@pytest.fixture
def no_collection(monkeypatch) -> None:
    """Spares a training the look at all objects before it, which takes a third of the time here."""
    monkeypatch.setattr(loop, "objects_frozen", nullcontext)


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("step", [1, POOL - 1, POOL, POOL + 1, QUICK["steps"] - 1])
def test_interrupted_and_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    step, accumulate, tmp_path, uninterrupted
):
    training = begin(tmp_path, accumulate=accumulate, row_tokens=1)
    press_ctrl_c(training, step)
    assert train(training, silent) is False
    assert checkpoints_in(tmp_path) == [f"step-{step:06d}"]
    resumed = begin(tmp_path, accumulate=accumulate, row_tokens=1)
    assert resumed.done == step
    assert_same_bits(snapshot(resumed), snapshot(training))
    assert train(resumed, silent) is True
    weights, metrics = uninterrupted[accumulate]
    assert_same_bits(snapshot(resumed), weights)
    assert metrics_of(tmp_path) == metrics


def test_run_that_crashed_after_its_last_checkpoint_resumes_there_without_repeating_metrics(
    tmp_path, uninterrupted
):
    training = begin(tmp_path, save_every=4)
    break_loss(training, step=7)
    with pytest.raises(TrainingError):
        train(training, silent)
    assert [line["step"] for line in metrics_of(tmp_path)] == [1, 2, 3, 4, 5, 6]
    resumed = begin(tmp_path, save_every=4)
    assert resumed.done == 4
    assert train(resumed, silent)
    weights, metrics = uninterrupted[1]
    assert_same_bits(snapshot(resumed), weights)
    assert metrics_of(tmp_path) == metrics


def test_metrics_line_that_was_cut_off_by_a_crash_does_not_prevent_resuming(tmp_path):
    train(begin(tmp_path, steps=2), silent)
    whole = (tmp_path / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(whole + '{"step": 3, "lm_lo')
    train(begin(tmp_path, steps=4), silent)
    assert [line["step"] for line in metrics_of(tmp_path)] == [1, 2, 3, 4]


# -- interrupts and the garbage collector ----------------------------------------------------------


def test_interrupt_handlers_are_restored_after_training(tmp_path):
    before = [signal.getsignal(number) for number in SIGNALS]
    training = begin(tmp_path, steps=3)
    press_ctrl_c(training, step=1)
    train(training, silent)
    assert [signal.getsignal(number) for number in SIGNALS] == before
    assert {signal.SIGINT, signal.SIGTERM} <= set(SIGNALS)


def test_the_garbage_collector_leaves_alone_what_was_there_before_training(tmp_path):
    """A look at all objects halts the process for 0.1 s and more, at another step in each one."""
    training, seen = begin(tmp_path, no_save=True, log_every=1), []
    train(training, lambda line: seen.append(gc.get_freeze_count()))
    assert min(seen) > 10_000
    assert gc.get_freeze_count() == 0


# -- saving ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keep, kept", [(1, [12]), (2, [10, 12]), (3, [5, 10, 12]), (9, [5, 10, 12])]
)
def test_the_newest_checkpoints_are_kept(keep, kept, tmp_path):
    """By default one more than the newest: who reads that while the next is saved finds it whole."""
    chosen = {} if keep == 2 else {"keep": keep}
    train(begin(tmp_path, save_every=5, **chosen), silent)
    assert checkpoints_in(tmp_path) == [f"step-{step:06d}" for step in kept]


def test_nan_loss_keeps_the_last_checkpoint(tmp_path):
    training = begin(tmp_path, save_every=2)
    break_loss(training, step=4)
    with pytest.raises(TrainingError, match="step 4"):
        train(training, silent)
    assert checkpoints_in(tmp_path) == ["step-000002"]
    assert begin(tmp_path).done == 2


def test_failing_save_leaves_the_previous_checkpoint_whole_and_no_temporary_files(
    tmp_path, monkeypatch
):
    training = begin(tmp_path)
    train_step(training, training.stream.rows(0))
    kept = snapshot(training)
    training.save()
    train_step(training, training.stream.rows(1))

    def disk_full(_state, path, *_) -> None:
        Path(path).write_bytes(b"the first half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", disk_full)
        with pytest.raises(OSError, match="No space left"):
            training.save()
    assert checkpoints_in(tmp_path) == ["step-000001"]
    assert list(tmp_path.rglob("*.tmp")) == []
    resumed = begin(tmp_path)
    assert resumed.done == 1
    assert_same_bits(snapshot(resumed), kept)


KILLED_WHILE_SAVING = """
import os, signal, torch
save, calls = torch.save, []
def killed(state, path, *rest):
    calls.append(path)
    save(state, path, *rest)
    if len(calls) == 2:
        os.truncate(path, 1000)
        os.kill(os.getpid(), signal.SIGKILL)
torch.save = killed
"""


def test_kill_during_a_save_leaves_the_previous_checkpoint_and_resume_finishes_the_run(
    tmp_path, processes
):
    folder = tmp_path / "run"
    flags = ["train", "parity", "--out", str(folder), "--steps", "6", "--save-every", "2", *FLAGS]
    ended = processes.run(tmp_path, flags, before=KILLED_WHILE_SAVING)
    assert ended.codes == [-signal.SIGKILL], ended.stderr
    whole, torn = checkpoints_in(folder)
    assert whole == "step-000002"
    assert torn.startswith("step-000004") and torn.endswith(".tmp")
    assert begin(folder).done == 2
    assert command_line.main([*flags, "--resume"]) == 0
    assert checkpoints_in(folder) == ["step-000004", "step-000006"]
    assert json.loads((folder / "record.json").read_text())["steps"] == 6
    assert [line["step"] for line in metrics_of(folder)] == [1, 2, 3, 4, 5, 6]
