"""Decoding and prefill of the same weights in transformers, beside `run.py bench decode`.

    python -m minits.lab.bench_transformers FOLDER cuda bfloat16

Eager, and on CUDA also with the static cache, for which `generate` compiles the decoding step.
"""
import json
import sys
from functools import partial

import torch

from minits.lab.bench import prompt_of, timed


def main(folder: str, device: str = "cpu", dtype: str = "float32") -> None:
    """Prints tokens/s after a prompt of 128 tokens, and the time of that prompt."""
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        sys.exit(f"{error}: pip install transformers")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    model, ids = model.to(device).eval(), torch.tensor([prompt_of(128)], device=device)
    for cache in ("dynamic", "static") if device == "cuda" else ("dynamic",):

        def time_of(tokens: int) -> dict:
            answer = partial(
                model.generate,
                ids,
                min_new_tokens=tokens,
                max_new_tokens=tokens,
                do_sample=False,
                cache_implementation=cache,
                pad_token_id=0,
            )
            return timed(answer, repeats=10)

        one, many = time_of(1), time_of(65)
        rate = 64 / (many["ms"] - one["ms"]) * 1e3
        found = {"what": f"transformers, {cache} cache, decode", "tokens_per_s": rate}
        print(json.dumps(found | {"prefill_128": one, "with_64_more": many}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
