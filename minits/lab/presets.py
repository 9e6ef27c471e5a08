"""Named runs: `run.py train --preset NAME`. A preset is a cell of a table: what to train, and what the paper found there.

In Table 1 one recipe for each task and method, whatever N is; N is the longest training example in operations.
"""
from __future__ import annotations

from dataclasses import dataclass

from minits.training import recipe as config

EVALUATION = {"eval_samples": 500, "eval_max_ops": 100}
BASELINES: dict[tuple[str, str], dict] = {  # instead of the task's recipe, which is that of Thinking States
    ("parity", "no-cot"): {"steps": 600}, ("parity", "cot"): {"steps": 600},
    ("vars", "no-cot"): {"steps": 600, "batch_size": 64, "lr": 5e-5},
    ("vars", "cot"): {"steps": 400, "batch_size": 64, "lr": 5e-5},
}

# Percent right on [N, 100] operations: the paper's Table 1, Qwen2.5-0.5B.
PAPER: dict[tuple[str, str], dict[int, float]] = {
    ("parity", "no-cot"): {10: 54.67, 20: 57.50, 40: 59.60}, ("vars", "no-cot"): {10: 2.15, 20: 2.17, 40: 2.19},
    ("parity", "cot"): {10: 12.35, 20: 38.12, 40: 64.38}, ("vars", "cot"): {10: 6.78, 20: 35.45, 40: 87.75},
    ("parity", "thinking"): {10: 98.37, 20: 99.02, 40: 100.00}, ("vars", "thinking"): {10: 33.76, 20: 87.23, 40: 97.71},
}

LONG_ROWS = {"layout": "long_rows", "row_tokens": 640}  # an addition to the paper's training, on top of the recipe


@dataclass(frozen=True)
class Preset:
    """Settings of a run (fields of `TrainConfig`) and its place in a table."""

    title: str
    settings: dict
    paper: float | None = None  # percent on the longer examples; None: the paper has no such cell


def make_presets() -> dict[str, Preset]:
    """All presets by name, in the order of the tables."""
    tiny = {"task": "parity", "max_ops": 10} | config.RECIPES["parity", "tiny"]
    found = {
        "tiny/parity-thinking": Preset("Thinking States, window 16", tiny | {"method": "thinking"}),
        "tiny/parity-no-cot": Preset("No-CoT, dense", tiny | {"method": "no-cot"}),
        "tiny/parity-cot": Preset("CoT, dense", tiny | {"method": "cot"}),
        "tiny/parity-dense": Preset("Thinking States, dense", tiny | {"method": "thinking", "window": 0}),
        "tiny/vars-thinking": Preset("Vars N = 10: Thinking States, window 16", {"task": "vars", "method": "thinking"}
                                     | config.RECIPES["vars", "tiny"]),
    }
    small = {"task": "vars", "method": "thinking", "variables": 2, "modulus": 5, "max_ops": 20, "window": 0, "chunk_size": 4,
             "steps": 2000, "batch_size": 32, "lr": 2e-3, "warmup": 100, "decay": 0.25} | EVALUATION
    title = "Vars, two variables modulo 5, N = {}: "
    found["tiny/vars2-20-dense"] = Preset(title.format(20) + "dense", small | {"layout": "pack"})
    found["tiny/vars2-20-window"] = Preset(title.format(20) + "window 16", small | {"layout": "pack", "window": 16})
    found["tiny/vars2-20-long-rows"] = Preset(title.format(20) + "dense + long-rows", small | LONG_ROWS)
    calm = small | {"steps": 1000, "batch_size": 96} | LONG_ROWS  # less noise
    for N, c in ((20, 3), (20, 4), (20, 6), (10, 3)):
        found[f"tiny/vars2-{N}-chunks-of-{c}"] = Preset(
            title.format(N) + f"dense + long-rows, batches of 96, chunks of {c}", calm | {"max_ops": N, "chunk_size": c})
    found["tiny/vars2-20-chunks-of-3-pack"] = Preset(
        title.format(20) + "dense, batches of 96, chunks of 3", calm | {"chunk_size": 3, "layout": "pack"})
    found["tiny/vars2-20-chunks-of-3-calm"] = Preset(
        title.format(20) + "dense + long-rows, batches of 96, chunks of 3, rate 1e-3",
        calm | {"chunk_size": 3, "lr": 1e-3, "steps": 2000})
    names = {"no-cot": "No-CoT", "cot": "CoT", "thinking": "Thinking States"}
    options = {"parity": {}, "vars": {"variables": 3, "modulus": 10}}
    for (task, method), cells in PAPER.items():
        recipe = ({"task": task, "method": method} | options[task] | config.RECIPES[task, "real"] | EVALUATION
                  | BASELINES.get((task, method), {}))
        for N, paper in cells.items():
            found[f"table1/{task}-{N}-{method}"] = Preset(f"{names[method]}, N = {N}", recipe | {"max_ops": N}, paper)
    for N in PAPER["vars", "thinking"]:
        settings = found[f"table1/vars-{N}-thinking"].settings
        found[f"table1/vars2-{N}-thinking"] = Preset(
            f"Thinking States, two variables, N = {N}", settings | {"variables": 2})
    for N in PAPER["vars", "thinking"]:
        settings = found[f"table1/vars-{N}-thinking"].settings
        found[f"beyond/vars-{N}-long-rows"] = Preset(f"Thinking States + long-rows, N = {N}", settings | LONG_ROWS)
    return found


PRESETS = make_presets()
TABLES = {  # title of each table, and the beginnings of its presets' names
    "Tiny model, on a CPU: Parity N = 10 unless said otherwise": ("tiny/",),
    "Parity": ("table1/parity-",),
    "Vars (three variables modulo 10, unless said otherwise)": ("table1/vars", "beyond/vars-"),
}


def find(name: str) -> Preset:
    """The preset called `name`. Raises ValueError naming those there are."""
    if name not in PRESETS:
        raise ValueError(f"--preset {name!r} is not known; the presets are: {', '.join(PRESETS)}.")
    return PRESETS[name]
