"""Made-up records of the shape that real runs have, for tables and figures."""

from __future__ import annotations

import random
from typing import Any

from minits.lab.presets import PRESETS, WIDTHS
from minits.training.scoring import wilson

N = 60  # test rows


def evaluation(share: float, seed: int, clusters: list[int] | None = None) -> dict[str, Any]:
    """What a report holds of N rows, about `share` of them right."""
    rng = random.Random(seed)
    right = "".join(str(int(rng.random() < share)) for _ in range(N))
    found = right.count("1")
    return {
        "n": N,
        "accuracy": found / N,
        "interval": wilson(found, N),
        "nontrivial_right": share / 2,
        "late_share": 0.125,
        "counts": {"first_result": 0.5, "last_result": 0.25, "bridge_wrong": 0.125},
        "right": right,
        "clusters": clusters,
    }


MADE = {"machine": "a card", "revision": "abc1234"}
START = {"model": "runs/some-start"}


def trained(name: str, share: float, seed: int = 1, named: bool = True) -> dict[str, Any]:
    """A training of a preset that `named` it, or had its settings all the same."""
    preset = PRESETS[name]
    clusters = [i // 3 for i in range(N)] if preset.settings["task"] == "two-hop" else None
    valid = evaluation(share, seed + 100)
    return {
        "run": f"runs/{name}",
        "seed": seed,
        "hidden_size": WIDTHS[preset.size],
        "settings": preset.settings | START,
        "valid": valid,
        "accuracy_valid": valid["accuracy"],
        "test": evaluation(share, seed, clusters),
        "steps": 10,
        "train_seconds": 100.4 + seed,
        **MADE,
        **({"preset": name} if named else {}),
    }


WAYS = [
    {"prefill": "sequential", "draft": "trivial", "lookahead": None, "ms": 99.0},
    {"prefill": "speculative", "draft": "trivial", "lookahead": None},
    {"prefill": "speculative", "draft": "carry", "lookahead": 2, "ms": 88.0},
]


def answered(name: str, **ms: float) -> dict[str, Any]:
    """`bench answers` of a thinking run of a preset: milliseconds by method."""
    lines = [
        {
            "what": "answers, one at a time",
            "run": f"runs/{method}",
            "method": method,
            "options": {"latents": 6} if method == "coconut" else {},
            "prompts": 7,
            "ms": taken,
            "speed_up": 1.5,
            **dict.fromkeys(["rounds", "entered_and_one", "chunk_passes", "tokens"], 2.5),
            "thought_tokens": 9.0,
            **way,
        }
        for method, taken in sorted(ms.items(), key=lambda each: each[0] == "thinking")  # last
        for way in (WAYS if method == "thinking" else [{}])
    ]
    return {
        "run": f"runs/{name}",
        "settings": PRESETS[name].settings | START,
        "lines": lines,
        "path": "graphs",
        "hidden_size": WIDTHS[PRESETS[name].size],
        **MADE,
    }


def costs() -> dict[str, Any]:
    """`bench cost`: Thinking States level, Coconut linear."""
    lines = []
    for n in (1, 2, 10):
        for side, ms in (("Thinking States", 2.0), ("Coconut", 4.0 * n)):
            line = {"what": "forward and backward", "side": side, "steps": n, "path": "eager"}
            lines.append(line | dict.fromkeys(("forward", "backward", "both"), {"ms": ms}))
    findings = {
        "what": "findings",
        "path": "eager",
        "Coconut": {"ms_a_latent": 4.0, "intercept_ms": 0.0, "r_squared": 1.0},
        "Thinking States": {"slowest_over_fastest": 1.0},
        "Coconut at 10 steps over": {"Thinking States": 20.0},
    }
    return {"lines": [*lines, findings], **MADE}
