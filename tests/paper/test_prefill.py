"""Property 5: speculative = sequential. On the CPU, and on CUDA where there is one; `deep` runs many random prompts."""

import os
import random
from itertools import zip_longest

import pytest
import torch
from hypothesis import example, given, note, strategies as st
from margins import assert_close, assert_same_keys, differing_margin
from strategies import half, DEVICES, Shape, biases, build, prompts, shapes, steer

from minits.generation import generate_ids
from minits.prefill import (
    DRAFTS,
    Intervention,
    Speculation,
    next_lookahead,
    prefill_sequential,
    prefill_speculative,
)
from minits.thinking import Thought


def assert_same_reading(a, b, atol: float) -> None:
    """b is as a: thoughts equal; states, KV of every real token, open chunks, last vectors within `atol`.

    The cause comes first: keys of the first layer that is wrong, from which token on.
    """
    c = a.state.shape[1]
    for row, length in enumerate(a.lengths):
        assert_same_keys(b.cache, a.cache, row, length, atol, c)
        pairs = zip_longest(b.thoughts[row], a.thoughts[row])
        for chunk, (found, right) in enumerate(pairs):
            assert found == right, f"row {row} of {length} tokens, c = {c}: after chunk {chunk}"
        start = (length - 1) // c * c
        found, right = (each.open_h[row, : length - start] for each in (b, a))
        assert_close(f"row {row}, H of the last chunk", found, right, atol, c, start)
        at = length // c * c
        assert_close(f"row {row}, state to be read", b.state[row], a.state[row], atol, c, at)
        found, right = b.out[row, None], a.out[row, None]
        assert_close(f"row {row}, last vector", found, right, atol, c, length - 1)


@pytest.mark.parametrize("device", DEVICES)
@given(st.data())
def test_speculative_prefill_equals_sequential_prefill(device, data):
    shape = data.draw(shapes())
    rows, limit = data.draw(prompts(shape)), data.draw(st.integers(1, 6))
    model = build(shape, device=device)
    with steer(model, data.draw(biases)):
        slots = max(map(len, rows)) + data.draw(st.integers(0, 3))
        definition = prefill_sequential(model, rows, slots, limit=limit)
        lookahead = data.draw(st.sampled_from([None, None, 1, 2, 3, 8]))
        for draft in DRAFTS:
            fast = prefill_speculative(
                model, rows, slots, limit=limit, draft=draft, lookahead=lookahead
            )
            note(f"{draft}: rounds {fast.rounds}")
            assert_same_reading(definition, fast, atol=1e-9)
            for b, ids in enumerate(rows):
                chunks = -(-len(ids) // shape.chunk_size)
                entering = sum(not z.trivial for z in definition.thoughts[b][: chunks - 1])
                assert (
                    sum(fast.accepted[b]) == chunks
                    and len(fast.accepted[b]) == fast.rounds[b] <= chunks
                )
                if draft == "trivial" and lookahead is None:
                    assert fast.rounds[b] == entering + 1
                if (
                    lookahead == 1
                    and (definition.thoughts[b] or [None])[0] is not None
                    and entering == chunks - 1
                ):
                    assert (
                        fast.rounds[b] == chunks
                    )  # a lookahead of one stays one while every chunk thinks


@pytest.mark.parametrize("device", DEVICES)
@half
@given(st.data())
@example(data=None)
def test_generation_is_the_same_in_every_mode_and_each_row_equals_itself_alone(device, data):
    if data is None:  # a pinned case: lengths at, before and after a border; thoughts mixed and cut
        shape, rows, bias, limit = Shape(chunk_size=4), [[3] * 8, [4] * 7, [5] * 9, [6]], 1.5, 2
    else:
        shape = data.draw(shapes())
        rows, bias, limit = (
            data.draw(prompts(shape)),
            data.draw(biases),
            data.draw(st.integers(1, 6)),
        )
    model = build(shape, device=device)
    options = dict(max_new_tokens=2 * shape.chunk_size + 1, max_thought_tokens=limit)
    with steer(model, bias):
        alone = [generate_ids(model, [ids], prefill="sequential", **options)[0] for ids in rows]
        for how in (
            {"prefill": "sequential"},
            {"draft": "trivial"},
            {"draft": "carry"},
            {"draft": "trivial", "lookahead": 2},
            {"draft": "carry", "lookahead": 3},
        ):
            for one, together in zip(alone, generate_ids(model, rows, **how, **options)):
                for key in ("ids", "thought_ids", "nontrivial", "stop_reason", "cut_thoughts"):
                    assert getattr(one, key) == getattr(together, key)


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_cache_full_of_garbage_changes_nothing(draft, monkeypatch):
    model = build(Shape(chunk_size=4, window=5, first_sliding=1))
    rows = [[random.Random(i).randrange(24) for _ in range(n)] for i, n in enumerate((3, 17, 12))]
    with steer(model, 3.0):
        clean = prefill_speculative(model, rows, 20, limit=5, draft=draft)
        make = model.backbone.new_cache

        def dirty(*arguments, **keywords):
            cache = make(*arguments, **keywords)
            cache.k.fill_(1e6)
            cache.v.fill_(-1e6)
            return cache

        monkeypatch.setattr(model.backbone, "new_cache", dirty)
        assert_same_reading(
            clean,
            prefill_speculative(model, rows, 20, limit=5, draft=draft),
            atol=1e-9,
        )


def test_an_error_in_the_middle_leaves_nothing_behind():
    model, rows = build(Shape()), [[5, 6, 7, 8] * 4]
    with steer(model, 3.0):
        before = prefill_speculative(model, rows, 16, limit=5)
        calls = iter(range(3))

        def fail_late(*_):
            if next(calls, None) is None:
                raise RuntimeError("stopped in the middle")

        hook = model.compression_block.register_forward_hook(fail_late)
        with pytest.raises(RuntimeError, match="in the middle"):
            for _ in range(9):
                prefill_speculative(model, rows, 16, limit=5)
        hook.remove()
        assert_same_reading(before, prefill_speculative(model, rows, 16, limit=5), atol=0)


class Swapped(Intervention):
    """T is made to say one thing in one chunk of every row, and every state comes in half."""

    def __init__(self, chunk: int, ids: list[int]) -> None:
        self.chunk, self.ids = chunk, ids

    def thought(self, row: int, chunk: int) -> list[int] | None:
        return self.ids if chunk == self.chunk else None

    def states(self, places: list[tuple[int, int]], states: torch.Tensor) -> torch.Tensor:
        assert len(places) == len(states)
        return states / 2


class Same(Intervention):
    """Every chunk thinks the same, whatever it read."""

    def thought(self, row: int, chunk: int) -> list[int]:
        return [5, 0]


def test_carry_bets_on_the_thoughts_of_the_round_before():
    model = build(Shape(chunk_size=4))
    rounds = [
        prefill_speculative(model, [[3] * 16], 16, draft=draft, hook=Same()).accepted
        for draft in ("trivial", "carry")
    ]
    assert rounds == [[[1, 1, 1, 1]], [[1, 3]]]


def test_the_lookahead_doubles_where_the_text_is_quiet_and_halves_after_a_miss():
    nothing, some = Thought([0]), Thought([5, 0])
    spec = Speculation(chunks=9, lookahead=4, drafts=[nothing] * 8)
    assert next_lookahead(spec, 4, [nothing] * 4) == 8
    assert next_lookahead(spec, 4, [nothing] * 3 + [some]) == 4
    assert next_lookahead(spec, 4, [nothing] * 3) == 4  # the last chunk is partial
    assert next_lookahead(spec, 3, [nothing] * 4) == 2
    spec.lookahead = 1
    assert next_lookahead(spec, 0, []) == 1


@half
@given(st.data())
def test_an_intervention_acts_alike_in_every_way_of_reading(data):
    shape = data.draw(shapes(max_chunk=6))
    model, rows = build(shape), data.draw(prompts(shape))
    hook = Swapped(
        data.draw(st.integers(0, 3)), [*data.draw(st.lists(st.integers(3, 23), max_size=4)), 0]
    )
    with steer(model, data.draw(biases)):
        slots, how = max(map(len, rows)), {"limit": 5, "hook": hook}
        definition = prefill_sequential(model, rows, slots, **how)
        for draft in DRAFTS:
            assert_same_reading(
                definition, prefill_speculative(model, rows, slots, draft=draft, **how), atol=1e-9
            )
    for row in definition.thoughts:
        assert [z.ids for z in row[hook.chunk : hook.chunk + 1]] in ([], [hook.ids])


# -- deep: 10,000 random prompts, both drafts, against the definition


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_many_random_prompts(device, dtype):
    """float64: no difference. float32: every difference printed with its margin, none above 1e-4.

    150 prompts, 10,000 in the `deep` profile (`MINITS_PROFILE=deep pytest -s -k many_random`).
    """
    total = 10_000 if os.environ.get("MINITS_PROFILE") == "deep" else 150
    rng, rows_a_batch, differences, decisions = random.Random(20261127), 25, [], 0
    for batch in range(total // rows_a_batch):
        shape = Shape(
            layers=rng.randint(1, 4),
            heads=4,
            kv_heads=rng.choice([1, 2, 4]),
            window=rng.choice([None, 5]),
            tie=rng.random() < 0.5,
            chunk_size=rng.randint(1, 16),
            inject_after=0,
            seed=rng.randrange(10),
        )
        shape = Shape(
            **{
                **shape.__dict__,
                "inject_after": rng.randint(0, shape.layers),
                "extract_after": shape.layers,
            }
        )
        model, c = build(shape, dtype, device), shape.chunk_size
        rows = [
            [rng.randrange(shape.vocab) for _ in range(rng.randint(1, 6 * c))]
            for _ in range(rows_a_batch)
        ]
        options = dict(max_new_tokens=c + 2, max_thought_tokens=rng.randint(1, 6))
        with steer(model, rng.choice([5.0, 3.0, 1.5, 0.0])):
            definition = generate_ids(model, rows, prefill="sequential", **options)
            for draft in DRAFTS:
                for ids, a, b in zip(
                    rows, definition, generate_ids(model, rows, draft=draft, **options)
                ):
                    decisions += len(a.ids) + sum(map(len, a.thought_ids))
                    if (a.ids, a.thought_ids) != (b.ids, b.thought_ids):
                        differences.append(
                            (draft, shape, *differing_margin(model, ids, a, b, options))
                        )
                    elif draft == "trivial":
                        assert b.rounds == b.nontrivial + 1
    print(
        f"\n{device} {dtype}: {total} prompts, {decisions} decisions, {len(differences)} differences"
    )
    for draft, shape, where, margin in differences:
        print(f"  {draft}: {where}, margin {margin:.1e}, {shape}")
    assert not (differences and dtype == torch.float64)
    assert all(margin <= 1e-4 for *_, margin in differences)
