"""Trained weights on CUDA, 2,000 prompts: MINITS_RUN=FOLDER pytest -s tests/fast/test_trained.py"""

import os

import pytest
import torch
from margins import differing_margin

from minits import accelerate, generate_ids, load
from minits.tasks import make_task

pytestmark = pytest.mark.skipif(
    "MINITS_RUN" not in os.environ or not torch.cuda.is_available(),
    reason="MINITS_RUN names no trained run, or no CUDA",
)
PROMPTS, BATCH = 2000, 100
OPTIONS = dict(max_new_tokens=12, max_thought_tokens=16)
DTYPES = [torch.float32, torch.bfloat16]


def both_models(dtype):
    """The plain model, the fast one, and prompts shortest first."""
    plain, tokenizer = load(os.environ["MINITS_RUN"], dtype, "cuda")
    task = make_task("parity")
    examples = [task.drawn("equal", i, 11, (1, 12)) for i in range(PROMPTS)]
    rows = sorted((tokenizer.encode(example.prompt) for example in examples), key=len)
    return plain, accelerate(load(os.environ["MINITS_RUN"], dtype, "cuda")[0]), rows


def margin_of(plain, ids, a, b) -> float:
    """The gap of the decision where a and b part; not a number where the row alone decides otherwise (in bfloat16)."""
    try:
        return differing_margin(plain, ids, a, b, OPTIONS)[1]
    except AssertionError:
        return float("nan")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fast_equals_plain_and_speculative_equals_sequential(dtype):
    """float32: differences listed, none with a margin above 1e-3. bfloat16: counted, with the largest margins."""
    plain, fast, rows = both_models(dtype)
    found: dict[str, list[float]] = {}
    for start in range(0, PROMPTS, BATCH):
        batch = rows[start : start + BATCH]
        definition = generate_ids(plain, batch, prefill="sequential", **OPTIONS)
        for mode in (
            {"prefill": "sequential"},
            {"draft": "trivial", "lookahead": 1},
            {"draft": "carry"},
        ):
            differing = found.setdefault(str(mode), [])
            for ids, a, b in zip(batch, definition, generate_ids(fast, batch, **mode, **OPTIONS)):
                if (a.ids, a.thought_ids) != (b.ids, b.thought_ids):
                    differing.append(margin_of(plain, ids, a, b))
    for mode, margins in found.items():
        print(f"{dtype} {mode}: {len(margins)} of {PROMPTS} differ, margins {sorted(margins)[-5:]}")
    if dtype == torch.float32:
        assert all(margin <= 1e-3 for margins in found.values() for margin in margins)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_row_of_a_batch_of_64_equals_itself_alone(dtype):
    """On the fast path. float32: exactly the same thoughts and answers; bfloat16: counted, with the margins."""
    plain, fast, rows = both_models(dtype)
    chosen, margins = rows[:: PROMPTS // 128][:128], []
    for start in (0, 64):
        batch = chosen[start : start + 64]
        for ids, together in zip(batch, generate_ids(fast, batch, **OPTIONS)):
            (alone,) = generate_ids(fast, [ids], **OPTIONS)
            if (alone.ids, alone.thought_ids) != (together.ids, together.thought_ids):
                margins.append(margin_of(plain, ids, alone, together))
    print(
        f"{dtype}: {len(margins)} of {len(chosen)} rows differ from themselves alone, margins {sorted(margins)[-5:]}"
    )
    assert dtype != torch.float32 or not margins
