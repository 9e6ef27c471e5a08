"""Property 6: training computes what sequential inference computes under the same thoughts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from margins import assert_close, assert_same_keys
from strategies import Shape, biases, build, prompts, shapes, steer, training_rows

from minits.prefill import Intervention, prefill_sequential
from minits.supervision import Row
from minits.teacher_forcing import collate, loss, losses, teacher_forced
from minits.training.late import known_from


class Given(Intervention):
    """T is made to say these thoughts, a list a row."""

    def __init__(self, thoughts: Sequence[Sequence[list[int]]]) -> None:
        self.thoughts = thoughts

    def thought(self, row: int, chunk: int) -> list[int]:
        return self.thoughts[row][chunk]


@torch.no_grad()
def assert_training_computes(model, reading, rows: list[Row]) -> None:
    """The teacher-forced pass over `rows` has the KV, H and last vectors of `reading`."""
    batch = collate(rows, model)
    cache = model.new_cache(len(rows), batch.ids.shape[1])
    H, out = teacher_forced(model, batch, cache)
    c = model.config.chunk_size
    for row, n in enumerate(reading.lengths):
        assert_same_keys(cache, reading.cache, row, n, 1e-9, c)
        start = (n - 1) // c * c
        right = reading.open_h[row, : n - start]
        assert_close(f"row {row}, H of the last chunk", H[row, start:n], right, 1e-9, c, start)
        found, right = out[row, None, n - 1], reading.out[row, None]
        assert_close(f"row {row}, last vector", found, right, 1e-9, c, n - 1)


@given(st.data())
def test_under_its_own_thoughts_training_computes_what_inference_computed(data):
    shape = data.draw(shapes())
    model, rows = build(shape), data.draw(prompts(shape, rows=3))
    with steer(model, data.draw(biases)):
        reading = prefill_sequential(model, rows, max(map(len, rows)), limit=5)
    # One more token, which is only predicted: a `Row` ends with one.
    made = [
        Row([*ids, 0], len(ids), [thought.ids for thought in thoughts])
        for ids, thoughts in zip(rows, reading.thoughts)
    ]
    assert_training_computes(model, reading, made)


@given(st.data())
def test_under_given_thoughts_inference_computes_what_training_computes(data):
    shape = data.draw(shapes())
    model, rows = build(shape), data.draw(training_rows(shape))
    hook = Given([row.thoughts for row in rows])
    reading = prefill_sequential(
        model, [row.ids[:-1] for row in rows], max(len(row.ids) for row in rows), hook=hook
    )
    assert [[z.ids for z in zs] for zs in reading.thoughts] == [row.thoughts for row in rows]
    assert_training_computes(model, reading, rows)


@given(st.data())
@torch.no_grad()
def test_losses_are_those_of_the_rows_one_by_one_written_out(data):
    shape = data.draw(shapes())
    model, rows = build(shape), data.draw(training_rows(shape))
    c, T = shape.chunk_size, model.thinking_block
    found = losses(model, collate(rows, model))
    lm = thought = torch.zeros((), dtype=torch.float64)
    for row in rows:
        H, out = teacher_forced(model, collate([row], model))
        answer = model.backbone.lm_head(out[0, row.prompt_length - 1 : len(row.ids) - 1])
        labels = torch.tensor(row.ids[row.prompt_length :])
        lm = lm + F.cross_entropy(answer, labels, reduction="sum")
        for k, ids in enumerate(row.thoughts):
            before = model.backbone.model.embed_tokens(torch.tensor(ids[:-1], dtype=torch.long))
            x = torch.cat([H[0, k * c : (k + 1) * c], before])[None]
            positions = torch.arange(x.shape[1])[None]
            logits = T.lm_head(T(x, model.backbone.frame(positions), last=len(ids)))[0]
            thought = thought + F.cross_entropy(logits, torch.tensor(ids), reduction="sum")
    torch.testing.assert_close(found.lm, lm, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.thought, thought, rtol=1e-9, atol=1e-9)
    assert found.lm_tokens == sum(len(row.ids) - row.prompt_length for row in rows)
    assert found.thought_tokens == sum(len(ids) for row in rows for ids in row.thoughts)


def test_the_drawing_of_a_batch_is_true():
    """The example in the docstring of `Batch`: a … h are 3 … 10, i and j 11 and 12, x and y 5 and 6."""
    model = build(Shape(chunk_size=4))
    row = Row([*range(3, 13), 0], 8, [[5, 6, 0], [0]])
    batch = collate([row], model)
    assert batch.ids.tolist() == [[*range(3, 13), 1, 1]]
    assert batch.labels.tolist() == [[-100] * 7 + [11, 12, 0, -100, -100]]
    assert batch.thoughts.tolist() == [[[5, 6, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1]]]
    assert batch.lengths.tolist() == [[3, 1, 0]]
    found = losses(model, batch)
    assert (found.lm_tokens, found.thought_tokens) == (3, 4)
    torch.testing.assert_close(loss(found, w=0.5), found.lm / 3 + 0.5 * found.thought / 4)


@pytest.mark.parametrize("thinks", [True, False])
def test_without_a_thought_to_learn_the_loss_is_that_of_the_answer(thinks):
    model = build(Shape(chunk_size=4), thinks=thinks)
    found = losses(model, collate([Row([3, 4, 5, 0], 2, [])], model))
    assert found.thought_tokens == 0 and torch.equal(loss(found), found.lm / 2)


@given(st.data())
def test_a_position_knows_a_token_of_a_thought_from_its_place_in_the_state_on(data):
    """`known_from`, pinned to the model: where a changed token of a thought first shows."""
    c, n = data.draw(st.integers(1, 6)), data.draw(st.integers(2, 9))
    place = data.draw(st.integers(0, n - 2))
    model = build(Shape(chunk_size=c))
    outs = []
    for token in (3, 4):
        thought = [3] * (n - 1) + [0]
        thought[place] = token
        row = Row([3] * (3 * c + 1), 3 * c, [thought, [0], [0]])
        with torch.no_grad():
            outs.append(teacher_forced(model, collate([row], model))[1][0])
    differs = (outs[0] - outs[1]).abs().amax(-1) > 1e-12
    assert int(differs.nonzero()[0]) == known_from(0, place, n, c)
