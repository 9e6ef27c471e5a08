"""The samples of a training: a function of (seed, step), whoever draws them and how far ahead."""

from __future__ import annotations

import os
import random
import signal
from contextlib import closing
from multiprocessing import active_children
from pathlib import Path

import pytest
from training_helpers import QUICK, begin, metrics_of, silent, train

from minits.checkpoint.download import finished_checkpoints
from minits.methods import thinking
from minits.training import distributed, loop, step
from minits.training.loop import TrainingError
from minits.training.stream import POOL, SampleStream

LAYOUTS = ["rows", "pack", "long_rows"]


def stream_of(folder: Path, **changes) -> SampleStream:
    return begin(folder, **changes).stream


def numbers(stream: SampleStream, step: int) -> list[int]:
    """The numbers of the samples of a step."""
    return [int(row.name.removeprefix("training row ")) for row in stream.rows(step)]


def test_training_rows_are_a_function_of_seed_and_step(tmp_path):
    stream, other = stream_of(tmp_path), stream_of(tmp_path)
    in_order = [stream.rows(step) for step in range(3 * POOL)]
    steps = list(range(3 * POOL))
    random.Random(0).shuffle(steps)
    assert all(other.rows(step) == in_order[step] for step in steps[:8])
    another_seed = stream_of(tmp_path, seed=1)
    assert all(another_seed.rows(step) != in_order[step] for step in steps[:3])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_row_of_the_stream_is_trained_on_exactly_once(layout, tmp_path):
    stream = stream_of(tmp_path, layout=layout)
    found = [number for step in range(2 * POOL) for number in numbers(stream, step)]
    assert sorted(found) == list(range(2 * POOL * QUICK["batch_size"]))


@pytest.mark.parametrize("layout", ["pack", "long_rows"])
def test_the_steps_of_a_pool_have_about_as_many_operations(layout, tmp_path):
    stream = stream_of(tmp_path, layout=layout, batch_size=20, max_ops=40)
    sizes = [[stream.example(i).size for i in numbers(stream, step)] for step in range(POOL)]
    totals = [sum(each) for each in sizes]
    assert max(totals) - min(totals) <= 40
    assert all(each != sorted(each) for each in sizes)  # dealt, but not in an order


@pytest.mark.parametrize("layout", LAYOUTS)
def test_processes_share_a_step_about_evenly_and_without_overlap(layout, tmp_path, monkeypatch):
    def samples() -> list[list[int]]:
        stream = stream_of(tmp_path, layout=layout, batch_size=24, max_ops=40)
        return [numbers(stream, step) for step in range(POOL + 1)]

    whole, shares = samples(), []
    example = stream_of(tmp_path, max_ops=40).example
    monkeypatch.setattr(distributed, "join", lambda device: None)
    monkeypatch.setattr(step, "DistributedDataParallel", lambda module, **_: module)
    monkeypatch.setattr(distributed, "world", lambda: 3)
    for rank in range(3):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        shares.append(samples())
    for all_of_it, *parts in zip(whole, *shares):
        assert sorted(sum(parts, [])) == sorted(all_of_it)
        operations = [sum(example(i).size for i in part) / len(part) for part in parts]
        assert max(operations) - min(operations) <= 2


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n", [3, 4])  # samples; a process may have fewer than parts were asked for
def test_only_short_rows_of_one_sample_make_fewer_parts_than_asked_for(layout, n, tmp_path):
    training = begin(tmp_path, layout=layout, accumulate=4, row_tokens=64, max_ops=5)
    counts = set()
    for number in range(16):
        rows = training.stream.rows(number)[:n]
        parts = training.stream.parts(rows)
        longest = max(len(row.ids) for row in rows)
        due = -(-4 * longest // 64) if layout == "rows" else 4
        assert len(parts) == min(due, n)
        answers = sum(len(row.ids) - row.prompt_length for row in rows)
        assert sum(part.counts[0] for part in parts) == answers
        counts.add(len(parts))
    assert len(counts) > 1 if layout == "rows" else counts == {n}


def test_baselines_differ_only_in_the_steps_written_before_the_answer(tmp_path):
    samples = [stream_of(tmp_path / method, method=method).rows(0) for method in ("no-cot", "cot")]
    for plain, chain in zip(*samples):
        assert plain.thoughts == chain.thoughts == []
        assert chain.ids[: plain.prompt_length] == plain.ids[: plain.prompt_length]
        answer = plain.ids[plain.prompt_length :]
        assert chain.ids[-len(answer) :] == answer
        assert len(chain.ids) > len(plain.ids)


# -- drawn ahead -----------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("first", [0, 3, POOL, 2 * POOL - 1])
def test_the_samples_made_ahead_are_those_of_the_steps(first, workers, tmp_path):
    stream, end = stream_of(tmp_path), 2 * POOL + 3
    stream.workers = workers
    found = [rows for rows, parts in stream.ahead(first, end)]
    assert found == [stream.rows(step) for step in range(first, end)]


def test_the_worker_that_draws_samples_ends_with_the_training_and_ignores_signals_to_the_group(
    tmp_path,
):
    stream = stream_of(tmp_path)
    stream.workers = 1
    with closing(stream.ahead(0, 100 * POOL)) as batches:
        next(batches)
        (worker,) = active_children()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(worker.pid, number)
        assert all(rows for rows, _ in (next(batches) for _ in range(4 * POOL)))
    assert not active_children()


def test_a_worker_that_dies_ends_the_training_with_a_reason(tmp_path, monkeypatch):
    training, ours = begin(tmp_path, steps=POOL), os.getpid()
    training.stream.workers = 1

    def die(*_arguments, **_options) -> None:
        assert os.getpid() != ours
        os._exit(3)

    monkeypatch.setattr(thinking, "encode_example", die)
    with pytest.raises(TrainingError, match="exited unexpectedly.*--resume"):
        train(training, silent)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_among_later_samples_stops_the_run_with_its_reason_and_the_metrics_so_far(
    workers, tmp_path, monkeypatch
):
    training, encode = begin(tmp_path), thinking.encode_example
    training.stream.workers = workers
    bad = f"training row {4 * (POOL + 2)}"

    def fail_late(example, tokenizer, config, name):
        if name == bad:
            raise ValueError(f"{name} does not fit")
        return encode(example, tokenizer, config, name)

    monkeypatch.setattr(thinking, "encode_example", fail_late)
    with pytest.raises(ValueError, match=f"^{bad} does not fit$"):
        train(training, silent)
    assert not active_children()  # a worker that lived on would be waited for at the end
    assert [line["step"] for line in metrics_of(tmp_path)] == [*range(1, POOL + 1)]
    # Hours of training are not lost to one row.
    assert [path.name for path in finished_checkpoints(tmp_path)] == [f"step-{POOL:06d}"]


def test_a_sample_that_does_not_fit_is_told_where_saving_fails_too(tmp_path, monkeypatch):
    training, encode, said = begin(tmp_path), thinking.encode_example, []

    def fail_late(example, tokenizer, config, name):
        if name == f"training row {4 * POOL}":
            raise ValueError(f"{name} does not fit")
        return encode(example, tokenizer, config, name)

    def full(*_arguments):
        raise OSError("no space; make room")

    monkeypatch.setattr(thinking, "encode_example", fail_late)
    monkeypatch.setattr(loop, "save_checkpoint", full)
    with pytest.raises(ValueError, match="does not fit$"):
        train(training, said.append)
    assert said[-1] == f"stopped after step {POOL}; no space; make room"
