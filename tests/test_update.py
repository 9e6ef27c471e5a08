"""An optimizer step on CUDA, as a graph and with its kernel, is the plain one. Skipped without CUDA."""
import pytest
import torch
import torch.nn.functional as F
from test_train import begin

import minits.training.step
from minits.fast import cross_entropy as loss
from minits.fast.cross_entropy import IGNORED, cross_entropy_sum
from minits.supervision import Roomy
from minits.training.loop import save_checkpoint, take_step, train, train_step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("count", [1, 5, 300])
def test_the_kernel_gives_the_loss_and_gradients_of_the_plain_lines(dtype, tolerance, count, monkeypatch):
    monkeypatch.setattr(loss, "LOGIT_SLICE", 128)
    generator = torch.Generator().manual_seed(count)
    hidden, weight = torch.randn(count, 64, generator=generator), torch.randn(9001, 64, generator=generator) / 4
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
    """Under a mask, and with every score near -100: in rows of just `tokens`, cuDNN's are not (PyTorch's issue 196678)."""
    width, size = Roomy().width(tokens, 8), 64
    generator = torch.Generator("cuda").manual_seed(tokens)
    q, k, v = torch.randn(3, 1, 2, width, size, generator=generator, device="cuda") / 10
    q[..., 0], k[..., 0] = 1.0, -100 * size ** 0.5
    q, k, v = (x.bfloat16().requires_grad_() for x in (q, k, v))
    mask = torch.ones(width, width, dtype=torch.bool, device="cuda").tril()
    F.scaled_dot_product_attention(q, k, v, attn_mask=mask).sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))


@pytest.mark.parametrize("layout", ["rows", "pack", "long_rows"])
@pytest.mark.parametrize("method", ["thinking", "no-cot"])
def test_graphs_take_the_steps_that_single_kernels_take(layout, method, tmp_path):
    options = dict(device="cuda", dtype="float32", layout=layout, row_tokens=64, batch_size=8, method=method)
    graphed, plain = (begin(tmp_path / name, **options) for name in ("graphed", "plain"))
    plain.update.graphs = None
    for step in range(6):
        rows = plain.stream.rows(step)
        assert train_step(graphed, rows) == pytest.approx(train_step(plain, rows), rel=2e-3, abs=1e-5)
    assert graphed.update.graphs


def test_after_a_figure_that_is_not_finite_no_step_changes_anything(tmp_path):
    run = begin(tmp_path, device="cuda", layout="pack", row_tokens=64)
    train_step(run, run.stream.rows(0))
    before = [p.detach().clone() for p in run.model.parameters()]
    weights = run.update.weights.clone()
    for value in (weights * float("nan"), weights):
        run.update.weights.copy_(value)
        rows = run.stream.rows(1)
        take_step(run, rows, run.stream.parts(rows))
    assert all(torch.equal(a, b) for a, b in zip(before, run.model.parameters()))


def test_after_the_last_step_the_memory_of_the_graphs_is_free(tmp_path):
    run = begin(tmp_path, device="cuda", layout="pack", row_tokens=64)
    train_step(run, run.stream.rows(0))
    torch.cuda.empty_cache()  # of all but the graphs
    before = torch.cuda.memory_reserved()
    run.update.leave()
    assert torch.cuda.memory_reserved() < before


@pytest.mark.parametrize("layout", ["rows", "pack"])
def test_an_outgrown_graph_is_gone_before_the_next_one_is_warmed_up(layout, tmp_path, monkeypatch):
    """Beside each other they would need twice the memory. The steps are those of single kernels before and after."""
    options = dict(device="cuda", dtype="float32", layout=layout, row_tokens=64, batch_size=8)
    graphed, plain = (begin(tmp_path / name, **options) for name in ("graphed", "plain"))
    plain.update.graphs = None
    pools, held, capture = set(), [], minits.training.step.capture

    def memory() -> int:
        return sum(segment["total_size"] for segment in torch.cuda.memory_snapshot()
                   if tuple(segment["segment_pool_id"]) in pools)

    def watched(step, pool) -> torch.cuda.CUDAGraph:
        held.append(memory())
        pools.add(tuple(pool))
        return capture(step, pool)
    monkeypatch.setattr(minits.training.step, "capture", watched)

    def both(rows) -> None:
        assert train_step(graphed, rows) == pytest.approx(train_step(plain, rows), rel=2e-3, abs=1e-5)
    rows, full = plain.stream.rows(0), []
    for more in (1, 4, 16):
        both(rows * more)
        full.append(memory())
    both(rows * 16)
    assert len(pools) == len(held) == 3 and len(graphed.update.graphs) == 1
    assert held[0] == 0 and all(h <= f / 4 for h, f in zip(held[1:], full))  # left: what the optimizer holds, one segment
    if layout == "pack":  # a wider row replaces all
        for run in (graphed, plain):
            run.stream.sizes.room(256)
        both(rows)
        both(rows)
        assert len(held) == 4 and held[3] <= full[2] / 4 and list(graphed.update.graphs) == [256]


def test_clipping_on_cuda_is_that_on_the_cpu(tmp_path):
    runs = [begin(tmp_path / device, device=device, dtype="float32", layout="pack", clip=1e-3, lr=1e-3, warmup=0)
            for device in ("cpu", "cuda")]
    for step in range(3):
        for run in runs:
            train_step(run, run.stream.rows(step))
    for (name, a), (_, b) in zip(runs[0].model.named_parameters(), runs[1].model.named_parameters()):
        torch.testing.assert_close(b.cpu(), a, rtol=0, atol=1e-4, msg=lambda m: f"{name}: {m}")


def test_a_run_saved_on_cuda_goes_on_there_as_if_it_had_not_stopped(tmp_path):
    options = dict(device="cuda", dtype="float32", layout="pack", row_tokens=64)
    whole, stopped = begin(tmp_path / "whole", steps=8, **options), begin(tmp_path / "stopped", steps=8, **options)
    assert train(whole, lambda _: None)
    for step in range(4):
        train_step(stopped, stopped.stream.rows(step))
    save_checkpoint(stopped)
    again = begin(tmp_path / "stopped", steps=8, **options)
    assert again.step == 4 and train(again, lambda _: None)
    for (name, a), (_, b) in zip(whole.model.named_parameters(), again.model.named_parameters()):
        torch.testing.assert_close(b, a, rtol=0, atol=2e-4, msg=lambda m: f"{name}: {m}")


def test_each_width_of_rows_is_captured_once_in_a_training(tmp_path, monkeypatch):
    """Within the first pool of batches, that is, from which the other sizes are known."""
    run = begin(tmp_path, device="cuda", layout="rows", steps=8, batch_size=8)
    captured, capture = [], run.update.capture
    monkeypatch.setattr(run.update, "capture", lambda batch: captured.append(batch.ids.shape[1]) or capture(batch))
    assert train(run, lambda _: None)
    assert len(set(captured)) == len(captured) > 1
