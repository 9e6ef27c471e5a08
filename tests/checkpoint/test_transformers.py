"""Property 4: the same numbers as transformers, the oracle (skipped where it is not installed)."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import half, Shape, shapes, write_checkpoint

from minits import generate_ids, load
from minits.qwen import RMSNorm

transformers = pytest.importorskip("transformers")


def oracle(folder, dtype=torch.float32):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    )
    return model.eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_has_the_bits_of_transformers(dtype):
    """In half precision it matters what is rounded, and when."""
    qwen2 = pytest.importorskip("transformers.models.qwen2.modeling_qwen2")
    ours, theirs = RMSNorm(64, 1e-6).to(dtype), qwen2.Qwen2RMSNorm(64, 1e-6).to(dtype)
    x = torch.randn(99, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    for norm in (ours, theirs):
        torch.nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(1))
    assert torch.equal(ours(x), theirs(x))


@half
@given(st.data())
def test_logits_equal_transformers_for_random_configurations(tmp_path_factory, data):
    shape = data.draw(shapes())
    shape = Shape(**{**shape.__dict__, "vocab": 260})
    rope = data.draw(st.sampled_from(["theta", "parameters"]))
    silent = data.draw(st.booleans())  # leave layer_types out: then max_window_layers decides
    folder = write_checkpoint(
        tmp_path_factory.mktemp("model"),
        shape,
        rope=rope,
        **({"layer_types": None} if silent else {})
    )
    ids = torch.tensor([data.draw(st.lists(st.integers(0, 259), min_size=1, max_size=40))])
    model, _ = load(folder, dtype=torch.float64)
    with torch.no_grad():
        ours, theirs = model.backbone(ids), oracle(folder, torch.float64)(ids).logits
    # Its norms and angles are in float32 even here, so equality to 1e-9 is not to be had.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-4)


def test_greedy_tokens_equal_transformers(tmp_path):
    folder = write_checkpoint(tmp_path / "model", Shape(vocab=260, seed=3))
    model, _ = load(folder)
    model.blocked[:] = False  # transformers emits padded rows too
    ids = [[5, 9, 200, 31, 8], [1, 2, 3]]
    theirs = oracle(folder)
    for prompt, result in zip(ids, generate_ids(model, ids, max_new_tokens=20, think=False)):
        out = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=20, do_sample=False, pad_token_id=256
        )
        assert result.ids == out[0, len(prompt) :].tolist()


def test_the_window_is_ignored_where_it_is_switched_off(tmp_path):
    shape = Shape(vocab=260, window=5)
    on = write_checkpoint(tmp_path / "on", shape)
    off = write_checkpoint(tmp_path / "off", shape, use_sliding_window=False, layer_types=None)
    raw = json.loads((off / "config.json").read_text())
    assert raw["sliding_window"] == 5
    ids = torch.tensor([list(range(32))])
    with torch.no_grad():
        ours = {folder.name: load(folder)[0].backbone(ids) for folder in (on, off)}
        theirs = {folder.name: oracle(folder)(ids).logits for folder in (on, off)}
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-3)
    assert not torch.allclose(ours["on"], ours["off"], atol=1e-2)
