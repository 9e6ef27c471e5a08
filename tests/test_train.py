"""The loss, a training step, and checkpoints: what may not change them, and what may not break them."""
from __future__ import annotations

import errno
import gc
import json
import os
import random
import signal
import subprocess
import sys
from contextlib import closing
from math import isfinite
from multiprocessing import active_children
from pathlib import Path

import pytest
import run as command_line
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from strategies import Shape, build, fresh, shapes, training_rows

import minits.training.step
from minits.fast import cross_entropy as loss
from minits.training import stream
from minits.training.recipe import TrainConfig, resolve_train
from minits.supervision import Roomy, Row, collate
from minits.fast.cross_entropy import cross_entropy_sum
from minits.thinking import Losses, ThinkingStates
from minits.training.stream import POOL
from minits.training.loop import (Run, TrainingError, deferred_interrupt, learning_rate, save_checkpoint, set_up, train,
                          train_step)
from minits.checkpoint.weights import load

ROOT = Path(__file__).parent.parent
QUICK = dict(task="parity", steps=12, batch_size=4, max_ops=3, warmup=2, max_thought_tokens=8, log_every=5,
             eval_samples=2, eval_max_ops=4, device="cpu")
FLAGS = [part for key, value in QUICK.items() if key not in ("task", "steps")
         for part in ("--" + key.replace("_", "-"), str(value))]


def settings(**changes) -> TrainConfig:
    """A resolved configuration that trains in about a second."""
    return resolve_train(TrainConfig(**(QUICK | changes)))


def begin(folder: Path, **changes) -> Run:
    """A run in `folder`, gone on with if there is one."""
    folder.mkdir(parents=True, exist_ok=True)
    return set_up(settings(**changes), folder)


def silent(_text: str) -> None:
    """A log that nobody reads."""


def step_on(shape: Shape, rows: list[Row], **changes) -> tuple[Run, dict]:
    """A float64 model of `shape` after one unclipped step on `rows`, and the step's metrics."""
    model = fresh(shape).train()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=0.0)
    run = Run(settings(warmup=0, clip=1e12, **changes), Path(), model, None, None, optimizer)
    return run, train_step(run, rows)


def gradients(model: ThinkingStates) -> dict[str, torch.Tensor]:
    """The gradient of every parameter, zero where there is none."""
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def flat(value, prefix: str = "") -> dict[str, object]:
    """Nested dicts, lists and tuples as one dict of leaves."""
    if isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {k: leaf for key, part in items for k, leaf in flat(part, f"{prefix}/{key}").items()}
    return {prefix: value}


def snapshot(run: Run) -> dict[str, object]:
    """Copies of the weights and of the optimizer's whole state."""
    leaves = flat({"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()["state"]})
    return {name: leaf.detach().clone() for name, leaf in leaves.items()}


def assert_same_bits(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def assert_close(one: dict, other: dict, tolerance: float = 1e-9) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=tolerance, atol=tolerance, msg=lambda m: f"{name}: {m}")


def metrics_of(folder: Path) -> list[dict]:
    """The lines of metrics.jsonl, without the seconds."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def checkpoints_in(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / "checkpoints").iterdir())


# -- the loss ----------------------------------------------------------------------------------------------------------


def sums(model: ThinkingStates, rows: list[Row]) -> torch.Tensor:
    """(answer, thought) losses summed over `rows`, as one tensor."""
    losses = model(collate(rows, model.config))
    return torch.stack([losses.lm, losses.thought])


@given(st.data())
@torch.no_grad()
def test_summed_losses_of_a_batch_are_the_sums_of_its_rows_alone(data):
    shape = data.draw(shapes())
    rows = data.draw(training_rows(shape))
    model = build(shape)
    torch.testing.assert_close(sums(model, rows), sum(sums(model, [row]) for row in rows), rtol=1e-9, atol=1e-9)


@given(st.data())
@torch.no_grad()
def test_summed_losses_do_not_depend_on_row_order(data):
    shape = data.draw(shapes())
    rows = data.draw(training_rows(shape))
    model = build(shape)
    shuffled = data.draw(st.permutations(rows))
    torch.testing.assert_close(sums(model, rows), sums(model, shuffled), rtol=1e-9, atol=1e-9)


@given(st.data())
@torch.no_grad()
def test_summed_losses_do_not_depend_on_padding_by_a_longer_neighbour(data):
    shape = data.draw(shapes())
    rows = data.draw(training_rows(shape))
    model = build(shape)
    length = 6 * shape.chunk_size + 7
    neighbour = Row([3] * length, 1, [[0]] * ((length - 1) // shape.chunk_size))
    apart = sums(model, rows) + sums(model, [neighbour])
    torch.testing.assert_close(sums(model, [*rows, neighbour]), apart, rtol=1e-9, atol=1e-9)


def laid_out(model: ThinkingStates, rows: list[Row], **how) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Summed losses of `rows` in a layout, and the gradients of their sum."""
    model.zero_grad(set_to_none=True)
    losses = model(collate(rows, model.config, **how))
    (losses.lm + losses.thought).backward()
    return torch.stack([losses.lm, losses.thought]).detach(), gradients(model)


@given(st.data())
def test_packing_and_filling_up_change_neither_losses_nor_gradients(data):
    shape = data.draw(shapes(max_chunk=6))
    rows = data.draw(training_rows(shape, rows=6))
    model, sizes = fresh(shape), Roomy()
    losses, grads = laid_out(model, rows)
    width = data.draw(st.integers(1, 60))
    packed = {"layout": "pack", "row_tokens": width}
    for how in (packed, {"sizes": sizes}, packed | {"sizes": sizes}):
        other, other_grads = laid_out(model, rows, **how)
        torch.testing.assert_close(other, losses, rtol=1e-9, atol=1e-9)
        assert_close(other_grads, grads)


def test_batches_of_roomy_sizes_come_to_have_one_shape():
    rng, sizes, config = random.Random(5), Roomy(), Shape().thinking()
    shapes_seen = []
    for _ in range(30):
        rows = [Row([3] * (9 + 4 * k), 5, [[5, 6, 0] if rng.random() < 0.5 else [0] for _ in range((8 + 4 * k) // 4)])
                for k in (rng.randrange(9) for _ in range(16))]
        batch = collate(rows, config, layout="pack", row_tokens=64, sizes=sizes)
        shapes_seen.append(tuple(x.shape for x in batch.tensors))
        exact = collate(rows, config, layout="pack", row_tokens=64)
        assert torch.equal(batch.counts, exact.counts)
    assert len(set(shapes_seen[15:])) == 1


@given(st.integers(1, 3000), st.integers(1, 130))
def test_rows_are_a_little_wider_but_not_of_the_widths_whose_gradients_cudnn_gets_wrong(chunks, chunk_size):
    tokens = chunks * chunk_size
    width = Roomy().width(tokens, chunk_size)
    assert width % chunk_size == 0 and tokens <= width < tokens + 2 * (32 + chunk_size) and width % 128 != 64


def test_rows_that_several_samples_fill_have_one_width_however_long_the_batchs_longest_sample():
    sizes, config = Roomy(), Shape(chunk_size=8).thinking()
    shapes_seen = [collate([Row([3] * length, 5, [[0]] * (length // 8))] * 3, config, layout="pack", row_tokens=32,
                           sizes=sizes).ids.shape for length in (90, 20, 50, 33)]
    assert {shape[1] for shape in shapes_seen} == {96}
    assert [shape[0] for shape in shapes_seen[1:]] == [shapes_seen[0][0]] * 3  # sizes only grow


def test_what_shares_a_long_row_does_not_depend_on_the_batches_before():
    rng, sizes, config = random.Random(7), Roomy(), Shape(chunk_size=8).thinking()
    for longest in (40, 150, 56):
        rows = [Row([3] * rng.randrange(9, longest), 5, []) for _ in range(12)]
        grown, alone = (collate(rows, config, layout="long_rows", row_tokens=64, sizes=some) for some in (sizes, Roomy()))
        assert (grown.ids == 3).sum(1).tolist()[:len(alone.ids)] == (alone.ids == 3).sum(1).tolist()
    assert grown.ids.shape[1] > alone.ids.shape[1]


class FakeGraph:
    """What a CUDA graph does, without CUDA: runs again on the tensors it was recorded on."""

    def __init__(self, run, _pool, restore=lambda: None) -> None:
        for _ in range(2):
            run()
            restore()
        self.replay = run


def pretend_card(monkeypatch, capture=FakeGraph) -> None:
    """Graphs without CUDA: `capture` makes them, and each pool is something new."""
    monkeypatch.setattr(minits.training.step, "capture", capture)
    for name, fake in (("synchronize", lambda: None), ("empty_cache", lambda: None), ("graph_pool_handle", object)):
        monkeypatch.setattr(torch.cuda, name, fake)


@pytest.mark.parametrize("layout", ["rows", "pack", "long_rows"])
def test_steps_through_graphs_are_the_plain_steps_whatever_shapes_come(layout, tmp_path, monkeypatch):
    pretend_card(monkeypatch)
    options = dict(layout=layout, row_tokens=64, steps=16)
    plain, graphed = begin(tmp_path / "plain", **options), begin(tmp_path / "graphed", **options)
    graphed.update.graphs, graphed.stream.sizes = {}, Roomy()
    for step in range(16):
        rows = plain.stream.rows(step)
        assert train_step(graphed, rows) == pytest.approx(train_step(plain, rows), rel=1e-3, abs=1e-6)
    captured = graphed.update.graphs
    assert len(captured) == 1 if layout != "rows" else len(captured) > 1


@pytest.mark.parametrize("layout", ["rows", "pack", "long_rows"])
def test_a_graph_takes_the_place_of_those_that_never_come_again(layout, tmp_path, monkeypatch):
    """All living graphs share a pool, and none gets a pool that all of its own have left."""
    run = begin(tmp_path, layout=layout, row_tokens=64, batch_size=8)
    run.update.graphs, run.stream.sizes = {}, Roomy()
    beside, pools = [], []  # of each capture: the widths of the other graphs, and its pool

    def watched(step, pool) -> FakeGraph:
        beside.append(list(run.update.graphs))
        pools.append(pool)
        return FakeGraph(step, pool)
    pretend_card(monkeypatch, watched)
    *_, longest = rows = sorted(run.stream.rows(0), key=lambda row: len(row.ids))
    for samples in (rows[:1], [longest] * 2, rows[:1] * 20):
        if samples[0] is longest:
            run.stream.sizes.room(256)
        for _ in range(2):
            train_step(run, samples)
    if layout == "rows":
        assert beside == [[], [32], [96]] and pools[0] is pools[1] is pools[2]
    else:
        assert beside == [[], [], []] and len(set(pools)) == 3


def test_training_goes_on_after_a_graph_that_could_not_be_captured(tmp_path, monkeypatch):
    def failing(step, _pool) -> None:
        step()
        raise torch.OutOfMemoryError("no room")
    pretend_card(monkeypatch, failing)
    run, plain = begin(tmp_path / "run"), begin(tmp_path / "plain")
    run.update.graphs = {}
    with pytest.raises(torch.OutOfMemoryError):
        train_step(run, run.stream.rows(0))
    monkeypatch.setattr(minits.training.step, "capture", FakeGraph)
    for step in range(2):
        assert train_step(run, run.stream.rows(step)) == pytest.approx(train_step(plain, plain.stream.rows(step)))
    for ours, theirs in zip(run.model.parameters(), plain.model.parameters()):
        torch.testing.assert_close(ours, theirs)


@given(st.data())
def test_packed_samples_overlap_nowhere_and_start_on_chunk_borders(data):
    shape = data.draw(shapes(max_chunk=6))
    rows = data.draw(training_rows(shape, rows=6))
    width, c = data.draw(st.integers(1, 60)), shape.chunk_size
    batch = collate(rows, shape.thinking(), layout="pack", row_tokens=width)
    for number, row in enumerate(sorted(rows, key=lambda row: -len(row.ids))):
        own = batch.segments.eq(number)
        (b,), places = own.any(1).nonzero().flatten().tolist(), own.nonzero()[:, 1]
        read = len(row.ids) - 1
        start = int(places[0])
        assert start % c == 0 and places.tolist() == list(range(start, start + -(-read // c) * c))
        assert batch.ids[b, start:start + read].tolist() == row.ids[:-1]
        assert batch.positions[b, start:start + read].tolist() == list(range(read))


def test_long_rows_are_one_context_whose_samples_start_on_chunk_borders():
    model = fresh(Shape(layers=3, extract_after=3))
    first, second = Row([3, 4, 5, 6, 7, 8, 0], 4, [[9, 0]]), Row([9, 3, 4, 5, 6, 0], 3, [[0]])
    batch = collate([first, second], model.config, layout="long_rows", row_tokens=16)
    assert batch.ids.tolist() == [[3, 4, 5, 6, 7, 8, 1, 1, 9, 3, 4, 5, 6, 1, 1, 1]]
    assert batch.positions.tolist() == [[*range(16)]]
    assert batch.state_at.tolist() == [1]  # the state of the first sample's thought; none crosses to the second
    together, alone = sums(model, [first]), sums(model, [second])
    long = model(batch)
    assert not torch.allclose(long.lm, (together + alone)[0])  # the second sample sees the first
    only = model(collate([first], model.config, layout="long_rows", row_tokens=16))
    torch.testing.assert_close(torch.stack([only.lm, only.thought]), together, rtol=1e-9, atol=1e-9)


@given(st.data())
def test_gradient_of_a_step_is_that_of_the_rows_summed_losses_over_the_steps_token_counts(data):
    shape = data.draw(shapes())
    rows = data.draw(training_rows(shape))
    accumulate = data.draw(st.sampled_from([1, 2, 4]))
    run, _ = step_on(shape, rows, accumulate=accumulate, thought_weight=0.5)
    model = fresh(shape)
    lm_tokens = sum(len(row.ids) - row.prompt_length for row in rows)
    thought_tokens = sum(len(thought) for row in rows for thought in row.thoughts)
    for row in rows:
        lm, thought = sums(model, [row])
        (lm / lm_tokens + 0.5 * thought / max(thought_tokens, 1)).backward()
    assert_close(gradients(run.model), gradients(model))


@given(st.data())
def test_accumulation_changes_neither_gradient_nor_weights_nor_reported_losses(data):
    shape = data.draw(shapes())
    rows = data.draw(training_rows(shape, rows=6))
    (whole, reported), *split = [step_on(shape, rows, accumulate=n) for n in (1, 2, 4)]
    for run, metrics in split:
        assert_close(gradients(run.model), gradients(whole.model))
        assert_close(run.model.state_dict(), whole.model.state_dict())
        assert metrics == pytest.approx(reported, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("count", [1, 3, 4, 9, 10])
def test_sliced_cross_entropy_equals_the_plain_one_in_value_and_gradient(count, monkeypatch):
    monkeypatch.setattr(loss, "LOGIT_SLICE", 3)
    generator = torch.Generator().manual_seed(count)
    hidden = torch.randn(count, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(7, (count,), generator=generator)
    sliced = cross_entropy_sum(hidden, weight, labels)
    plain = F.cross_entropy(hidden @ weight.T, labels, reduction="sum")
    torch.testing.assert_close(sliced, plain, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(sliced, (hidden, weight)),
                               torch.autograd.grad(plain, (hidden, weight)), rtol=1e-12, atol=1e-12)


def test_the_scale_of_the_loss_is_not_rounded_with_the_gradients():
    hidden, weight = torch.randn(30, 16), torch.randn(99, 16)
    labels, found = torch.arange(30), []
    for count in (1, 1700):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            loss_sum = cross_entropy_sum(h, w, labels)
        (loss_sum / count).backward()
        found.append((h.grad * count, w.grad * count))
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=0)


@given(st.data())
def test_slicing_the_logits_changes_no_gradient_of_a_step(data):
    shape = data.draw(shapes(max_chunk=6))
    rows = data.draw(training_rows(shape))
    whole, _ = step_on(shape, rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss, "LOGIT_SLICE", 2)
        sliced, _ = step_on(shape, rows)
    assert_close(gradients(sliced.model), gradients(whole.model))


def test_unembedding_runs_at_supervised_positions_only_and_a_slice_at_a_time(monkeypatch):
    shape = Shape()
    model = build(shape)
    batch = collate([Row(list(range(3, 23)), 10, [[5, 0], [0], [6, 7, 0], [0]])], model.config)
    seen, linear = [], F.linear

    def spy(x, weight, *bias):
        if weight.shape[0] == shape.vocab:
            seen.append(x.shape[0])
        return linear(x, weight, *bias)

    monkeypatch.setattr(loss, "LOGIT_SLICE", 4)
    monkeypatch.setattr(F, "linear", spy)
    with torch.no_grad():
        model(batch)
    assert max(seen) == 4 and sum(seen) == batch.counts.sum() == 10 + 7


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("case", "rows"), [
    ("all thoughts trivial", [Row(list(range(3, 16)), 8, [[0]] * 3)] * 2),
    ("no complete chunk", [Row([3, 4, 5, 0], 2, [])] * 2),
    ("one row of each kind", [Row([3, 4, 5, 0], 2, []), Row(list(range(3, 16)), 8, [[0], [7, 8, 0], [0]])])])
def test_batch_without_thoughts_or_complete_chunks_gives_finite_loss_and_gradients(case, rows, accumulate):
    run, metrics = step_on(Shape(), rows, accumulate=accumulate)
    assert isfinite(metrics["lm_loss"]) and isfinite(metrics["thought_loss"]) and metrics["grad_norm"] > 0
    assert (metrics["thought_loss"] == 0) == (case == "no complete chunk")
    assert all(p.grad is None or p.grad.isfinite().all() for p in run.model.parameters())
    assert all(p.isfinite().all() for p in run.model.parameters())


# -- baselines ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["no-cot", "cot"])
def test_baselines_have_no_thinking_and_no_compression_block(method, tmp_path):
    run = begin(tmp_path, method=method, steps=2)
    train(run, silent)
    assert run.model.thinking_block is None and run.model.compression_block is None
    assert all(name.startswith("backbone.") for name, _ in run.model.named_parameters())
    assert [line["thought_loss"] for line in metrics_of(tmp_path)] == [0, 0]
    assert not load(tmp_path)[0].thinks


def test_baselines_differ_only_in_the_steps_written_before_the_answer(tmp_path):
    rows = [begin(tmp_path / method, method=method).stream.rows(0) for method in ("no-cot", "cot")]
    for plain, chain in zip(*rows):
        assert plain.thoughts == chain.thoughts == []
        assert chain.ids[:plain.prompt_length] == plain.ids[:plain.prompt_length]
        answer = plain.ids[plain.prompt_length:]
        assert chain.ids[-len(answer):] == answer and len(chain.ids) > len(plain.ids)


# -- data and schedule -------------------------------------------------------------------------------------------------


def test_training_rows_are_a_function_of_seed_and_step(tmp_path):
    run, other = begin(tmp_path), begin(tmp_path)
    in_order = [run.stream.rows(step) for step in range(3 * POOL)]
    steps = list(range(3 * POOL))
    random.Random(0).shuffle(steps)
    assert all(other.stream.rows(step) == in_order[step] for step in steps[:8])
    another_seed = begin(tmp_path, seed=1)
    assert all(another_seed.stream.rows(step) != in_order[step] for step in steps[:3])


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("first", [0, 3, POOL, 2 * POOL - 1])
def test_the_samples_made_ahead_are_those_of_the_steps(first, workers, tmp_path):
    stream = begin(tmp_path, steps=2 * POOL + 3).stream
    stream.workers = workers
    found = [rows for rows, parts in stream.ahead(first)]
    assert found == [stream.rows(step) for step in range(first, 2 * POOL + 3)]


def test_the_worker_that_draws_samples_ends_with_the_training_and_ignores_signals_to_the_group(tmp_path):
    stream = begin(tmp_path, steps=100 * POOL).stream
    stream.workers = 1
    with closing(stream.ahead(0)) as batches:
        next(batches)
        (worker,) = active_children()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(worker.pid, number)
        assert all(rows for rows, _ in (next(batches) for _ in range(4 * POOL)))
    assert not active_children()


def test_a_worker_that_dies_ends_the_training_with_a_reason(tmp_path, monkeypatch):
    run, ours = begin(tmp_path, steps=POOL), os.getpid()
    run.stream.workers = 1
    monkeypatch.setattr(stream, "encode_example", lambda *arguments, **options: os.getpid() == ours or os._exit(3))
    with pytest.raises(TrainingError, match="exited unexpectedly.*--resume"):
        train(run, silent)


@pytest.mark.parametrize("layout", ["rows", "pack", "long_rows"])
def test_every_row_of_the_stream_is_trained_on_exactly_once(layout, tmp_path):
    run = begin(tmp_path, layout=layout)
    names = [row.name for step in range(2 * POOL) for row in run.stream.rows(step)]
    assert sorted(names) == sorted(f"training row {i}" for i in range(2 * POOL * QUICK["batch_size"]))


@pytest.mark.parametrize("layout", ["pack", "long_rows"])
def test_the_steps_of_a_pool_have_about_as_many_operations(layout, tmp_path):
    stream = begin(tmp_path, layout=layout, batch_size=20, max_ops=40).stream
    sizes = [[stream.example(int(row.name.split()[-1])).size for row in stream.rows(step)] for step in range(POOL)]
    totals = [sum(each) for each in sizes]
    assert max(totals) - min(totals) <= 40
    assert all(each != sorted(each) for each in sizes)  # dealt, but not in an order


@pytest.mark.parametrize("layout", ["rows", "pack", "long_rows"])
def test_processes_share_a_step_about_evenly_and_without_overlap(layout, tmp_path, monkeypatch):
    def samples() -> list[list[int]]:
        stream = begin(tmp_path, layout=layout, batch_size=24, max_ops=40).stream
        return [[int(row.name.split()[-1]) for row in stream.rows(step)] for step in range(POOL + 1)]

    whole, shares, example = samples(), [], begin(tmp_path, max_ops=40).stream.example
    monkeypatch.setattr(stream.distributed, "join", lambda device: None)
    monkeypatch.setattr(minits.training.step, "DistributedDataParallel", lambda model, **_: model)
    monkeypatch.setattr(stream.distributed, "world", lambda: 3)
    for rank in range(3):
        monkeypatch.setattr(stream.distributed, "rank", lambda rank=rank: rank)
        shares.append(samples())
    for step, *parts in zip(whole, *shares):
        assert sorted(sum(parts, [])) == sorted(step)
        operations = [sum(example(i).size for i in part) / len(part) for part in parts]
        assert max(operations) - min(operations) <= 2


def test_learning_rate_is_constant_until_its_decay_begins():
    config = settings(lr=0.4, warmup=4, steps=20, decay=0.5)
    rates = [learning_rate(config, step) for step in range(21)]
    assert rates[4:13] == pytest.approx([0.4] * 9) and rates[16] == pytest.approx(0.2) and rates[20] == pytest.approx(0.0)
    assert [learning_rate(settings(lr=0.4, warmup=0, steps=9, decay=0.0), step) for step in range(9)] == [0.4] * 9


def test_learning_rate_warms_up_linearly_and_falls_to_zero_as_a_cosine():
    config = settings(lr=0.4, warmup=4, steps=20)
    rates = [learning_rate(config, step) for step in range(21)]
    assert rates[:5] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4])
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[8] == pytest.approx(0.4 * (1 + 0.5 ** 0.5) / 2) and rates[12] == pytest.approx(0.2)
    assert rates[20] == pytest.approx(0.0)


def test_each_step_uses_and_reports_the_rate_of_the_schedule(tmp_path):
    run = begin(tmp_path, steps=5)
    used = []
    run.optimizer.register_step_pre_hook(lambda optimizer, *_: used.append(optimizer.param_groups[0]["lr"]))
    train(run, silent)
    assert used == [learning_rate(run.config, step) for step in range(5)]
    assert used == [line["lr"] for line in metrics_of(tmp_path)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nearly_all_parameters_change_within_a_few_steps_of_a_small_rate(dtype, tmp_path):
    run = begin(tmp_path, steps=4, lr=1e-5, warmup=0, dtype=dtype)
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    train(run, silent)
    assert {p.dtype for p in run.model.parameters()} == {torch.float32}
    changed = sum(int((p != before[name]).sum()) for name, p in run.model.named_parameters())
    assert changed / sum(p.numel() for p in before.values()) > 0.9


def test_training_lowers_the_loss(tmp_path):
    run = begin(tmp_path, steps=40, warmup=5, batch_size=8)
    train(run, silent)
    lines = metrics_of(tmp_path)
    assert lines[-1]["lm_loss"] < lines[0]["lm_loss"] / 3 and lines[-1]["thought_loss"] < lines[0]["thought_loss"] / 2


def test_evaluation_between_steps_works_with_few_samples_and_changes_no_step(tmp_path):
    plain, watched = begin(tmp_path / "plain", steps=3), begin(tmp_path / "watched", steps=3, eval_every=1)
    train(plain, silent)
    train(watched, silent)
    assert_same_bits(snapshot(watched), snapshot(plain))


# -- a loss that is not finite -----------------------------------------------------------------------------------------


def break_loss(run: Run, step: int) -> None:
    """Makes the answer loss NaN in optimizer step `step`."""
    def spoil(_module, _inputs, losses):
        return Losses(losses.lm * float("nan"), losses.thought) if run.step == step - 1 else losses
    run.model.register_forward_hook(spoil)


def test_nan_loss_stops_with_the_step_and_rows_and_leaves_the_weights_unchanged(tmp_path):
    run = begin(tmp_path)
    break_loss(run, step=3)
    for step in range(2):
        train_step(run, run.stream.rows(step))
    before = snapshot(run)
    rows = run.stream.rows(2)
    with pytest.raises(TrainingError, match=f"^step 3: .*nan.*{rows[0].name} … {rows[-1].name}.*Lower --lr"):
        train_step(run, rows)
    assert run.step == 2
    assert_same_bits(snapshot(run), before)


def test_nan_loss_keeps_the_last_checkpoint(tmp_path):
    run = begin(tmp_path, save_every=2)
    break_loss(run, step=4)
    with pytest.raises(TrainingError, match="step 4"):
        train(run, silent)
    assert checkpoints_in(tmp_path) == ["step-000002"] and begin(tmp_path).step == 2


# -- several processes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [
    ["--batch-size", "7", "--accumulate", "3"], ["--batch-size", "6", "--accumulate", "2", "--chunk-size", "64"]],
    ids=["as many parts on one rank as on the other, or not", "hardly a thought, in some parts and on some rank none"])
def test_two_processes_take_the_steps_of_one(flags, tmp_path):
    folders = [tmp_path / name for name in ("one", "two")]
    steps = ["--steps", "5", "--max-ops", "9", "--eval-max-ops", "9", "--eval-samples", "2", "--warmup",
             "0", "--device", "cpu", "--layout", "pack", "--max-thought-tokens", "99", *flags]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    for folder, launched in zip(folders, ([], launcher)):
        command = [sys.executable, *launched, "run.py", "train", "parity", "--out", str(folder), *steps]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120,
                              env=os.environ | {"OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("in distribution (1 … 9 operations)") == 1
    one, two = map(metrics_of, folders)
    assert len(one) == 5
    for a, b in zip(one, two):
        assert b == pytest.approx(a, rel=1e-4, abs=1e-6)
    first, second = (load(folder)[0].state_dict() for folder in folders)
    for name in first:
        torch.testing.assert_close(second[name], first[name], rtol=0, atol=2e-4, msg=lambda m: f"{name}: {m}")


GROUP_OF_ONE = """
import json
from functools import partial
from pathlib import Path
import torch
from minits.training import distributed, step as update
from minits.training.recipe import TrainConfig, resolve_train
from minits.training.loop import set_up, train_step

def begin(**changes):
    return set_up(resolve_train(TrainConfig(task="parity", device="cpu", batch_size=2, steps=1, **changes)), Path("none"))

distributed.world = lambda: 2  # so that it joins the group
"""


def in_group_of_one(script: str) -> list:
    """What `script` prints as JSON. It runs after the lines above, in a process of its own, ends well and warns of nothing."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run([sys.executable, "-c", GROUP_OF_ONE + script], cwd=ROOT, capture_output=True, text=True, timeout=120,
                          env=os.environ | alone | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks at the process's threads as Linux shows them")
def test_no_thread_of_the_group_outlives_it():
    """One that lets go of a tensor while Python exits aborts the process: seen in one of some 30 runs under load."""
    before, after = in_group_of_one("""
def threads():
    return [name for task in Path("/proc/self/task").iterdir() if "gloo" in (name := (task / "comm").read_text())]

run = begin()
train_step(run, run.stream.rows(0))
before = threads()
run.update.leave()
print(json.dumps([before, threads()]))
""")
    assert before and after == []


def test_compiled_layers_stay_whole_in_a_group():
    in_group, alone = in_group_of_one("""
graphs, compiled = [], torch.nn.Module.compile
torch.nn.Module.compile = lambda layer: compiled(layer, backend=lambda graph, inputs: graphs.append(1) or graph.forward)
update.DistributedDataParallel = partial(update.DistributedDataParallel, bucket_cap_mb=0.01)  # a layer is larger
torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = 1  # no bucket may be smaller than the first
run = begin(compile=True)
batch = run.stream.parts(run.stream.rows(0))[0]
run.update.wrapped(batch)
count = len(graphs)
torch._dynamo.reset()
run.model(batch)
run.update.leave()
print(json.dumps([count, len(graphs) - count]))
""")
    assert 0 < in_group == alone


def test_a_step_needs_a_sample_for_each_process(tmp_path, monkeypatch):
    for name, value in (("LOCAL_RANK", "2"), ("RANK", "2"), ("WORLD_SIZE", "5")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="--batch-size 4: fewer samples than the 5 processes"):
        begin(tmp_path)


# -- what can go wrong on the way ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_among_later_samples_stops_the_run_with_its_reason_and_the_metrics_so_far(tmp_path, monkeypatch, workers):
    run, encode = begin(tmp_path), stream.encode_example
    run.stream.workers = workers

    def fail_late(*arguments, name, **options):
        if name == f"training row {4 * (POOL + 2)}":
            raise ValueError(f"{name} does not fit")
        return encode(*arguments, name=name, **options)
    monkeypatch.setattr(stream, "encode_example", fail_late)
    with pytest.raises(ValueError, match=f"^training row {4 * (POOL + 2)} does not fit$"):
        train(run, silent)
    assert [line["step"] for line in metrics_of(tmp_path)] == [*range(1, POOL + 1)]


@pytest.mark.parametrize("layout", ["rows", "pack", "long_rows"])
def test_padding_may_lie_past_the_models_last_position(layout):
    model = fresh(Shape(chunk_size=24, limit=50))
    row = Row(list(range(3, 23)) * 2, 30, [[0]])
    losses = model(collate([row, row], model.config, layout=layout, row_tokens=48, sizes=Roomy()))
    expected = sums(model, [row, row]) if layout != "long_rows" else None
    assert losses.lm.isfinite()
    if expected is not None:
        torch.testing.assert_close(torch.stack([losses.lm, losses.thought]), expected, rtol=1e-9, atol=1e-9)


def test_an_unknown_layout_is_named():
    with pytest.raises(ValueError, match="'heap' is not known"):
        collate([Row([3, 4, 0], 1, [])], Shape().thinking(), layout="heap")


def test_after_a_failed_step_the_next_one_counts_again(tmp_path):
    run = begin(tmp_path)
    break_loss(run, step=1)
    with pytest.raises(TrainingError):
        train_step(run, run.stream.rows(0))
    run.model._forward_hooks.clear()
    before = snapshot(run)
    train_step(run, run.stream.rows(1))
    assert any(not torch.equal(value, before[name]) for name, value in run.model.state_dict(prefix="/model/").items())


# -- resume ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> dict[int, tuple[dict, list[dict]]]:
    """accumulate -> (weights and optimizer, metrics) of a run that nothing disturbed."""
    found = {}
    for accumulate in (1, 2):
        folder = tmp_path_factory.mktemp("whole")
        run = begin(folder, accumulate=accumulate)
        assert train(run, silent)
        found[accumulate] = snapshot(run), metrics_of(folder)
    return found


def press_ctrl_c(run: Run, step: int) -> None:
    """Sends SIGINT to this process once, within the first part of optimizer step `step`."""
    def press(*_):
        if run.step == step - 1:
            handle.remove()
            os.kill(os.getpid(), signal.SIGINT)
    handle = run.model.register_forward_hook(press)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("step", [1, POOL - 1, POOL, POOL + 1, QUICK["steps"] - 1])
def test_interrupted_and_resumed_run_is_the_uninterrupted_one_bit_for_bit(step, accumulate, tmp_path, uninterrupted):
    run = begin(tmp_path, accumulate=accumulate)
    press_ctrl_c(run, step)
    assert train(run, silent) is False
    assert checkpoints_in(tmp_path) == [f"step-{step:06d}"]
    resumed = begin(tmp_path, accumulate=accumulate)
    assert resumed.step == step
    assert_same_bits(snapshot(resumed), snapshot(run))
    assert train(resumed, silent) is True
    weights, metrics = uninterrupted[accumulate]
    assert_same_bits(snapshot(resumed), weights)
    assert metrics_of(tmp_path) == metrics


def test_run_that_crashed_after_its_last_checkpoint_resumes_there_without_repeating_metrics(tmp_path, uninterrupted):
    run = begin(tmp_path, save_every=4)
    break_loss(run, step=7)
    with pytest.raises(TrainingError):
        train(run, silent)
    assert [line["step"] for line in metrics_of(tmp_path)] == [1, 2, 3, 4, 5, 6]
    resumed = begin(tmp_path, save_every=4)
    assert resumed.step == 4 and train(resumed, silent)
    weights, metrics = uninterrupted[1]
    assert_same_bits(snapshot(resumed), weights)
    assert metrics_of(tmp_path) == metrics


def test_metrics_line_that_was_cut_off_by_a_crash_does_not_prevent_resuming(tmp_path):
    train(begin(tmp_path, steps=2), silent)
    whole = (tmp_path / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(whole + '{"step": 3, "lm_lo')
    resumed = begin(tmp_path, steps=4)
    train(resumed, silent)
    assert [line["step"] for line in metrics_of(tmp_path)] == [1, 2, 3, 4]


def test_second_interrupt_acts_at_once():
    with pytest.raises(KeyboardInterrupt), deferred_interrupt() as seen:
        os.kill(os.getpid(), signal.SIGINT)
        assert seen == [signal.SIGINT]
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the second interrupt was held back")


def test_interrupt_handlers_are_restored_after_training(tmp_path):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    run = begin(tmp_path, steps=3)
    press_ctrl_c(run, step=1)
    train(run, silent)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_the_garbage_collector_leaves_alone_what_was_there_before_training(tmp_path):
    """A look at all objects would halt the process for 0.1 s and more, at another step in each process."""
    run, seen = begin(tmp_path, no_save=True, log_every=1), []
    train(run, lambda line: seen.append(gc.get_freeze_count()))
    assert min(seen) > 10_000 and gc.get_freeze_count() == 0


# -- saving ------------------------------------------------------------------------------------------------------------


def test_only_the_newest_checkpoint_is_kept(tmp_path):
    train(begin(tmp_path, save_every=5), silent)
    assert checkpoints_in(tmp_path) == ["step-000012"]


def test_failing_save_leaves_the_previous_checkpoint_whole_and_no_temporary_files(tmp_path, monkeypatch):
    run = begin(tmp_path)
    train_step(run, run.stream.rows(0))
    kept = snapshot(run)
    save_checkpoint(run)
    train_step(run, run.stream.rows(1))

    def disk_full(_state, path, *_):
        Path(path).write_bytes(b"the first half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", disk_full)
        with pytest.raises(OSError, match="No space left"):
            save_checkpoint(run)
    assert checkpoints_in(tmp_path) == ["step-000001"]
    assert list(tmp_path.rglob("*.tmp")) == []
    resumed = begin(tmp_path)
    assert resumed.step == 1
    assert_same_bits(snapshot(resumed), kept)


KILLED_WHILE_SAVING = """
import os, signal, sys, torch
import run
save, calls = torch.save, []
def killed(state, path, *rest):
    calls.append(path)
    save(state, path, *rest)
    if len(calls) == 2:
        os.truncate(path, 1000)
        os.kill(os.getpid(), signal.SIGKILL)
torch.save = killed
run.main(sys.argv[1:])
"""


def test_kill_during_a_save_leaves_the_previous_checkpoint_and_resume_finishes_the_run(tmp_path, capsys):
    folder = tmp_path / "run"
    flags = ["train", "parity", "--out", str(folder), "--steps", "6", "--save-every", "2", *FLAGS]
    command = [sys.executable, "-c", KILLED_WHILE_SAVING, *flags]
    killed = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    whole, torn = checkpoints_in(folder)
    assert whole == "step-000002" and torn.startswith("step-000004") and torn.endswith(".tmp")
    assert begin(folder).step == 2
    assert command_line.main([*flags, "--resume"]) == 0
    assert checkpoints_in(folder) == ["step-000006"]
    assert json.loads((folder / "record.json").read_text())["steps"] == 6
    assert [line["step"] for line in metrics_of(folder)] == [1, 2, 3, 4, 5, 6]
