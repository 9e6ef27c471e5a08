"""The fast path's bookkeeping on any machine: buckets, pooled caches, tensors changed in place, rows gathered.

Kernels and graphs are replaced by the plain layer and by plain calls; test_fast.py has the real ones, on CUDA.
"""
import importlib
import random
import sys
import types

import pytest
import torch
from strategies import Shape, fresh, steer

from minits.cache import KVCache
from minits.generation import generate_ids

KEYS = ("ids", "thought_ids", "nontrivial", "stop_reason", "cut_thoughts")


@pytest.fixture
def fast(monkeypatch):
    """A maker of fast models on the CPU."""
    language = types.SimpleNamespace(constexpr=int, float32="float32", float64="float64")
    stub = types.SimpleNamespace(jit=lambda f: f, language=language, cdiv=lambda a, b: -(-a // b))
    module = types.ModuleType("triton.language")
    module.__dict__.update(vars(language))
    top = types.ModuleType("triton")
    top.__dict__.update(vars(stub) | {"language": module})
    for name, value in (("triton", top), ("triton.language", module)):
        monkeypatch.setitem(sys.modules, name, value)
    for name in ("minits.fast.kernels", "minits.fast.engine"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    path = importlib.import_module("minits.fast.engine")
    monkeypatch.setattr(path.Graphs, "__call__", lambda self, key, f, *x: f(*[value.clone() for value in x]).clone())
    monkeypatch.setattr(path.Graphs, "change", lambda self, key, f, *x: f(*x))

    def make(shape: Shape):
        plain = fresh(shape)

        class PlainLayer:
            def __init__(self, layer):
                self.layer = layer

            def run(self, x, step, k, v):
                B, T = step.positions.shape
                cache = KVCache.over(k[None], v[None])
                x.copy_(self.layer(x.view(B, T, -1), plain.backbone.frame(step.positions, cache), 0).reshape(B * T, -1))
        monkeypatch.setattr(path, "PackedLayer", PlainLayer)
        return path.FastThinkingStates(fresh(shape))
    yield make
    for name in ("minits.fast.kernels", "minits.fast.engine"):  # what was made of stubs must not outlive them
        sys.modules.pop(name, None)


@pytest.mark.parametrize("shape", [
    Shape(chunk_size=4), Shape(layers=4, chunk_size=3, window=5, first_sliding=2, extract_after=4, seed=1),
    Shape(layers=2, chunk_size=5, inject_after=0, extract_after=0, seed=2)], ids=["dense", "sliding", "no middle"])
@pytest.mark.parametrize("bias", [3.0, -1e4])
def test_ragged_batches_in_every_mode_give_what_the_plain_path_gives(shape, bias, fast):
    plain, model, rng = fresh(shape), fast(shape), random.Random(1)
    options = dict(max_new_tokens=11, max_thought_tokens=5)
    with steer(plain, bias), steer(model, bias):
        for _ in range(5):
            rows = [[rng.randrange(24) for _ in range(rng.randint(1, 40))] for _ in range(rng.randint(1, 5))]
            definition = generate_ids(plain, rows, prefill="sequential", **options)
            for mode in ({"prefill": "sequential"}, {"draft": "trivial"}, {"draft": "carry"}, {"draft": "both", "window": 2}):
                for a, b in zip(definition, generate_ids(model, rows, **mode, **options)):
                    assert all(getattr(a, key) == getattr(b, key) for key in KEYS), mode


def test_caches_go_back_to_their_pool(fast):
    model, made = fast(Shape(chunk_size=4)), []
    with steer(model, 3.0):
        for _ in range(3):
            generate_ids(model, [[3] * 17, [4] * 9], max_new_tokens=9)
            made.append(sum(map(len, model.free.values())))
    assert made[-1] == made[0]  # from the second time on nothing new is made
