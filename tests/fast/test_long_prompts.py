"""Passes go through the layers in pieces, so that memory does not grow with the square of a prompt.

With real weights: MINITS_REAL=FOLDER pytest -s tests/fast/test_long_prompts.py (half an hour).
"""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from strategies import Shape, biases, build, half, prompts, shapes, steer, write_checkpoint

from minits import prefill, qwen
from minits.generation import generate_ids
from minits.tensors import in_pieces


def small_passes(patch: pytest.MonkeyPatch, most: int) -> None:
    """At most `most` tokens go through a layer at once."""
    patch.setattr(qwen, "in_pieces", partial(in_pieces, most=most))
    patch.setattr(prefill, "PASS", most)


@half
@given(st.data())
def test_passes_in_pieces_give_what_whole_passes_give(data):
    shape = data.draw(shapes())
    rows, bias, limit = data.draw(prompts(shape)), data.draw(biases), data.draw(st.integers(1, 6))
    model, how = build(shape), data.draw(st.sampled_from(["sequential", "speculative"]))
    options = dict(max_new_tokens=5, max_thought_tokens=limit, prefill=how)
    slots = max(map(len, rows))
    with steer(model, bias), pytest.MonkeyPatch.context() as patch:
        whole = generate_ids(model, rows, **options)
        a = prefill.prefill_speculative(model, rows, slots, limit=limit)
        small_passes(patch, data.draw(st.integers(1, 20)))
        assert generate_ids(model, rows, **options) == whole
        b = prefill.prefill_speculative(model, rows, slots, limit=limit)
    for row, length in enumerate(a.lengths):
        for x, y in ((a.cache.k, b.cache.k), (a.cache.v, b.cache.v)):
            torch.testing.assert_close(
                x[:, row, :, :length], y[:, row, :, :length], atol=1e-9, rtol=0
            )
    torch.testing.assert_close(a.out, b.out, atol=1e-9, rtol=0)


def test_a_pass_is_cut_to_the_size_that_it_is_given():
    x, positions = torch.zeros(2, 7, 3), torch.arange(7).expand(2, 7)
    shapes = [list(piece.shape) for piece, _ in in_pieces(x, positions, 6)]
    assert shapes == [[2, 3, 3], [2, 3, 3], [2, 1, 3]]
    of_one = in_pieces(x, positions, 1)  # a token of each row
    assert [piece.shape[1] for piece, _ in of_one] == [1] * 7
    assert [piece.shape[1] for piece, _ in in_pieces(x, positions)] == [7]


def test_t_thinks_about_no_more_tokens_at_once_than_a_pass_has(monkeypatch):
    model, widths = build(Shape(chunk_size=4)), []
    monkeypatch.setattr(prefill, "PASS", 8)
    block = model.thinking_block
    hook = block.register_forward_hook(lambda _block, args, _out: widths.append(args[0].shape[:2]))
    with steer(model, 1e4):
        prefill.prefill_speculative(model, [[3] * 20], 20)
    hook.remove()
    assert widths == [(2, 4), (2, 4), (1, 4)]


# -- memory ----------------------------------------------------------------------------------------

MEASURE = """
import json, resource, sys, time
import torch
from minits import load
from minits.prefill import Intervention, prefill_speculative
torch.set_num_threads(2)
folder, tokens, thinks = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "thinking"
model, tokenizer = load(folder)
prompt = [1 + i * 7919 % 20 for i in range(tokens)]
K = -(-tokens // model.config.chunk_size)
class LaidDown(Intervention):
    def thought(self, row, chunk):
        # Three thoughts, near the end; the rounds after the first are short then.
        return [3, 4, 5, model.config.thought_end] if K - 6 < chunk < K - 2 else [model.config.thought_end]
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # GiB
prefill_speculative(model, [prompt[:64]], 64, thinks=thinks, hook=LaidDown())
q = model.backbone.config
cache = 2 * q.num_hidden_layers * q.num_key_value_heads * (tokens + 1) * q.head_dim * 4 / 2**30
before, start = peak(), time.perf_counter()
reading = prefill_speculative(model, [prompt], tokens, thinks=thinks, hook=LaidDown())
assert reading.rounds == [4 if thinks else 1] and reading.out.isfinite().all()
print(json.dumps({"GiB": peak() - before - cache, "cache_GiB": cache, "seconds": time.perf_counter() - start}))
"""


def measured(folder: Path | str, tokens: int, how: str) -> dict[str, float]:
    """GiB at the peak beside weights and cache, in a process of its own."""
    command = [sys.executable, "-c", MEASURE, str(folder), str(tokens), how]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss counts in other units elsewhere")
def test_memory_grows_with_the_tokens_of_a_prompt_and_not_with_their_square(tmp_path):
    folder = write_checkpoint(tmp_path / "model", Shape(limit=1 << 15, vocab=260))
    found = measured(folder, 8_192, "plain")
    # Whole passes take 0.39, a mask of 8,192 x 8,192 alone 0.06 and more once it is added.
    assert found["GiB"] < 0.2, found


@pytest.mark.skipif("MINITS_REAL" not in os.environ, reason="MINITS_REAL names no folder")
@pytest.mark.parametrize("how", ["plain", "thinking"])
def test_a_prompt_of_32768_tokens_takes_2_GiB_beside_weights_and_cache(how):
    found = measured(os.environ["MINITS_REAL"], 32_768, how)
    print(how, found)
    assert found["GiB"] <= 2.0


@pytest.mark.skipif("MINITS_REAL" not in os.environ, reason="MINITS_REAL names no folder")
def test_logits_of_4096_tokens_are_those_of_the_uncut_path(monkeypatch):
    from minits import load

    torch.set_num_threads(2)
    model, _ = load(os.environ["MINITS_REAL"])
    prompt = [1 + i * 7919 % 20_000 for i in range(4096)]
    found = []
    for most in (2048, 1 << 20):
        small_passes(monkeypatch, most)
        out = prefill.prefill_speculative(model, [prompt], 4096, thinks=False).out
        found.append(model.backbone.lm_head(out).detach())
    print("largest difference", (found[0] - found[1]).abs().max().item())
    torch.testing.assert_close(*found, atol=1e-4, rtol=0)
