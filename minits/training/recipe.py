"""The settings of every command, one frozen dataclass each; run.py makes the flags from their fields.

Annotations here are read at run time, to give each flag its type.
"""

from dataclasses import dataclass, field, replace

import torch

from minits.training import distributed
from minits.supervision import LAYOUTS, METHODS


def setting(default, text: str, positional: bool = False):
    """A field with its default and its help text (meaning and unit); a flag unless it is `positional`."""
    return field(default=default, metadata={"help": text, "positional": positional})


def flag(name: str) -> str:
    """How the command line spells a setting."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class TrainConfig:
    """`run.py train`. None: chosen by the recipe for the task and kind of model (`RECIPES`), or by the machine."""

    task: str
    preset: str | None = setting(None, "a named run of the tables of results (`run.py report` lists them)")
    model: str = setting("tiny", "tiny (made on the spot), a folder in Hugging Face layout, or a hub id")
    revision: str | None = setting(None, "branch, tag or commit of a hub id")
    method: str = setting("thinking", f"one of {', '.join(METHODS)}")
    max_ops: int = setting(10, "longest training example, in operations; lengths are uniform in 1 … this")
    chunk_size: int | None = setting(None, "c: tokens a chunk; default: by recipe, see below")
    inject_after: int = setting(1, "L_in: layers before the state is added")
    extract_after: int | None = setting(None, "L_out: layers before H is taken; default: all but the last")
    window: int = setting(16, "sliding attention of the tiny thinking model, in tokens; 0: dense")
    steps: int | None = setting(None, "optimizer steps; default: by recipe")
    batch_size: int | None = setting(None, "samples an optimizer step, over all processes; default: by recipe")
    layout: str | None = setting(None, "how samples are laid into rows: rows (one each), pack (several that do not see one "
                                       "another: the same losses), long_rows (several that do: another training); "
                                       "default: by recipe")
    row_tokens: int = setting(256, "tokens a row, for pack and long_rows")
    accumulate: int = setting(1, "parts that a step's samples are split into, to save memory")
    lr: float | None = setting(None, "peak learning rate of AdamW; default: by recipe")
    warmup: int | None = setting(None, "steps of linear warm-up; default: by recipe")
    decay: float | None = setting(None, "share of the steps after it, at the end, over which the rate falls to zero as a "
                                        "cosine; it is constant before; default: by recipe")
    weight_decay: float = setting(0.0, "AdamW weight decay")
    clip: float = setting(1.0, "largest gradient norm")
    thought_weight: float = setting(1.0, "weight w of the thought loss")
    max_thought_tokens: int = setting(64, "tokens of the longest thought, closing EOS not counted")
    seed: int = setting(0, "seed of initial weights and data")
    device: str | None = setting(None, "cpu, cuda or cuda:N; default: cuda if there is one")
    dtype: str | None = setting(None, "compute type, float32 or bfloat16 (float32 master weights either way); "
                                      "default: bfloat16 on cuda, else float32")
    compile: bool = setting(False, "torch.compile the layers: half a minute to start, then faster steps (cuda)")
    eval_samples: int = setting(500, "examples of each final evaluation")
    eval_max_ops: int = setting(100, "longest evaluation example, in operations; --max-ops if that is more")
    eval_every: int = setting(0, "steps between evaluations on a fifth of the examples; 0: only at the end")
    save_every: int = setting(0, "steps between checkpoints; 0: only at the end and on Ctrl-C")
    no_save: bool = setting(False, "write no checkpoint (for measurements whose weights cannot be kept)")
    log_every: int = setting(20, "steps between log lines where there is no terminal")
    variables: int | None = setting(None, "vars: number of variables (default 3)")
    modulus: int | None = setting(None, "vars: modulus of the values (default 10)")


JSON = "make the last line of stdout one JSON object"


@dataclass(frozen=True)
class TrainCommand(TrainConfig):
    """What `run.py train` takes beside the settings that make the run what it is."""

    task: str | None = setting(None, "a task of the recipes below; a preset names its own", positional=True)
    out: str | None = setting(None, "folder of the run; default: runs/TASK-METHOD-sSEED-TIME")
    resume: bool = setting(False, "go on from the last checkpoint in --out (default: of the newest run)")
    json: bool = setting(False, JSON)


@dataclass(frozen=True)
class InferConfig:
    """`run.py infer`."""

    prompt: str | None = setting(None, "text; default: a built-in example", positional=True)
    file: str | None = setting(None, "file with one prompt a line, - for standard input")
    run: str | None = setting(None, "run folder; default: the newest in runs/, else the checkpoint that ships")
    model: str | None = setting(None, "model folder or hub id, instead of a run")
    revision: str | None = setting(None, "branch, tag or commit of a hub id")
    chunk_size: int | None = setting(None, "c for a model without trained T and C, in tokens (default 8)")
    inject_after: int | None = setting(None, "L_in for such a model, in layers (default 1)")
    extract_after: int | None = setting(None, "L_out for such a model, in layers (default: all but the last)")
    think: str = setting("auto", "on, off (plain Qwen2.5), or auto: on where T and C are trained")
    max_new_tokens: int = setting(64, "longest answer, in tokens")
    max_thought_tokens: int = setting(64, "longest thought, in tokens; longer ones are cut")
    prefill: str = setting("speculative", "speculative or sequential: the same result")
    draft: str = setting("trivial", "what speculation expects of later thoughts: trivial, carry or both")
    window: int | None = setting(None, "chunks to speculate ahead at first; default: to the end of the prompt")
    stream: bool = setting(False, "print answer and thoughts as they come")
    plain: bool = setting(False, "the plain path, without graphs (cuda) or packed products (cpu)")
    table: bool = setting(False, "show each chunk with its thought and the norm of its state")
    device: str | None = setting(None, "cpu, cuda or cuda:N; default: cuda if there is one")
    dtype: str | None = setting(None, "float32, bfloat16 or float64; default: bfloat16 on cuda, else float32")
    json: bool = setting(False, JSON)


@dataclass(frozen=True)
class EvalConfig:
    """`run.py eval`: free-running accuracy of a run."""

    task: str
    run: str | None = setting(None, "run or model folder; default: the newest in runs/, else the one that ships")
    samples: int = setting(500, "number of examples")
    min_ops: int | None = setting(None, "shortest example, in operations; default: the longest trained one")
    max_ops: int = setting(100, "longest example, in operations")
    seed: int = setting(0, "seed of the examples")
    batch_size: int = setting(64, "rows a batch; the answers do not depend on it")
    prefill: str = setting("sequential", "speculative or sequential: the same answers")
    draft: str = setting("trivial", "what speculation expects of later thoughts: trivial, carry or both")
    max_thought_tokens: int = setting(64, "longest thought, in tokens; longer ones are cut")
    variables: int | None = setting(None, "vars: number of variables; default: as in training")
    modulus: int | None = setting(None, "vars: modulus of the values; default: as in training")
    plain: bool = setting(False, "the plain path, without graphs (cuda) or packed products (cpu)")
    out: str | None = setting(None, "file for the predictions, as JSON lines")
    device: str | None = setting(None, "cpu, cuda or cuda:N; default: cuda if there is one")
    dtype: str | None = setting(None, "float32, bfloat16 or float64; default: bfloat16 on cuda, else float32")
    json: bool = setting(False, JSON)


@dataclass(frozen=True)
class DataConfig:
    """`run.py data`: look at the supervision."""

    task: str
    model: str = setting("tiny", "whose tokenizer: tiny, a folder or a hub id")
    revision: str | None = setting(None, "branch, tag or commit of a hub id")
    chunk_size: int = setting(8, "c: tokens a chunk")
    ops: int = setting(4, "operations of the example shown; the statistics use 1 … 100")
    seed: int = setting(0, "seed of the examples")
    index: int = setting(0, "which example of the stream to show")
    samples: int = setting(500, "examples that the statistics are over")
    variables: int | None = setting(None, "vars: number of variables (default 3)")
    modulus: int | None = setting(None, "vars: modulus of the values (default 10)")
    json: bool = setting(False, JSON)


@dataclass(frozen=True)
class ReportConfig:
    """`run.py report`: the tables of results, made of minits/records/."""

    write: str | None = setting(None, "file (the README) in which the tables are to be put, between its two marks")
    json: bool = setting(False, JSON)


@dataclass(frozen=True)
class BenchConfig:
    """`run.py bench`: speed on real weights."""

    part: str = setting("all", "prefill, decode, end-to-end, all (these three, default), drafts, train", positional=True)
    model: str | None = setting(None, "model folder or hub id: real weights, for the speed of a toy says nothing")
    revision: str | None = setting(None, "branch, tag or commit of a hub id")
    chunk_size: int | None = setting(None, "c: tokens a chunk (default 8)")
    run: str | None = setting(None, "bench drafts: a trained run, whose task gives the prompts")
    repeats: int = setting(10, "timed calls; the median is reported")
    compile: bool = setting(False, "bench train: torch.compile the layers (cuda)")
    plain: bool = setting(False, "the plain path, without graphs (cuda) or packed products (cpu)")
    device: str | None = setting(None, "cpu, cuda or cuda:N; default: cuda if there is one")
    dtype: str | None = setting(None, "float32, bfloat16 or float64; default: bfloat16 on cuda, else float32")
    json: bool = setting(False, JSON)


def task_options(config) -> dict:
    """The settings of any of these configurations that belong to the task and were given."""
    return {key: value for key in ("variables", "modulus") if (value := getattr(config, key)) is not None}


# What each (task, kind of model) trains with unless flags say otherwise; found on seeds 1-12, Vars on real weights
# on 21 and 22 too (README, limits).
RECIPES: dict[tuple[str, str], dict] = {
    ("parity", "tiny"): dict(chunk_size=8, layout="rows", steps=400, batch_size=32, lr=3e-3, warmup=20, decay=1.0),
    ("vars", "tiny"): dict(chunk_size=4, layout="rows", steps=600, batch_size=32, lr=3e-3, warmup=20, decay=1.0),
    ("parity", "real"): dict(chunk_size=8, layout="pack", steps=250, batch_size=64, lr=2e-5, warmup=10, decay=1.0),
    ("vars", "real"): dict(chunk_size=3, layout="pack", steps=600, batch_size=128, lr=2e-5, warmup=50, decay=0.25),
}


def recipe_key(config: TrainConfig) -> tuple[str, str]:
    """Where `RECIPES` has the recipe of this task and kind of model, if it has one."""
    return config.task, "tiny" if config.model == "tiny" else "real"


def resolve_train(config: TrainConfig) -> TrainConfig:
    """`config` with every None replaced by its value; raises ValueError naming the flag that does not fit."""
    key = task, kind = recipe_key(config)
    if key not in RECIPES:
        raise ValueError(f"no recipe for {task} on {config.model}: RECIPES in minits/config.py has "
                         f"{', '.join(f'{task} ({kind})' for task, kind in RECIPES)}; add one for {key}.")
    recipe = RECIPES[key]
    chosen = {k: v for k, v in recipe.items() if getattr(config, k) is None}
    if kind == "tiny" and config.extract_after is None:
        chosen["extract_after"] = 3
    device, dtype = resolve_device(config.device, config.dtype)
    config = replace(config, **chosen, device=device, dtype=dtype)
    if dtype == "float64":
        raise ValueError("--dtype float64: training computes in float32 or bfloat16, on float32 weights.")
    return check_train(config)


def check_train(config: TrainConfig) -> TrainConfig:
    """`config` itself, without a None that a recipe replaces; raises ValueError naming the flag whose value cannot be."""
    if not 0 < config.lr <= 1e30:
        raise ValueError(f"--lr {config.lr}: must be a positive number (at most 1e30).")
    for name, allowed in (("method", METHODS), ("layout", LAYOUTS)):
        if getattr(config, name) not in allowed:
            raise ValueError(f"--{name} {getattr(config, name)!r} is not known; use one of {', '.join(allowed)}.")
    if not config.clip > 0:
        raise ValueError(f"--clip {config.clip}: the largest gradient norm, a positive number.")
    if not 0 <= config.decay <= 1:
        raise ValueError(f"--decay {config.decay}: a share of the steps, from 0 to 1.")
    for name in ("thought_weight", "weight_decay"):
        if not 0 <= getattr(config, name) <= 1e30:
            raise ValueError(f"{flag(name)} {getattr(config, name)}: must be 0 or a positive number (at most 1e30).")
    if not -2 ** 63 <= config.seed < 2 ** 63:
        raise ValueError(f"--seed {config.seed}: must lie in -2^63 … 2^63 - 1.")
    least = {"max_ops": 1, "row_tokens": 1, "chunk_size": 1, "steps": 1, "batch_size": 1, "accumulate": 1,
             "max_thought_tokens": 1, "eval_samples": 1, "eval_max_ops": 0, "warmup": 0, "window": 0, "eval_every": 0,
             "save_every": 0, "log_every": 1, "inject_after": 0}
    for name, low in least.items():
        if not getattr(config, name) >= low:
            raise ValueError(f"{flag(name)} {getattr(config, name)}: must be at least {low}.")
    return config


def resolve_device(device: str | None, dtype: str | None) -> tuple[str, str]:
    """(device, compute dtype) with None replaced; raises ValueError for what this machine or program lacks."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"--device {device}: only cpu and cuda are supported (tested).")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {device}: this machine or this build of torch has no CUDA; use --device cpu.")
    if ":" in device and not (index.isdecimal() and (kind == "cpu" or int(index) < torch.cuda.device_count())):
        raise ValueError(f"--device {device}: after the colon stands the number of a card, of which this machine has "
                         f"{torch.cuda.device_count()} (from 0 on).")
    dtype = dtype or ("bfloat16" if kind == "cuda" else "float32")
    if dtype not in ("float32", "bfloat16", "float64"):
        raise ValueError(f"--dtype {dtype}: use float32, bfloat16 or float64.")
    device = distributed.own_device(device)
    if ":" in device and kind == "cuda":
        torch.cuda.set_device(device)  # streams, graphs and kernels go to the current card, not to that of their tensors
    return device, dtype
