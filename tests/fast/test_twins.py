"""Every fast thing equals its slow twin in the root: one table of (fast, slow, tolerance, devices)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from strategies import DEVICES, Shape, fresh, shapes, training_rows

from minits import teacher_forcing
from minits.fast import flat_batch
from minits.fast.cross_entropy import cross_entropy_sum
from minits.fast.layouts import BucketedSizes


class Twin(NamedTuple):
    """Two functions of drawn data, each giving a list of tensors."""

    draw: Callable[[Any, str], Any]  # of hypothesis' data and a device
    fast: Callable[[Any], list[torch.Tensor]]
    slow: Callable[[Any], list[torch.Tensor]]
    tolerance: float  # times the largest number of the slow one
    devices: list


def with_gradients(model, found: teacher_forcing.Losses) -> list[torch.Tensor]:
    """The losses, their token counts, and every parameter's gradient of L_LM + 0.5 L_T, summed."""
    model.zero_grad(set_to_none=True)
    (found.lm + 0.5 * found.thought).backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    counts = [found.lm_tokens.double(), found.thought_tokens.double()]
    return [found.lm.detach(), found.thought.detach(), *counts, *(grad.clone() for grad in grads)]


def draw_rows(data, device):
    """A random model and samples, and a way of laying them out whose losses are the same."""
    shape = data.draw(shapes(max_chunk=data.draw(st.sampled_from([6, 16]))))
    rows = data.draw(training_rows(shape, rows=6))
    sizes = data.draw(st.sampled_from([flat_batch.ExactSizes(), BucketedSizes()]))
    layout = data.draw(st.sampled_from(["rows", "pack"]))
    how = {"layout": layout, "row_tokens": data.draw(st.integers(1, 60)), "sizes": sizes}
    return fresh(shape, device=device), rows, how


def flat(case) -> list[torch.Tensor]:
    model, rows, how = case
    batch = flat_batch.collate(rows, model.config, **how).map(lambda x: x.to(model.device))
    return with_gradients(model, flat_batch.flat_losses(model, batch))


def dense(case) -> list[torch.Tensor]:
    model, rows, _ = case
    batch = teacher_forcing.collate(rows, model)
    return with_gradients(model, teacher_forcing.losses(model, batch))


def draw_logits(data, device):
    """Hidden vectors, an unembedding and labels, some of them ignored."""
    count, words = data.draw(st.integers(1, 9)), 7
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    hidden = torch.randn(count, 5, generator=generator, dtype=torch.float64)
    weight = torch.randn(words, 5, generator=generator, dtype=torch.float64)
    labels = torch.randint(words, (count,), generator=generator)
    labels[torch.rand(count, generator=generator) < 0.3] = -100
    return [x.to(device) for x in (hidden, weight, labels)]


def sliced(case) -> list[torch.Tensor]:
    hidden, weight, labels = (x.clone() for x in case)
    hidden.requires_grad_(), weight.requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minits.fast.cross_entropy.LOGIT_SLICE", 3)
        loss = cross_entropy_sum(hidden, weight, labels)
    return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight))]


def whole(case) -> list[torch.Tensor]:
    hidden, weight, labels = (x.clone() for x in case)
    hidden.requires_grad_(), weight.requires_grad_()
    loss = F.cross_entropy(hidden @ weight.T, labels, reduction="sum", ignore_index=-100)
    return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight))]


TWINS = {
    "flat batch and pass: losses and gradients": Twin(draw_rows, flat, dense, 1e-12, DEVICES),
    "cross-entropy in slices": Twin(draw_logits, sliced, whole, 1e-12, DEVICES),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", TWINS)
@given(st.data())
def test_the_fast_thing_equals_its_definition(name, device, data):
    twin = TWINS[name]
    case = twin.draw(data, device)
    fast, slow = twin.fast(case), twin.slow(case)
    scale = max(1.0, *(float(x.abs().max()) for x in slow if x.numel()))
    # A card adds up in another order, over more numbers at once.
    tolerance = twin.tolerance if device == "cpu" else 1e3 * twin.tolerance
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * scale)


def test_padding_may_lie_past_the_models_last_position():
    model = fresh(Shape(chunk_size=24, limit=50))
    row = flat_batch.Row(list(range(3, 23)) * 2, 30, [[0]])
    for layout in ("rows", "pack", "long_rows"):
        how = {"layout": layout, "row_tokens": 48, "sizes": BucketedSizes()}
        batch = flat_batch.collate([row, row], model.config, **how)
        assert flat_batch.flat_losses(model, batch).lm.isfinite()
