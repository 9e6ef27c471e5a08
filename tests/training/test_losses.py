"""The losses of a batch: what may not change them, however its samples are laid out."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from strategies import Shape, build, fresh, shapes, training_rows
from training_helpers import assert_close, gradients, sums

from minits.fast import cross_entropy
from minits.fast.cross_entropy import cross_entropy_sum
from minits.fast.flat_batch import FlatBatch, collate, flat_losses
from minits.fast.layouts import BucketedSizes
from minits.supervision import Row
from minits.thinking import ThinkingStates


def assert_equal_sums(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


# -- what may not change the losses ----------------------------------------------------------------


@given(st.data())
@torch.no_grad()
def test_summed_losses_of_a_batch_are_the_sums_of_its_rows_alone(data):
    shape = data.draw(shapes())
    rows = data.draw(training_rows(shape))
    model = build(shape)
    assert_equal_sums(sums(model, rows), sum(sums(model, [row]) for row in rows))


@given(st.data())
@torch.no_grad()
def test_summed_losses_do_not_depend_on_row_order(data):
    shape = data.draw(shapes())
    rows = data.draw(training_rows(shape))
    model = build(shape)
    shuffled = data.draw(st.permutations(rows))
    assert_equal_sums(sums(model, rows), sums(model, shuffled))


@given(st.data())
@torch.no_grad()
def test_summed_losses_do_not_depend_on_padding_by_a_longer_neighbour(data):
    shape = data.draw(shapes())
    rows = data.draw(training_rows(shape))
    model = build(shape)
    length = 6 * shape.chunk_size + 7
    neighbour = Row([3] * length, 1, [[0]] * ((length - 1) // shape.chunk_size))
    apart = sums(model, rows) + sums(model, [neighbour])
    assert_equal_sums(sums(model, [*rows, neighbour]), apart)


def laid_out(
    model: ThinkingStates, rows: list[Row], **how: Any
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Summed losses of `rows` in a layout, and the gradients of their sum."""
    model.zero_grad(set_to_none=True)
    found = sums(model, rows, **how)
    found.sum().backward()
    return found.detach(), gradients(model)


@given(st.data())
def test_packing_and_filling_up_change_neither_losses_nor_gradients(data):
    shape = data.draw(shapes(max_chunk=6))
    rows = data.draw(training_rows(shape, rows=6))
    model, sizes = fresh(shape), BucketedSizes()
    losses, grads = laid_out(model, rows)
    width = data.draw(st.integers(1, 60))
    packed = {"layout": "pack", "row_tokens": width}
    for how in (packed, {"sizes": sizes}, packed | {"sizes": sizes}):
        other, other_grads = laid_out(model, rows, **how)
        assert_equal_sums(other, losses)
        assert_close(other_grads, grads)


# -- layouts and sizes -----------------------------------------------------------------------------


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
        assert start % c == 0
        assert places.tolist() == list(range(start, start + -(-read // c) * c))
        assert batch.ids[b, start : start + read].tolist() == row.ids[:-1]
        assert batch.positions[b, start : start + read].tolist() == list(range(read))


def test_long_rows_are_one_context_whose_samples_start_on_chunk_borders():
    model = fresh(Shape(layers=3, extract_after=3))
    first = Row([3, 4, 5, 6, 7, 8, 0], 4, [[9, 0]])
    second = Row([9, 3, 4, 5, 6, 0], 3, [[0]])
    how = {"layout": "long_rows", "row_tokens": 16}
    batch = collate([first, second], model.config, **how)
    assert batch.ids.tolist() == [[3, 4, 5, 6, 7, 8, 1, 1, 9, 3, 4, 5, 6, 1, 1, 1]]
    assert batch.positions.tolist() == [[*range(16)]]
    # The state of the first sample's thought; none crosses to the second.
    assert batch.state_at.tolist() == [1]
    together, alone = sums(model, [first]), sums(model, [second])
    long = flat_losses(model, batch)
    assert not torch.allclose(long.lm, (together + alone)[0])  # the second sample sees the first
    assert_equal_sums(sums(model, [first], **how), together)


def test_an_unknown_layout_is_named():
    with pytest.raises(ValueError, match="'heap' is not known"):
        collate([Row([3, 4, 0], 1, [])], Shape().thinking(), layout="heap")


@pytest.mark.parametrize("layout", ["rows", "pack", "long_rows"])
def test_padding_may_lie_past_the_models_last_position(layout):
    model = fresh(Shape(chunk_size=24, limit=50))
    row = Row(list(range(3, 23)) * 2, 30, [[0]])
    found = sums(model, [row, row], layout=layout, row_tokens=48, sizes=BucketedSizes())
    assert found.isfinite().all()
    if layout != "long_rows":
        assert_equal_sums(found, sums(model, [row, row]))


def shapes_of(batch: FlatBatch) -> tuple[torch.Size, ...]:
    return tuple(x.shape for x in batch.tensors)


def test_batches_of_bucketed_sizes_come_to_have_one_shape():
    rng, sizes, config = random.Random(5), BucketedSizes(), Shape().thinking()
    seen = []
    for _ in range(30):
        rows = [
            Row(
                [3] * (9 + 4 * k),
                5,
                [[5, 6, 0] if rng.random() < 0.5 else [0] for _ in range((8 + 4 * k) // 4)],
            )
            for k in (rng.randrange(9) for _ in range(16))
        ]
        batch = collate(rows, config, layout="pack", row_tokens=64, sizes=sizes)
        seen.append(shapes_of(batch))
        exact = collate(rows, config, layout="pack", row_tokens=64)
        assert torch.equal(batch.counts, exact.counts)
    assert len(set(seen[15:])) == 1


@given(st.integers(1, 3000), st.integers(1, 130))
def test_rows_are_a_little_wider_but_not_of_the_widths_whose_gradients_cudnn_gets_wrong(
    chunks, chunk_size
):
    tokens = chunks * chunk_size
    width = BucketedSizes().width(tokens, chunk_size)
    assert width % chunk_size == 0
    assert tokens <= width < tokens + 2 * (32 + chunk_size)
    assert width % 128 != 64


def test_rows_that_several_samples_fill_have_one_width_however_long_the_batchs_longest_sample():
    sizes, config = BucketedSizes(), Shape(chunk_size=8).thinking()
    seen = []
    for length in (90, 20, 50, 33):
        rows = [Row([3] * length, 5, [[0]] * (length // 8))] * 3
        seen.append(collate(rows, config, layout="pack", row_tokens=32, sizes=sizes).ids.shape)
    assert {shape[1] for shape in seen} == {96}
    assert [shape[0] for shape in seen[1:]] == [seen[0][0]] * 3  # sizes only grow


def test_what_shares_a_long_row_does_not_depend_on_the_batches_before():
    rng, grown_sizes, config = random.Random(7), BucketedSizes(), Shape(chunk_size=8).thinking()
    for longest in (40, 150, 56):
        rows = [Row([3] * rng.randrange(9, longest), 5, []) for _ in range(12)]
        grown, alone = (
            collate(rows, config, layout="long_rows", row_tokens=64, sizes=sizes)
            for sizes in (grown_sizes, BucketedSizes())
        )
        filled, expected = ((batch.ids == 3).sum(1).tolist() for batch in (grown, alone))
        assert filled[: len(expected)] == expected
    assert grown.ids.shape[1] > alone.ids.shape[1]


# -- the cross-entropy, a slice of the logits at a time --------------------------------------------


@pytest.mark.parametrize("count", [1, 3, 4, 9, 10])
def test_sliced_cross_entropy_equals_the_plain_one_in_value_and_gradient(count, monkeypatch):
    monkeypatch.setattr(cross_entropy, "LOGIT_SLICE", 3)
    generator = torch.Generator().manual_seed(count)
    hidden, weight = (
        torch.randn(n, 5, generator=generator, dtype=torch.float64, requires_grad=True)
        for n in (count, 7)
    )
    labels = torch.randint(7, (count,), generator=generator)
    sliced = cross_entropy_sum(hidden, weight, labels)
    plain = F.cross_entropy(hidden @ weight.T, labels, reduction="sum")
    found, expected = (
        (value, *torch.autograd.grad(value, (hidden, weight))) for value in (sliced, plain)
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_the_scale_of_the_loss_is_not_rounded_with_the_gradients():
    hidden, weight = torch.randn(30, 16), torch.randn(99, 16)
    labels, found = torch.arange(30), []
    for count in (1, 1700):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            loss = cross_entropy_sum(h, w, labels)
        (loss / count).backward()
        found.append((h.grad * count, w.grad * count))
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=0)


def test_unembedding_runs_at_supervised_positions_only_and_a_slice_at_a_time(monkeypatch):
    shape = Shape()
    model = build(shape)
    batch = collate([Row(list(range(3, 23)), 10, [[5, 0], [0], [6, 7, 0], [0]])], model.config)
    seen, linear = [], F.linear

    def spy(x: torch.Tensor, weight: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
        if weight.shape[0] == shape.vocab:
            seen.append(x.shape[0])
        return linear(x, weight, *bias)

    monkeypatch.setattr(cross_entropy, "LOGIT_SLICE", 4)
    monkeypatch.setattr(F, "linear", spy)
    with torch.no_grad():
        flat_losses(model, batch)
    assert max(seen) == 4
    assert sum(seen) == batch.counts.sum() == 10 + 7
