"""No thoughts is plain Qwen2.5 (property 7); thoughts, states and answers by their definitions."""

import pytest
import torch
from hypothesis import given, strategies as st
from strategies import half, Shape, biases, build, prompts, shapes, steer

from minits.generation import PREFILLS, generate_ids
from minits.prefill import Intervention, prefill_sequential


@half
@given(st.data())
def test_all_trivial_thoughts_are_plain_qwen(data):
    shape = data.draw(shapes())
    model, rows = build(shape), data.draw(prompts(shape))
    plain = generate_ids(model, rows, max_new_tokens=6, think=False)
    with steer(model, 1e4):
        for prefill in ("sequential", "speculative"):
            for a, b in zip(generate_ids(model, rows, max_new_tokens=6, prefill=prefill), plain):
                assert a.ids == b.ids and a.nontrivial == 0 and all(z == [0] for z in a.thought_ids)
        reading = prefill_sequential(model, rows, max(map(len, rows)), limit=5)
    for b, ids in enumerate(rows):
        logits = model.backbone(torch.tensor([ids]))[0, -1]
        torch.testing.assert_close(
            model.backbone.lm_head(reading.out[b]), logits, rtol=0, atol=1e-9
        )


@given(st.data())
def test_plain_generation_follows_the_argmax_of_the_plain_forward(data):
    shape = data.draw(shapes())
    model, rows = build(shape), data.draw(prompts(shape, rows=2))
    for ids, result in zip(rows, generate_ids(model, rows, max_new_tokens=5, think=False)):
        read = list(ids)
        for token in result.ids:
            assert token == int(model.backbone(torch.tensor([read]))[0, -1].argmax())
            read.append(token)


@pytest.mark.parametrize("n", range(1, 12))
def test_the_state_is_the_last_c_outputs_of_c_over_the_padded_thought(n):
    model = build(Shape(chunk_size=5))
    thought = [*range(3, 3 + n - 1), 0]
    (state,) = model.states([thought])
    if n == 1:
        assert (state == 0).all()
        return
    padded = thought + [model.config.pad_id] * max(0, 5 - n)
    x = model.backbone.model.embed_tokens(torch.tensor([padded]))
    out = model.compression_block(x, model.backbone.frame(torch.arange(len(padded))[None]))[0]
    torch.testing.assert_close(state, out[-5:], rtol=0, atol=1e-12)


@given(st.data())
def test_a_thought_is_the_greedy_continuation_of_its_chunk(data):
    shape = data.draw(shapes())
    model, limit = build(shape), data.draw(st.integers(1, 7))
    h = torch.randn(
        3,
        shape.chunk_size,
        shape.heads * shape.head_dim,
        dtype=torch.float64,
        generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))),
    )
    with steer(model, data.draw(biases)), torch.no_grad():
        thoughts = model.think(h, limit)
        for chunk, thought in zip(h, thoughts):
            ids: list[int] = []
            while len(ids) < limit and 0 not in ids:
                x = torch.cat(
                    [chunk, model.backbone.model.embed_tokens(torch.tensor(ids, dtype=torch.long))]
                )[None]
                out = model.thinking_block(x, model.backbone.frame(torch.arange(x.shape[1])[None]))
                ids.append(int(model.thinking_block.lm_head(out)[0, -1].argmax()))
            assert thought.cut == (0 not in ids)
            assert thought.ids == (ids if 0 in ids else [*ids, 0])


@given(st.data())
def test_a_script_is_said_token_by_token_and_the_rest_is_ts_own(data):
    """T runs as if a script were its own choice: what comes after a script of a prefix is what T would say."""
    shape = data.draw(shapes())
    model, limit = build(shape), data.draw(st.integers(2, 7))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    h = torch.randn(
        2, shape.chunk_size, shape.heads * shape.head_dim, dtype=torch.float64, generator=generator
    )
    with steer(model, data.draw(biases)), torch.no_grad():
        free = model.think(h, limit)
        prefix = free[0].ids[: data.draw(st.integers(0, len(free[0].ids)))]
        assert model.think(h, limit, [prefix, None]) == free
        whole = [*data.draw(st.lists(st.integers(3, shape.vocab - 1), max_size=limit - 1)), 0]
        said = model.think(h, limit, [None, whole])
    assert said[0] == free[0] and said[1].ids == whole and not said[1].cut


@pytest.mark.parametrize("prefill", PREFILLS)
def test_a_call_may_cut_thoughts_sooner_than_training_did(prefill):
    model = build(Shape(chunk_size=4))
    with steer(model, -1e4):
        how = {"prefill": prefill, "max_new_tokens": 1}
        (result,) = generate_ids(model, [[3] * 8], max_thought_tokens=3, **how)
    assert list(map(len, result.thought_ids)) == [4, 4] and result.cut_thoughts == [0, 1]


@pytest.mark.parametrize("first_sliding", [0, 1, 2])
def test_t_and_c_see_as_far_as_the_layers_that_they_copy(first_sliding):
    model = build(Shape(window=5, first_sliding=first_sliding))
    first, *_, last = model.backbone.model.layers
    assert model.compression_block.layer.slides == first.slides == (first_sliding == 0)
    assert model.thinking_block.layer.slides and last.slides


def test_ties_go_to_the_lowest_id_that_is_not_blocked():
    model = build(Shape(seed=4))
    logits = torch.tensor([[1.0, 5.0, 5.0, 5.0]] + [[2.0] * 4]).repeat(1, shape_factor := 6)
    assert logits.shape[1] == len(model.blocked) and shape_factor
    assert model.pick(logits).tolist() == [1, 0]
    blocked = model.blocked.clone()
    try:
        model.blocked[:2] = True
        assert model.pick(logits).tolist() == [2, 2]
    finally:
        model.blocked.copy_(blocked)


def test_the_last_emitted_token_is_not_read_and_completes_no_chunk():
    model = build(Shape(chunk_size=4))
    for new in range(1, 9):
        with steer(model, 3.0):
            (result,) = generate_ids(model, [[3, 4, 5]], max_new_tokens=new, eos_ids=[])
        assert result.stop_reason == "length" and len(result.ids) == new
        assert len(result.thought_ids) == (3 + new - 1) // 4


class FirstAlone(Intervention):
    """T thinks after the first chunk; later thoughts are trivial."""

    def thought(self, row: int, chunk: int) -> list[int] | None:
        return [0] if chunk else None


def test_without_thinking_while_decoding_only_the_prompt_is_thought_about():
    model, read = build(Shape(chunk_size=4)), [3, 4, 5, 6, 7]
    with steer(model, -1e4):
        (result,) = generate_ids(
            model, [read], max_new_tokens=9, eos_ids=[], think_while_decoding=False
        )
        for token in result.ids:
            reading = prefill_sequential(model, [read], len(read), hook=FirstAlone())
            assert token == int(model.next_ids(reading.out)[0])
            read = [*read, token]
    assert len(result.thought_ids) == 1


def test_an_eos_ends_the_row_and_its_reason_is_told():
    model = build(Shape())
    (free,) = generate_ids(model, [[3, 4, 5]], max_new_tokens=6, eos_ids=[])
    (ended,) = generate_ids(model, [[3, 4, 5]], max_new_tokens=6, eos_ids=[free.ids[2]])
    assert ended.stop_reason == "eos" and ended.ids == free.ids[: free.ids.index(free.ids[2]) + 1]


@pytest.mark.parametrize(
    "prompt, options, words",
    [
        ([[]], {}, "prompt 0 is empty"),
        ([[3], [24]], {}, "prompt 1: id 24"),
        ([[3] * 250], {"max_new_tokens": 8}, "250 tokens"),
        ([[3] * 300], {"max_new_tokens": 8}, "300 tokens"),
        ([[3]], {"max_new_tokens": 0}, "max_new_tokens 0: must be at least 1"),
        ([[3]], {"max_thought_tokens": 0}, "max_thought_tokens 0: must be at least 1"),
        ([[3]], {"prefill": "magic"}, "prefill .magic."),
        ([[3]], {"draft": "magic"}, "draft 'magic'"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_name(prompt, options, words):
    with pytest.raises(ValueError, match=words):
        generate_ids(build(Shape()), prompt, **options)


def test_a_prompt_may_fill_the_model_to_the_last_position():
    model = build(Shape(limit=32))
    (result,) = generate_ids(model, [[3] * 30], max_new_tokens=3, max_thought_tokens=4, eos_ids=[])
    assert len(result.ids) == 3


@half
@given(st.data())
def test_decoding_equals_reading_everything_again_for_every_token(data):
    """The definition of decoding: the answer so far is part of the prompt. Greedy, thoughts on the way included."""
    shape = data.draw(shapes(max_chunk=6))
    model, rows = build(shape), data.draw(prompts(shape, rows=2, chunks=3))
    with steer(model, data.draw(biases)):
        results = generate_ids(
            model, rows, max_new_tokens=shape.chunk_size + 3, max_thought_tokens=4, eos_ids=[]
        )
        for ids, result in zip(rows, results):
            read = list(ids)
            for token in result.ids:
                reading = prefill_sequential(model, [read], len(read), limit=4)
                assert token == int(model.next_ids(reading.out)[0])
                assert [z.ids for z in reading.thoughts[0]] == result.thought_ids[
                    : len(reading.thoughts[0])
                ]
                read.append(token)


@pytest.mark.parametrize("prefill", ["sequential", "speculative"])
def test_the_events_told_are_the_result_in_the_order_it_arises(prefill):
    model, c = build(Shape(chunk_size=4)), 4
    rows = [[3, 4, 5, 6, 7], [8] * 12, [9]]
    told = [[] for _ in rows]
    with steer(model, 3.0):
        results = generate_ids(
            model, rows, max_new_tokens=9, prefill=prefill, listen=lambda b, e: told[b].append(e)
        )
    for ids, events, result in zip(rows, told, results):
        assert [e for e in events if isinstance(e, int)] == result.ids
        assert [e.ids for e in events if not isinstance(e, int)] == result.thought_ids
        read = 0  # a thought comes after the token that completes its chunk, and before the next
        for event in events:
            if isinstance(event, int):
                read += 1
            elif read:
                assert (len(ids) + read) % c == 0
