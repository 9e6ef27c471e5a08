"""An optimizer step on CUDA, as a graph and with its kernel, is the plain one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from training_helpers import assert_close, begin, silent, train, train_step

from minits.fast import cross_entropy, training_graph
from minits.fast.cross_entropy import cross_entropy_sum
from minits.fast.flat_batch import FlatBatch
from minits.fast.layouts import BucketedSizes
from minits.supervision import Row
from minits.tensors import IGNORED
from minits.training.loop import Training, take_step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
PACKED = {"device": "cuda", "layout": "pack", "row_tokens": 64}


def graphed_and_plain(folder: Path, **options: Any) -> tuple[Training, Training]:
    """The same training twice: through graphs, and kernel by kernel."""
    options |= {"device": "cuda", "dtype": "float32", "row_tokens": 64, "batch_size": 8}
    graphed, plain = (begin(folder / name, **options) for name in ("graphed", "plain"))
    plain.optimizer_step.graphs = None
    return graphed, plain


def assert_same_step(graphed: Training, plain: Training, rows: list[Row]) -> None:
    expected = train_step(plain, rows)
    assert train_step(graphed, rows) == pytest.approx(expected, rel=2e-3, abs=1e-5)


def weights_of(training: Training) -> dict[str, torch.Tensor]:
    """Copies of the weights, on the CPU."""
    return {name: p.detach().cpu().clone() for name, p in training.model.named_parameters()}


# -- kernels ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("count", [1, 5, 300])
def test_the_kernel_gives_the_loss_and_gradients_of_the_plain_lines(
    dtype, tolerance, count, monkeypatch
):
    monkeypatch.setattr(cross_entropy, "LOGIT_SLICE", 128)
    generator = torch.Generator().manual_seed(count)
    hidden = torch.randn(count, 64, generator=generator)
    weight = torch.randn(9001, 64, generator=generator) / 4
    labels = torch.randint(9001, (count,), generator=generator)
    labels[::3] = IGNORED
    results = []
    for kind, device in ((torch.float64, "cpu"), (dtype, "cuda")):
        h, w = (x.to(device, kind).requires_grad_() for x in (hidden, weight))
        value = cross_entropy_sum(h, w, labels.to(device))
        (value / 1700).backward()
        results.append([x.detach().double().cpu() for x in (value, h.grad, w.grad)])
    for plain, fast in zip(*results):
        assert (plain - fast).norm() <= tolerance * plain.norm().clamp(min=1e-9)


@pytest.mark.parametrize("tokens", [64, 192, 320, 448])
def test_attention_at_the_widths_of_rows_has_finite_gradients(tokens):
    """Under a mask, and with every score near -100.

    In rows of just `tokens`, cuDNN's are not (PyTorch's issue 196678).
    """
    width, size = BucketedSizes().width(tokens, 8), 64
    generator = torch.Generator("cuda").manual_seed(tokens)
    q, k, v = torch.randn(3, 1, 2, width, size, generator=generator, device="cuda") / 10
    q[..., 0], k[..., 0] = 1.0, -100 * size**0.5
    q, k, v = (x.bfloat16().requires_grad_() for x in (q, k, v))
    mask = torch.ones(width, width, dtype=torch.bool, device="cuda").tril()
    F.scaled_dot_product_attention(q, k, v, attn_mask=mask).sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))


# -- steps -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["rows", "pack", "long_rows"])
@pytest.mark.parametrize(
    ("method", "accumulate"), [("thinking", 1), ("thinking", 3), ("no-cot", 1)]
)
def test_graphs_take_the_steps_that_single_kernels_take(layout, method, accumulate, tmp_path):
    graphed, plain = graphed_and_plain(
        tmp_path, layout=layout, method=method, accumulate=accumulate
    )
    for step in range(6):
        assert_same_step(graphed, plain, plain.stream.rows(step))
    assert graphed.optimizer_step.graphs.captured


def test_after_a_figure_that_is_not_finite_no_step_changes_anything(tmp_path):
    training = begin(tmp_path, **PACKED)
    train_step(training, training.stream.rows(0))
    before = weights_of(training)
    weights = training.optimizer_step.loss_weights.clone()
    for value in (weights * float("nan"), weights):
        training.optimizer_step.loss_weights.copy_(value)
        rows = training.stream.rows(1)
        take_step(training, rows, training.stream.parts(rows))
    after = weights_of(training)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_clipping_on_cuda_is_that_on_the_cpu(tmp_path):
    options = {"dtype": "float32", "layout": "pack", "clip": 1e-3, "lr": 1e-3, "warmup": 0}
    on_cpu, on_cuda = (
        begin(tmp_path / device, device=device, **options) for device in ("cpu", "cuda")
    )
    for step in range(3):
        for training in (on_cpu, on_cuda):
            train_step(training, training.stream.rows(step))
    assert_close(weights_of(on_cuda), weights_of(on_cpu), rtol=0, atol=1e-4)


def test_a_run_saved_on_cuda_goes_on_there_as_if_it_had_not_stopped(tmp_path):
    options = PACKED | {"dtype": "float32", "steps": 8}
    whole, stopped = (begin(tmp_path / name, **options) for name in ("whole", "stopped"))
    assert train(whole, silent)
    for step in range(4):
        train_step(stopped, stopped.stream.rows(step))
    stopped.save()
    again = begin(tmp_path / "stopped", **options)
    assert again.done == 4
    assert train(again, silent)
    assert_close(weights_of(again), weights_of(whole), rtol=0, atol=2e-4)


# -- the graphs' memory ----------------------------------------------------------------------------


def memory_of(pool: tuple[int, int]) -> int:
    """Bytes that torch holds for the graphs of `pool`."""
    segments = torch.cuda.memory_snapshot()
    return sum(x["total_size"] for x in segments if tuple(x["segment_pool_id"]) == tuple(pool))


def test_after_the_last_step_the_memory_of_the_graphs_is_free(tmp_path):
    training = begin(tmp_path, **PACKED)
    train_step(training, training.stream.rows(0))
    torch.cuda.empty_cache()  # of all but the graphs
    before = torch.cuda.memory_reserved()
    training.optimizer_step.release()
    assert torch.cuda.memory_reserved() < before


@pytest.mark.parametrize("layout", ["rows", "pack"])
def test_an_outgrown_graph_is_gone_before_the_next_one_is_warmed_up(layout, tmp_path, monkeypatch):
    """Beside each other they would need twice the memory.

    The steps are those of single kernels before and after.
    """
    graphed, plain = graphed_and_plain(tmp_path, layout=layout)
    pools, capture = set(), training_graph.capture
    held = []  # of each capture: the memory in the graphs' pools when it begins

    def memory() -> int:
        return sum(map(memory_of, pools))

    def watched(run, pool) -> torch.cuda.CUDAGraph:
        held.append(memory())
        pools.add(tuple(pool))
        return capture(run, pool)

    monkeypatch.setattr(training_graph, "capture", watched)
    rows, full = plain.stream.rows(0), []
    for more in (1, 4, 16):
        assert_same_step(graphed, plain, rows * more)
        full.append(memory())
    assert_same_step(graphed, plain, rows * 16)
    assert len(pools) == len(held) == 3
    assert len(graphed.optimizer_step.graphs.captured) == 1
    assert held[0] == 0
    # Left is one segment: what the optimizer holds.
    assert all(now <= before / 4 for now, before in zip(held[1:], full))
    if layout == "pack":  # a wider row replaces all
        for training in (graphed, plain):
            training.stream.sizes.room(256)
        for _ in range(2):
            assert_same_step(graphed, plain, rows)
        assert len(held) == 4
        assert held[3] <= full[2] / 4
        assert list(graphed.optimizer_step.graphs.captured) == [(256,)]


def test_parts_of_a_step_take_turns_in_the_memory_of_its_graph(tmp_path):
    held = {}
    for parts in (1, 8):
        options = PACKED | {"layout": "rows", "accumulate": parts, "batch_size": 8, "steps": 8}
        options |= {"row_tokens": 1}  # so in parts, short as rows are
        training = begin(tmp_path / str(parts), **options)
        train_step(training, training.stream.rows(0) * 16)
        held[parts] = memory_of(training.optimizer_step.graphs.pool)
    assert held[8] <= held[1] / 2  # the gradients, too, lie there


def test_each_width_of_rows_is_captured_once_in_a_training(tmp_path, monkeypatch):
    """Within the first pool of batches, that is, from which the other sizes are known."""
    training = begin(tmp_path, device="cuda", layout="rows", steps=8, batch_size=8)
    graphs = training.optimizer_step.graphs
    widths, record = [], graphs.record

    def watched(parts: list[FlatBatch]) -> tuple:
        widths.append(tuple(part.ids.shape[1] for part in parts))
        return record(parts)

    monkeypatch.setattr(graphs, "record", watched)
    assert train(training, silent)
    assert len(set(widths)) == len(widths) > 1
