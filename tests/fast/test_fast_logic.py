"""The engine's bookkeeping on any machine: buckets, pooled caches, static buffers, scripts.

Kernels and graphs are replaced by the plain layer and by plain calls; test_fast.py has the real
ones, on CUDA.
"""

import importlib
import random
import sys
import types

import pytest
import torch
from strategies import Shape, fresh, steer

from minits.checkpoint.tiny import ASSETS
from minits.generation import generate_ids
from minits.prefill import Intervention

KEYS = ("ids", "thought_ids", "nontrivial", "stop_reason", "cut_thoughts")
NAMES = ("minits.fast.kernels", "minits.fast.packed", "minits.fast.engine")


@pytest.fixture
def fast(monkeypatch):
    """A maker of engines on the CPU."""
    language = types.SimpleNamespace(constexpr=int, float32="float32", float64="float64")
    module = types.ModuleType("triton.language")
    module.__dict__.update(vars(language))
    top = types.ModuleType("triton")
    top.jit, top.language, top.cdiv = (lambda f: f), module, (lambda a, b: -(-a // b))
    for name, value in (("triton", top), ("triton.language", module)):
        monkeypatch.setitem(sys.modules, name, value)
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    engine = importlib.import_module("minits.fast.engine")
    graphs = engine.Graphs
    copied = lambda self, key, f, *x: f(*[value.clone() for value in x]).clone()  # noqa: E731
    monkeypatch.setattr(graphs, "__call__", copied)
    monkeypatch.setattr(graphs, "change", lambda self, key, f, *x: f(*x))

    def make(shape: Shape):
        plain = fresh(shape)

        class PlainLayer:
            def __init__(self, layer, config):
                self.layer = layer

            def run(self, x, frame, k, v):
                B, L = frame.positions.shape
                cache = plain.backbone.new_cache(B, k.shape[2] - 1, layers=1)
                cache.k, cache.v = k[None], v[None]
                shared = plain.backbone.frame(frame.positions, cache)
                x.copy_(self.layer(x.view(B, L, -1), shared, 0).reshape(B * L, -1))

        monkeypatch.setattr(engine, "PackedLayer", PlainLayer)
        return engine.FastEngine(fresh(shape))

    yield make
    for name in NAMES:  # what was made of stubs must not outlive them
        sys.modules.pop(name, None)


class Scripted(Intervention):
    """Chunk 1 of every row thinks 7 8, chunk 2 nothing; the others are free."""

    def thought(self, row, chunk):
        return {1: [7, 8, 0], 2: [0]}.get(chunk)


SHAPES = [
    Shape(chunk_size=4),
    Shape(layers=4, chunk_size=3, window=5, first_sliding=2, extract_after=4, seed=1),
    Shape(layers=2, chunk_size=5, inject_after=0, extract_after=0, seed=2),
]


@pytest.mark.parametrize("shape", SHAPES, ids=["dense", "sliding", "no middle"])
@pytest.mark.parametrize("bias", [3.0, -1e4])
def test_ragged_batches_in_every_mode_give_what_the_plain_path_gives(shape, bias, fast):
    plain, engine, rng = fresh(shape), fast(shape), random.Random(1)
    modes = [{"prefill": "sequential"}, {"draft": "trivial"}, {"draft": "carry", "lookahead": 2}]
    with steer(plain, bias), steer(engine.model, bias):
        for hook in (Intervention(), Intervention(), Scripted()):
            options = dict(max_new_tokens=11, max_thought_tokens=5, hook=hook)
            count = rng.randint(1, 5)
            rows = [[rng.randrange(24) for _ in range(rng.randint(1, 40))] for _ in range(count)]
            definition = generate_ids(plain, rows, prefill="sequential", **options)
            for mode in modes:
                found = generate_ids(engine, rows, **mode, **options)
                for a, b in zip(definition, found, strict=True):
                    assert all(getattr(a, key) == getattr(b, key) for key in KEYS), mode


def test_caches_go_back_to_their_pool(fast):
    engine, made = fast(Shape(chunk_size=4)), []
    with steer(engine.model, 3.0):
        for _ in range(3):
            generate_ids(engine, [[3] * 17, [4] * 9], max_new_tokens=9)
            made.append(sum(map(len, engine.pools.values())))
    assert made[-1] == made[0]  # from the second time on nothing new is made


def test_the_public_names_of_the_package():
    from minits import (
        GenerationConfig,
        GenerationResult,
        Thought,
        ThinkingConfig,
        ThinkingStates,
        accelerate,
        generate,
        generate_ids,
        load,
        save,
        stream_ids,
    )

    model, tokenizer = load(ASSETS / "parity")
    assert type(model) is ThinkingStates and type(model.config) is ThinkingConfig
    prompt = "The coin starts at state heads. Alice flips the coin."
    (plain,) = generate(model, tokenizer, [prompt])
    engine = accelerate(model)  # the one that `generate` takes, wherever it runs
    (found,) = generate(engine, tokenizer, [prompt])
    assert type(found) is GenerationResult and found == plain
    assert found.text.strip() == "The final state of the coin is tails."
    ids = tokenizer.encode(prompt)
    assert generate_ids(engine, [ids])[0].ids == found.ids
    events = list(stream_ids(engine, ids, **vars(GenerationConfig())))
    thoughts = [event for event in events if isinstance(event, Thought)]
    assert [thought.ids for thought in thoughts] == found.thought_ids
    assert callable(save)
