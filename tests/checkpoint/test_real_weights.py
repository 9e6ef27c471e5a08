"""Real Qwen2.5 weights against transformers.

Run with: MINITS_REAL=FOLDER pytest -s tests/checkpoint/test_real_weights.py
"""

import os

import pytest
import torch

from minits import generate, generate_ids, load, save

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(
    "MINITS_REAL" not in os.environ, reason="MINITS_REAL names no folder"
)
PROMPTS = [
    "The capital of France is",
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in "
    "May. How many clips",
    "Zürich liegt in der Schweiz, 東京は日本の首都で、",
    "The coin starts at state heads. Alice flips the coin. Bob doesn't flip the coin. "
    "The final state of the coin is",
]


@pytest.fixture(scope="module")
def both():
    folder = os.environ["MINITS_REAL"]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return *load(folder), theirs


@torch.no_grad()
def test_logits_equal_transformers(both):
    model, tokenizer, theirs = both
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer.encode(prompt)])
        gap = (model.backbone(ids) - theirs(ids).logits).abs().max().item()
        print(f"{ids.shape[1]} tokens: largest difference {gap:.1e}")
        assert gap <= 2e-3


def test_ids_equal_the_transformers_tokenizer(both):
    _, tokenizer, _ = both
    oracle = transformers.AutoTokenizer.from_pretrained(os.environ["MINITS_REAL"])
    for prompt in PROMPTS:
        assert tokenizer.encode(prompt) == oracle(prompt)["input_ids"]


def test_added_words_are_encoded_as_by_transformers_and_control_tokens_stay_text(both):
    _, tokenizer, _ = both
    oracle = transformers.AutoTokenizer.from_pretrained(os.environ["MINITS_REAL"])
    words = ["<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|im_start|>", "<|endoftext|>"]
    for word in words:
        text = f"a {word}b{word}{word} é"
        ids = oracle(text, split_special_tokens=True)["input_ids"]
        assert tokenizer.encode(text) == ids
        assert (oracle.convert_tokens_to_ids(word) in ids) == (
            word not in oracle.all_special_tokens
        )


def test_32_greedy_tokens_are_identical(both):
    model, tokenizer, theirs = both
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt)
        out = theirs.generate(torch.tensor([ids]), max_new_tokens=32, do_sample=False)
        (ours,) = generate_ids(model, [ids], max_new_tokens=32, think=False)
        print(repr(tokenizer.decode(ours.ids)))
        assert ours.ids == out[0, len(ids) :].tolist()


def test_speculative_equals_sequential_with_untrained_blocks(both):
    model, tokenizer, _ = both
    options = dict(max_new_tokens=8, max_thought_tokens=6)
    definition = generate(model, tokenizer, PROMPTS, prefill="sequential", **options)
    for draft in ("trivial", "carry"):
        for a, b in zip(definition, generate(model, tokenizer, PROMPTS, draft=draft, **options)):
            assert (a.text, a.thoughts, a.nontrivial) == (b.text, b.thoughts, b.nontrivial)


def test_the_saved_folder_loads_in_transformers(both, tmp_path):
    model, tokenizer, theirs = both
    save(model, tokenizer, tmp_path / "saved", {"method": "thinking"})
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", dtype=torch.float32
    )
    mine, original = again.state_dict(), theirs.state_dict()
    assert mine.keys() == original.keys()
    assert all(torch.equal(mine[name], original[name]) for name in original)
