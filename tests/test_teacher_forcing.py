"""Property 6: the definition of training is sequential inference under the same thoughts; the flat pass is the definition."""
from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import Shape, build, fresh, shapes, training_rows

from minits.supervision import Row, collate
from minits.teacher_forcing import collate_dense, loss, losses


def gradients(model) -> dict[str, torch.Tensor]:
    """The gradient of every parameter, zero where there is none."""
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


def backward(model, found) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    found.backward()
    return {name: value.clone() for name, value in gradients(model).items()}


@given(st.data())
def test_the_flat_pass_gives_the_losses_and_every_gradient_of_the_definition(data):
    shape = data.draw(shapes())
    rows = data.draw(training_rows(shape))
    model = fresh(shape)
    dense, counts = losses(model, collate_dense(rows, model))
    flat_batch = collate(rows, model.config)
    flat = model(flat_batch)
    assert counts.tolist() == flat_batch.counts.tolist()
    scale = max(1.0, float(dense.lm.abs()), float(dense.thought.abs()))
    for ours, theirs in ((flat.lm, dense.lm), (flat.thought, dense.thought)):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12 * scale)
    expected = backward(model, dense.lm + 0.5 * dense.thought)
    found = backward(model, flat.lm + 0.5 * flat.thought)
    largest = max(float(value.abs().max()) for value in expected.values())
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12 * max(1.0, largest), msg=lambda m: f"{name}: {m}")


def test_a_row_by_hand():
    """Two complete chunks of 4 and a partial one; the loss is the mean over 3 answer tokens plus that over 4 thought tokens."""
    model = build(Shape(chunk_size=4))
    row = Row([3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 0], 8, [[5, 6, 0], [0]])
    batch = collate_dense([row], model)
    assert batch.ids.tolist() == [[3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 1, 1]]
    assert batch.labels.tolist() == [[-100] * 7 + [11, 12, 0, -100, -100]]
    assert batch.thoughts.tolist() == [[[5, 6, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1]]]
    assert batch.lengths.tolist() == [[3, 1, 0]]
    sums, counts = losses(model, batch)
    assert counts.tolist() == [3, 4]
    torch.testing.assert_close(loss(model, batch, w=0.5), sums.lm / 3 + 0.5 * sums.thought / 4)
