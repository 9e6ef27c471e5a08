"""Passes whose tensors count past 2^31 numbers, on CUDA: each row is what it is alone."""

import pytest
import torch

from minits.fast.layouts import round_up
from minits.qwen import Qwen2ForCausalLM, QwenConfig

if not torch.cuda.is_available():
    pytest.skip("no CUDA", allow_module_level=True)
from minits.fast.packed import PackedLayer, StepFrame  # they want triton

# The shape of Qwen2.5-0.5B, one layer of it.
SHAPE = QwenConfig(
    vocab_size=64,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=1,
    num_attention_heads=14,
    num_key_value_heads=2,
    head_dim=64,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    max_position_embeddings=32768,
    tie_word_embeddings=True,
    sliding_window=None,
    sliding_layers=(),
)
BORDER = 2**31


def layer_and_model():
    """A layer with random weights, in bfloat16."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Qwen2ForCausalLM(SHAPE).bfloat16().requires_grad_(False)
    return PackedLayer(model.model.layers[0], SHAPE), model


def run(layer, model, x, positions, slots):
    """The layer's output [B, L, E] and its cache, for x [B, L, E] at `positions` [B, L]."""
    cache = model.new_cache(len(x), slots)
    table = model.rotary.table(slots + 1, x.dtype, x.device)[:, : slots + 1].clone()
    table[1, :, : SHAPE.head_dim // 2] *= -1
    flat = x.reshape(-1, SHAPE.hidden_size).clone()
    layer.run(flat, StepFrame(SHAPE, positions, table, slots), cache.k[0], cache.v[0])
    return flat.view(x.shape), cache


def assert_last_rows_are_whole(L, slots, B, few=3):
    """The last rows of a pass over B rows of L tokens equal a pass over them alone."""
    layer, model = layer_and_model()
    x = torch.randn(B, L, SHAPE.hidden_size, device="cuda", dtype=torch.bfloat16)
    positions = torch.arange(slots - L, slots, device="cuda").expand(B, L).contiguous()
    if L > 1:
        positions = positions - positions[0, 0]
    out, cache = run(layer, model, x, positions, slots)
    kept = out[-few:].clone(), cache.k[0, -few:].clone(), cache.v[0, -few:].clone()
    del out, cache
    alone, own = run(layer, model, x[-few:], positions[-few:], slots)
    for whole, part in zip(kept, (alone, own.k[0], own.v[0])):
        torch.testing.assert_close(whole, part, rtol=0, atol=0.06)  # two bits of bfloat16 at 4
        assert part.abs().max() > 0.5  # something was written


def test_a_pass_of_more_tokens_than_32_bits_count_in_the_mlp():
    L = 320
    rows = BORDER // (2 * SHAPE.intermediate_size * L) + 2
    assert rows * L * 2 * SHAPE.intermediate_size > BORDER
    assert_last_rows_are_whole(L, round_up(L, 128), rows)


@pytest.mark.parametrize("L", [1, 2])
def test_a_cache_of_more_numbers_than_32_bits_count(L):
    slots = 24576 if L == 1 else 1024
    rows = BORDER // (SHAPE.num_key_value_heads * (slots + 1) * SHAPE.head_dim) + 4
    assert_last_rows_are_whole(L, slots, rows)
