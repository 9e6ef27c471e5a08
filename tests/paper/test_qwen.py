"""The backbone and the cache: properties 1, 2, 3 of the design, and a hand-computed rotation."""

from dataclasses import replace

import torch
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from strategies import half, Shape, build, fresh, prompts, shapes

from minits.cache import DifferentiableKVCache, KVCache
from minits.qwen import Qwen2ForCausalLM, Rotary
from minits.tensors import pad

GARBAGE = 1e6  # finite: a masked weight of 0 times NaN would be NaN


def garbage_cache(model, rows: int, slots: int) -> KVCache:
    cache = model.backbone.new_cache(rows, slots)
    cache.k.fill_(GARBAGE)
    cache.v.fill_(-GARBAGE)
    return cache


@torch.no_grad()
def read_in_pieces(model, ids: list[int], cuts: list[int], cache: KVCache) -> torch.Tensor:
    """Logits [T, V] of a row that is read piece by piece, cut before each of `cuts`."""
    pieces = []
    for start, end in zip([0, *cuts], [*cuts, len(ids)]):
        if end > start:
            pieces.append(
                model.backbone(
                    torch.tensor([ids[start:end]]), torch.arange(start, end)[None], cache
                )[0]
            )
    return torch.cat(pieces)


@given(st.data())
def test_any_split_through_the_cache_gives_the_one_pass_logits(data):
    shape = data.draw(shapes())
    model, ids = build(shape), data.draw(prompts(shape, rows=1))[0]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=5)))
    whole = model.backbone(torch.tensor([ids]))[0]
    torch.testing.assert_close(
        read_in_pieces(model, ids, cuts, garbage_cache(model, 1, len(ids) + 3)),
        whole,
        rtol=0,
        atol=1e-9,
    )


@given(st.data())
def test_changing_a_token_leaves_earlier_logits_alone(data):
    shape = data.draw(shapes())
    model, ids = build(shape), data.draw(prompts(shape, rows=1))[0]
    t = data.draw(st.integers(0, len(ids) - 1))
    other = ids[:t] + [(ids[t] + 1) % shape.vocab] + ids[t + 1 :]
    a, b = model.backbone(torch.tensor([ids]))[0], model.backbone(torch.tensor([other]))[0]
    assert torch.equal(a[:t], b[:t])
    assert not torch.allclose(a[t], b[t], atol=1e-6)


@given(st.data())
def test_padding_neighbours_and_row_order_leave_a_row_unchanged(data):
    shape = data.draw(shapes())
    model, rows = build(shape), data.draw(prompts(shape, rows=4))
    order = data.draw(st.permutations(range(len(rows))))
    width = max(map(len, rows)) + data.draw(st.integers(0, 3))
    batch = model.backbone(
        pad([rows[i] for i in order], data.draw(st.integers(0, shape.vocab - 1)), width)
    )
    for place, i in enumerate(order):
        torch.testing.assert_close(
            batch[place, : len(rows[i])],
            model.backbone(torch.tensor([rows[i]]))[0],
            rtol=0,
            atol=1e-9,
        )


@given(st.data())
def test_a_row_read_again_from_an_earlier_position_forgets_what_came_after(data):
    shape = data.draw(shapes())
    model, (ids, other) = build(shape), (data.draw(prompts(shape, rows=1))[0] for _ in range(2))
    keep = data.draw(st.integers(0, min(len(ids), len(other))))
    joined = ids[:keep] + other[keep:]
    cache = garbage_cache(model, 1, max(len(ids), len(other)))
    read_in_pieces(model, ids, [], cache)
    if len(joined) > keep:
        again = (
            read_in_pieces(model, joined, [keep], cache)[-(len(joined) - keep) :]
            if keep == 0
            else (
                model.backbone(
                    torch.tensor([joined[keep:]]), torch.arange(keep, len(joined))[None], cache
                )[0]
            )
        )
        torch.testing.assert_close(
            again, model.backbone(torch.tensor([joined]))[0, keep:], rtol=0, atol=1e-9
        )


def test_a_window_of_one_sees_only_the_token_itself():
    model = build(Shape(window=1))
    a = model.backbone(torch.tensor([[5, 6, 7]]))[0, -1]
    b = model.backbone(torch.tensor([[9, 3, 7]]))[0, -1]
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_the_window_counts_the_token_itself():
    model = build(Shape(layers=1, inject_after=0, extract_after=1, window=3))
    base = model.backbone(torch.tensor([[5, 6, 7, 8]]))[0, -1]
    outside, inside = model.backbone(torch.tensor([[9, 6, 7, 8], [5, 9, 7, 8]]))[:, -1]
    torch.testing.assert_close(outside, base, rtol=0, atol=1e-12)
    assert not torch.allclose(inside, base, atol=1e-6)


def test_rotation_is_half_split():
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4)  # pairs (1, 3) and (2, 4)
    config = replace(Shape(heads=1, kv_heads=1, head_dim=4, vocab=8).qwen(), rope_theta=100.0)
    frame = Qwen2ForCausalLM(config).frame(torch.tensor([[0, 1, 2, 3]]))
    turned = frame.rotate(x.expand(1, 1, 4, 4))[0, 0, 3]
    a, b = torch.tensor(3.0), torch.tensor(0.3)  # position 3: 3 / 100^0 and 3 / 100^(1/2)
    expected = [
        a.cos() - 3 * a.sin(),
        2 * b.cos() - 4 * b.sin(),
        3 * a.cos() + a.sin(),
        4 * b.cos() + 2 * b.sin(),
    ]
    torch.testing.assert_close(turned, torch.stack(expected))


def test_the_rotary_table_grows_and_keeps_the_values_it_had(monkeypatch):
    rotary, device = Rotary(Shape(head_dim=8).qwen()), torch.device("cpu")
    small = rotary.table(5, torch.float32, device)
    large = rotary.table(3 * Rotary.BLOCK, torch.float32, device)
    assert small.shape[1] == Rotary.BLOCK and large.shape[1] == 4 * Rotary.BLOCK
    assert torch.equal(large[:, : Rotary.BLOCK], small)
    # The first pair turns by its position.
    positions = torch.arange(4.0 * Rotary.BLOCK)
    torch.testing.assert_close(large[:, :, 0], torch.stack([positions.cos(), positions.sin()]))
    assert rotary.table(9, torch.float32, device) is small  # graphs know it by its address


# -- the cache for gradients through several passes ----------------------------------------------------------------------


def ragged_positions(starts: list[int], lengths: list[int], trash: int) -> torch.Tensor:
    """[B, L]: each row's next tokens, what is shorter filled up with the trash slot."""
    width = max(lengths)
    return torch.tensor(
        [[*range(s, s + n), *[trash] * (width - n)] for s, n in zip(starts, lengths)]
    )


@half
@given(st.data())
def test_the_differentiable_cache_gives_a_split_pass_the_value_and_gradient_of_the_whole(data):
    """Vectors are fed instead of ids, as for latents; ragged rows, split anywhere, in up to four passes."""
    shape = data.draw(shapes())
    model, config = fresh(shape), shape.qwen()
    rows = data.draw(prompts(shape, rows=3, chunks=3))
    longest, B = max(map(len, rows)), len(rows)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    x = torch.randn(B, longest, config.hidden_size, dtype=torch.float64, generator=generator)
    goal = torch.randn(B, longest, config.hidden_size, dtype=torch.float64, generator=generator)
    layers = range(config.num_hidden_layers)
    cuts = [
        sorted(data.draw(st.lists(st.integers(0, len(row)), min_size=3, max_size=3)))
        for row in rows
    ]
    edges = [[0, *cut, len(row)] for cut, row in zip(cuts, rows)]

    def run(passes: list[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, dict, torch.Tensor]:
        """(sum of outputs times goal, gradients of parameters, of the input) over passes of (starts, ends)."""
        model.zero_grad(set_to_none=True)
        given_x = x.clone().requires_grad_()
        sizes = (len(layers), B, config.num_key_value_heads, longest, config.head_dim)
        cache = DifferentiableKVCache(*sizes, dtype=torch.float64, device="cpu")
        for tensor in (*cache.k, *cache.v):
            tensor.fill_(GARBAGE)
        total = 0.0
        for starts, ends in passes:
            lengths = [end - start for start, end in zip(starts, ends)]
            if not any(lengths):
                continue
            positions = ragged_positions(starts, lengths, cache.trash)
            numbers, at = torch.arange(B)[:, None], positions.clamp(max=longest - 1)
            out = model.backbone.run_layers(
                given_x[numbers, at], layers, model.frame(positions, cache)
            )
            real = (positions != cache.trash)[..., None]
            total = total + (out * goal[numbers, at] * real).sum()
        total.backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        return total.detach(), grads, given_x.grad

    whole = run([([0] * B, [len(row) for row in rows])])
    split = run([([edge[i] for edge in edges], [edge[i + 1] for edge in edges]) for i in range(4)])
    torch.testing.assert_close(split[0], whole[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(split[2], whole[2], rtol=1e-9, atol=1e-9)
    assert split[1].keys() == whole[1].keys()
    for name, gradient in whole[1].items():
        torch.testing.assert_close(
            split[1][name], gradient, rtol=1e-9, atol=1e-8, msg=lambda m: f"{name}: {m}"
        )


class CacheMachine(RuleBasedStateMachine):
    """KVCache against a dict per row: {slot: value}; what was never written reads as garbage and is not compared."""

    @initialize(rows=st.integers(1, 3), slots=st.integers(1, 6))
    def start(self, rows, slots):
        self.cache = KVCache(2, rows, 2, slots, 3, dtype=torch.float64, device="cpu")
        self.cache.k.fill_(GARBAGE)
        self.cache.v.fill_(GARBAGE)
        self.model = [[{} for _ in range(rows)] for _ in range(2)]  # [layer][row]
        self.stamp = 0

    @rule(data=st.data(), layer=st.integers(0, 1))
    def write(self, data, layer):
        rows, slots = len(self.model[0]), self.cache.slots
        width = data.draw(st.integers(1, slots))
        positions = [data.draw(st.permutations(range(slots)))[:width] for _ in range(rows)]
        padded = data.draw(
            st.lists(st.booleans(), min_size=rows, max_size=rows)
        )  # these rows go to the trash slot
        self.stamp += 1
        k = torch.full((rows, 2, width, 3), float(self.stamp), dtype=torch.float64)
        k += torch.arange(width, dtype=torch.float64)[:, None] / 100
        where = torch.tensor(
            [[self.cache.trash] * width if p else at for at, p in zip(positions, padded)]
        )
        self.cache.write(layer, k, -k, where)
        for row, (at, trashed) in enumerate(zip(positions, padded)):
            if not trashed:
                self.model[layer][row].update(
                    {slot: self.stamp + i / 100 for i, slot in enumerate(at)}
                )

    @precondition(lambda self: hasattr(self, "cache"))
    @invariant()
    def reads_what_was_written(self):
        for layer, rows in enumerate(self.model):
            k, v = self.cache.read(layer, self.cache.slots)
            assert k.shape[2] == self.cache.slots
            for row, written in enumerate(rows):
                for slot, value in written.items():
                    assert (k[row, :, slot] == value).all() and (v[row, :, slot] == -value).all()


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=25, stateful_step_count=12, deadline=None)
