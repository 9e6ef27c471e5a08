"""Named runs: `run.py train --preset NAME`.

A preset is a cell of a table: what is trained, and what the paper found there.

In Table 1 there is one recipe for each task and method, whatever N is; N is the longest training
example in operations.
"""
from dataclasses import dataclass
from typing import Any

from minits.methods import METHODS
from minits.tasks import TASKS

EVALUATION = {"eval_samples": 500, "eval_max_ops": 100}

# Percent right on [N, 100] operations: the paper's Table 1, Qwen2.5-0.5B.
PAPER: dict[tuple[str, str], dict[int, float]] = {
    ("parity", "no-cot"): {10: 54.67, 20: 57.50, 40: 59.60},
    ("parity", "cot"): {10: 12.35, 20: 38.12, 40: 64.38},
    ("parity", "thinking"): {10: 98.37, 20: 99.02, 40: 100.00},
    ("vars", "no-cot"): {10: 2.15, 20: 2.17, 40: 2.19},
    ("vars", "cot"): {10: 6.78, 20: 35.45, 40: 87.75},
    ("vars", "thinking"): {10: 33.76, 20: 87.23, 40: 97.71},
}

# An addition to the paper's training, on top of the recipe.
LONG_ROWS = {"layout": "long_rows", "row_tokens": 640}


@dataclass(frozen=True)
class Preset:
    """Settings of a run and its place in a table."""

    title: str
    settings: dict[str, Any]
    paper: float | None = None  # percent on the longer examples; None: the paper has no such cell


def tiny_presets() -> dict[str, Preset]:
    """The tiny model on a CPU, Parity N = 10."""
    recipe = {"task": "parity", "max_ops": 10} | TASKS["parity"].recipes["*", "tiny"]
    thinking = recipe | {"method": "thinking"}
    return {
        "tiny/parity-thinking": Preset("Thinking States, window 16", thinking),
        "tiny/parity-dense": Preset("Thinking States, dense", thinking | {"window": 0}),
        "tiny/parity-no-cot": Preset("No-CoT, dense", recipe | {"method": "no-cot"}),
        "tiny/parity-cot": Preset("CoT, dense", recipe | {"method": "cot"}),
    }


def table1_presets() -> dict[str, Preset]:
    """The paper's Table 1, and beyond it: two variables, long rows."""
    found = {}
    options = {"parity": {}, "vars": {"variables": 3, "modulus": 10}}
    for (task, method), cells in PAPER.items():
        recipes = TASKS[task].recipes
        recipe = recipes["*", "real"] | recipes.get((method, "real"), {})
        settings = {"task": task, "method": method} | options[task] | recipe | EVALUATION
        for N, paper in cells.items():
            title = f"{METHODS[method].title}, N = {N}"
            found[f"table1/{task}-{N}-{method}"] = Preset(title, settings | {"max_ops": N}, paper)
    for N in PAPER["vars", "thinking"]:
        settings = found[f"table1/vars-{N}-thinking"].settings
        title = "Thinking States, two variables, N = "
        found[f"table1/vars2-{N}-thinking"] = Preset(f"{title}{N}", settings | {"variables": 2})
    for N in PAPER["vars", "thinking"]:
        settings = found[f"table1/vars-{N}-thinking"].settings
        title = "Thinking States + long-rows, N = "
        found[f"beyond/vars-{N}-long-rows"] = Preset(f"{title}{N}", settings | LONG_ROWS)
    return found


PRESETS = tiny_presets() | table1_presets()
TABLES = {  # title of each table, and the beginnings of its presets' names
    "Tiny model, on a CPU: Parity N = 10 unless said otherwise": ("tiny/",),
    "Parity": ("table1/parity-",),
    "Vars (three variables modulo 10, unless said otherwise)": ("table1/vars", "beyond/vars-"),
}


def find(name: str) -> Preset:
    """The preset called `name`. Raises ValueError naming those there are."""
    if name not in PRESETS:
        known = ", ".join(PRESETS)
        raise ValueError(f"--preset {name!r} is not known; the presets are: {known}.")
    return PRESETS[name]
