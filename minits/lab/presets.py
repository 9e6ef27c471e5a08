"""Named runs: `run.py train --preset NAME`.

A preset is a cell of a table: what is trained, and what the paper found there. It holds what makes
the run what it is. Weights, files of data and the seed are named by whoever runs it; what the
preset knows of them is checked.

In Table 1 there is one recipe for each task and method, whatever N is; N is the longest training
example in operations.
"""
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple

from minits.checkpoint.download import checkpoint_of, local_folder
from minits.checkpoint.files import Json, printable, read_json
from minits.lab import paper
from minits.methods import METHODS
from minits.settings import flag
from minits.tasks import TASKS, Task
from minits.tasks.two_hop import REGIMES

Settings = Json  # by name: of a run, or what is known of weights and files
WIDTHS = {"0.5B": 896, "1.5B": 1536}  # hidden sizes
EVALUATION = {"eval_samples": 500, "eval_max_ops": 100}
# An addition to the paper's training, on top of the recipe.
LONG_ROWS = {"layout": "long_rows", "row_tokens": 640}


@dataclass(frozen=True)
class Preset:
    """Settings of a run, its place in a table, and what it needs."""

    title: str
    settings: Settings
    paper: float | None = None  # percent right in the paper; None: it has no such cell
    paper_speed: float | None = None  # and times CoT's speed
    size: str | None = None  # of the model; None: any
    # What its config.json must say, and `what` it is in words.
    model: Settings = field(default_factory=dict)
    # Flags of files that must be given, and what is known of their contents (`Task.sources`).
    files: dict[str, Settings] = field(default_factory=dict)
    beside: str | None = None  # the preset of the thinking run that it is timed with; None: itself


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
    found, model = {}, {"hidden_size": WIDTHS["0.5B"]}
    options = {"parity": {}, "vars": {"variables": 3, "modulus": 10}}
    for (task, method), cells in paper.STATE_TRACKING.items():
        settings = real_recipe(task, method) | options[task] | EVALUATION
        for N, share in cells.items():
            title, own = f"{METHODS[method].title}, N = {N}", settings | {"max_ops": N}
            found[f"table1/{task}-{N}-{method}"] = Preset(title, own, share, model=model)
    for begin, end, words, change in (
        ("table1/vars2", "thinking", ", two variables", {"variables": 2}),
        ("beyond/vars", "long-rows", " + long-rows", LONG_ROWS),
    ):
        for N in paper.STATE_TRACKING["vars", "thinking"]:
            settings = found[f"table1/vars-{N}-thinking"].settings | change
            title = f"Thinking States{words}, N = {N}"
            found[f"{begin}-{N}-{end}"] = Preset(title, settings, model=model)
    return found


def real_recipe(task: str, method: str) -> Settings:
    """The task's recipe for a method on real weights."""
    return {"task": task, "method": method} | TASKS[task].recipe(method, "real")


# -- word problems and two-hop questions -----------------------------------------------------------

GSM = {
    "resample": 0.9,
    "suffix": "Think about every step of this problem, one after the other, and then give the "
    "answer at once. Ready:",
    "max_thought_tokens": 64,
    "eval_samples": 1019,
    "keep_best": True,
}
TWO_HOP = {
    "suffix": "Say it now.",
    "fact_thoughts": "said",
    "steps_shown": "bridge",
    "step_after": "hop",
    "eval_samples": 817,
    "keep_best": True,
}
# Facts are read with nothing to think; with parametric knowledge there are none.
NOT_SAID = {"fact_thoughts": "trivial", "steps_shown": "bridge"}
# A chain is removed at a constant learning rate: of two tried on valid the lower, 3e-5 and not 1e-4
# on two-hop, 1e-5 and not 5e-5 on GSM.
REMOVAL = {"method": "icot", "decay": 0.0}
LATENT = {"latents": 6, "batch_size": 128, "layout": "rows", "decay": 0.0, "lr": 1e-5}


class TableLine(NamedTuple):
    """A line of the paper's Table 2: a method, and what it takes beside the recipe of the task."""

    title: str
    own: Settings
    gsm: Settings
    two_hop: Settings


def schedule(steps: int, evaluations: int = 2, **more: Any) -> Settings:
    """Settings of a training of `steps` steps that is evaluated so often, at equal distances."""
    return {"steps": steps, "eval_every": steps // evaluations} | more


# Of Coconut and its control. On GSM 128 long rows at once would need more memory than a card of 139
# GiB has: two parts, then of all rows, took 59 GB, and 109 while a graph was captured beside others
# (`tried.jsonl`).
LATENT_SCHEDULES = (
    schedule(2000, stage_samples=36_000, accumulate=2),
    schedule(750, stage_samples=11_000),
)
LINES = {
    "cot": TableLine("CoT", {"method": "cot"}, schedule(2000), schedule(1200, 4)),
    "no-cot": TableLine("No-CoT", {"method": "no-cot"}, schedule(13_000, 4), schedule(1200, 4)),
    "thinking": TableLine(
        "Thinking States",
        {"method": "thinking"},
        schedule(11_000, 4, one_per_chunk=True),
        # On valid: names as thoughts 98.0 %, whole facts 91.7 (c = 8, a longer text: 96.4 and
        # 89.7). For CoT facts are better: 98.8, names 94.0.
        schedule(1200, 4, steps_shown="name"),
    ),
    "icot": TableLine(
        "iCoT, token by token",
        REMOVAL | {"removal": "tokens"},
        schedule(11_400, 6, stage_samples=8_000, lr=1e-5),
        # The longest chain has 19 tokens; one goes every eighth of an epoch, facts counted in.
        schedule(1200, 4, remove_all_at=20, stage_samples=1_400),
    ),
    "icot-steps": TableLine(
        "iCoT, step by step",
        REMOVAL | {"removal": "steps"},
        schedule(4000, stage_samples=21_000, lr=1e-5),
        schedule(1200, stage_samples=8_000),
    ),
    "coconut": TableLine(
        f"Coconut, {LATENT['latents']} latents", LATENT | {"method": "coconut"}, *LATENT_SCHEDULES
    ),
    "pause": TableLine("Pause tokens", LATENT | {"method": "pause"}, *LATENT_SCHEDULES),
}
MAIN = ("cot", "no-cot", "thinking")  # at every size, and where two-hop's facts are not said
# Of each benchmark, the lines that there are at 1.5B, too.
LARGE = dict.fromkeys(REGIMES, MAIN) | {"gsm": (*MAIN, "icot", "icot-steps", "coconut")}
# What single presets have otherwise than their line; eight parts are reckoned, not measured.
EXCEPTIONS = {"gsm/1.5b-thinking": {"lr": 3e-5}, "gsm/1.5b-coconut": {"accumulate": 8}}
# The paper's training: steps that end in one chunk share a state, so thoughts are long.
AS_WRITTEN = schedule(7500, 3, method="thinking", chunk_size=8, suffix="", max_thought_tokens=256)


def reasoning_preset(size: str, title: str, benchmark: str, method: str, **more: Any) -> Preset:
    """A method on word problems ("gsm"), or on two-hop questions in one of the REGIMES."""
    if benchmark == "gsm":
        settings, files = real_recipe("gsm", method) | GSM | more, ("train", "valid", "test")
    else:
        settings = real_recipe("two-hop", method) | TWO_HOP | {"knowledge": benchmark} | more
        files = ("train", "test", REGIMES[benchmark])
        if settings["fact_thoughts"] == "said" and benchmark == "parametric":
            files += ("facts",)
    share, speed = paper.REASONING[benchmark].get(method, (None, None))
    return Preset(
        title,
        settings,
        share,
        speed,
        size,
        model={"hidden_size": WIDTHS[size]},
        files={name: {} for name in files},
    )


def table2_presets() -> dict[str, Preset]:
    """The paper's Table 2, by size of the model, and Table 3."""
    found = {}
    beginnings = {"gsm": "gsm/"} | {regime: f"two-hop/{regime}-" for regime in REGIMES}
    for size, (benchmark, beginning) in product(WIDTHS, beginnings.items()):
        beginning += f"{size.lower()}-"
        for name, line in LINES.items():
            if size == "1.5B" and name not in LARGE[benchmark]:
                continue
            settings = line.own | (line.gsm if benchmark == "gsm" else line.two_hop)
            settings |= EXCEPTIONS.get(beginning + name, {})
            made = reasoning_preset(size, f"{line.title}, {size}", benchmark, **settings)
            found[beginning + name] = replace(made, beside=f"{beginning}thinking")
    for regime, name in product(REGIMES, MAIN):
        title = f"{LINES[name].title}, facts not said, 0.5B"
        settings = LINES[name].own | LINES[name].two_hop | NOT_SAID
        made = reasoning_preset("0.5B", title, regime, **settings)
        beginning = f"two-hop/{regime}-0.5b-"
        found[f"{beginning}{name}-plain"] = replace(made, beside=f"{beginning}thinking-plain")
    usual = found["gsm/0.5b-coconut"]
    for latents, (share, speed) in paper.COCONUT.items():
        if latents != LATENT["latents"]:
            found[f"gsm/0.5b-coconut-{latents}"] = replace(
                usual,
                title=f"Coconut, {latents} latents, 0.5B",
                settings=usual.settings | {"latents": latents},
                paper=share,
                paper_speed=speed,
            )
    for size in WIDTHS:
        title = f"Thinking States as the paper writes it, {size}"
        found[f"gsm/{size.lower()}-as-written"] = reasoning_preset(
            size, title, "gsm", **AS_WRITTEN
        )
    return found


# -- ablations, and the paper's own recipe ---------------------------------------------------------

LAYERS = (2, 4, 8, 12, 16, 20)  # of 24, H is read after; the default: after 23
CHUNKS = (2, 4, 8, 16, 32)

# A chunk of 32 ends in the text after the question, and the answer comes after its state: under the
# usual text 75 % of GSM's rows would be late at that size, under this one 3 %.
LATER = {
    "suffix": "Think about every step of this problem, one after the other, keep each result in "
    "mind while you read this line to its end, and then give the answer at once, as a number and "
    "without any more words. Ready:",
}
HOP_LATER = {
    "suffix": "Before you say it, think of the one fact that this question needs first, keep it in "
    "mind while you read this line to its end, and then say the answer at once, in few words.",
}


def ablations() -> dict[str, Preset]:
    """One change each to c = 8, L_out = 23, steps that may share a state: the cell `chunk-8`."""
    cells = {f"extract-{n}": (f"L_out = {n}, c = 8", {"extract_after": n}) for n in LAYERS}
    cells |= {f"chunk-{c}": (f"L_out = 23, c = {c}", {"chunk_size": c}) for c in CHUNKS}
    for c in CHUNKS:
        title = f"c = {c}, one step a chunk"
        cells[f"chunk-{c}-one"] = title, {"chunk_size": c, "one_per_chunk": True}
    cells["lm-loss-all"] = "L_LM on the prompt, too", {"lm_loss": "all"}
    usual = {"method": "thinking", "chunk_size": 8, "max_thought_tokens": 256}
    found = {}
    for task, benchmark, own in (
        ("gsm", "gsm", schedule(4800, 3, **LATER)),
        ("two-hop", "full", schedule(1200, 4, steps_shown="name", **HOP_LATER)),
    ):
        for name, (title, change) in cells.items():
            if task == "two-hop" and name.endswith("-one"):
                continue  # its rows have one step
            made = reasoning_preset("0.5B", title, benchmark, **usual | own | change)
            found[f"ablation/{task}-{name}"] = replace(made, paper=None, paper_speed=None)
    return found


def paper_presets() -> dict[str, Preset]:
    """The paper's recipe as it is written, for whoever has its weights and its rows.

    Three epochs: it gives neither their number nor rate and batch. Its steps were placed by a
    teacher LLM, here rules place them.
    """
    own = schedule(
        9_038, 3, batch_size=128, lr=3e-5, skip_bad=True, eval_samples=1319, keep_best=True
    )
    settings = real_recipe("gsm", "thinking") | AS_WRITTEN | own
    files = {"train": paper.GSM8K_AUG, "valid": {}, "test": {}}
    found = paper.REASONING["gsm"]["thinking"]
    title = "Thinking States, the paper's recipe"
    return {"paper/gsm-1.5b": Preset(title, settings, *found, "1.5B", paper.QWEN_1_5B, files)}


PRESETS = tiny_presets() | table1_presets() | table2_presets() | ablations() | paper_presets()
TABLES = {  # title of each table of Table 1, and the beginnings of its presets' names
    "Tiny model, on a CPU: Parity N = 10 unless said otherwise": ("tiny/",),
    "Parity": ("table1/parity-",),
    "Vars (three variables modulo 10, unless said otherwise)": ("table1/vars", "beyond/vars-"),
}


# -- what a preset needs ---------------------------------------------------------------------------


def find_preset(name: str) -> Preset:
    """The preset called `name`. Raises ValueError naming those there are, or near it."""
    if name not in PRESETS:
        family = name.partition("/")[0] + "/"
        near = [each for each in PRESETS if each.startswith(family)]
        known = near or dict.fromkeys(f"{each.partition('/')[0]}/…" for each in PRESETS)
        raise ValueError(
            f"--preset {name!r} is not known; the presets are: {', '.join(known)} (run.py report "
            "lists them)."
        )
    return PRESETS[name]


def check_needs(name: str, given: Settings) -> None:
    """Raises ValueError where weights or files that a preset needs were not given, naming all."""
    preset, tiny = find_preset(name), given.get("model", "tiny") == "tiny"
    lacking = [
        f"{flag(split)} FILE{known_of(known)}"
        for split, known in preset.files.items()
        if not given.get(split)
    ]
    if tiny and not name.startswith("tiny/"):
        lacking.insert(0, f"--model FOLDER or a hub id{known_of(preset.model)}")
    if lacking:
        raise ValueError(
            f"--preset {name} with --model {given.get('model', 'tiny')} lacks "
            f"{', '.join(lacking)}. Name what it lacks; a preset holds no weights and no data."
        )
    if name.startswith("tiny/") and not tiny:
        raise ValueError(
            f"--preset {name} with --model {given['model']}: presets tiny/… train the tiny "
            "model, the others real weights. Leave --model out."
        )


def known_of(known: Settings) -> str:
    """What is known of weights or a file, in brackets."""
    words = [f"{key} {value}".removeprefix("what ") for key, value in known.items()]
    return f" ({', '.join(words)})" if known else ""


def check_contents(name: str, model: str, revision: str | None, task: Task) -> None:
    """Raises ValueError where weights or rows are not those of a preset, naming all differences.

    As the task does where a file is none, or is not there.
    """
    preset, wrong = find_preset(name), []
    if preset.model:
        path = checkpoint_of(local_folder(model, revision)) / "config.json"
        wrong += mismatches(f"{path}", preset.model, read_json(path))
    for split, known in preset.files.items():
        if known:
            about = task.sources()[split]
            lines = about["rows"] + about["skipped"]
            wrong += mismatches(f"{flag(split)} {about['file']}", known, about | {"rows": lines})
    if wrong:
        raise ValueError(
            f"--preset {name} is a run on other weights or rows: {'; '.join(wrong)}. Name those, "
            "or give the settings without --preset."
        )


def mismatches(what: str, known: Settings, found: Settings) -> list[str]:
    """Where what was found is not what is known."""
    return [
        f"{what}: {key} {printable(found.get(key))}, not {value}"
        for key, value in known.items()
        if key != "what" and found.get(key) != value
    ]
