"""The settings of a training: each default, bound and meaning, and how None is chosen."""
from dataclasses import dataclass, fields, is_dataclass, replace
from math import cos, pi
from pathlib import Path
from shlex import quote
from typing import NamedTuple

import torch

from minits.checkpoint.download import checkpoint_of
from minits.checkpoint.files import Json, present
from minits.checkpoint.tiny import tiny_config
from minits.checkpoint.weights import CHOICES, config_of, read_about
from minits.fast.layouts import LAYOUTS
from minits.methods import METHODS, Method
from minits.settings import check_settings, flag, setting
from minits.tasks.task import Task
from minits.thinking import ThinkingConfig
from minits.training import distributed

DTYPES = ("float32", "bfloat16", "float64")
# Settings without a default, whose value a recipe, a flag or the model to start from must give.
REQUIRED = "chunk_size inject_after max_thought_tokens".split()
REQUIRED += "steps batch_size layout lr warmup decay".split()


@dataclass(frozen=True)
class Machine:
    """Where to compute, and in what type."""

    device: str | None = setting(
        None, "cpu, cuda or cuda:N; default: cuda if there is one", free=True
    )
    dtype: str | None = setting(
        None,
        "compute type; default: bfloat16 on cuda, else float32. Training keeps float32 master "
        "weights and refuses float64",
        choices=DTYPES,
        free=True,
    )


@dataclass(frozen=True)
class TrainSettings(Machine):
    """What makes a training what it is, its task's and its method's options aside.

    None: chosen by the task's recipe for the method and kind of model, or by the machine.
    """

    task: str | None = setting(None, "the task; a preset names its own", positional=True)
    preset: str | None = setting(
        None, "a named run of the tables of results (`run.py report` lists them)", free=True
    )
    model: str = setting(
        "tiny",
        "tiny (made on the spot), a folder in Hugging Face layout (a run to start from, too), or a "
        "hub id",
        free=True,
    )
    revision: str | None = setting(None, "branch, tag or commit of a hub id", free=True)
    method: str = setting("thinking", "how the model is trained", choices=tuple(METHODS))
    # These three and the longest thought: where --model has trained T and C, as they were trained.
    chunk_size: int | None = setting(None, "c: tokens a chunk; default: by recipe", least=1)
    inject_after: int | None = setting(
        None, "L_in: layers before the state is added; default: 1", least=0
    )
    extract_after: int | None = setting(
        None, "L_out: layers before H is taken; default: all but the last", least=0
    )
    window: int | None = setting(
        None,
        "sliding attention of the tiny model, in tokens; 0: dense; default: 16 where the method "
        "thinks, else 0",
        least=0,
        most=10**6,
    )
    steps: int | None = setting(
        None,
        "optimizer steps; default: by recipe. With --resume another number is taken if the rate of "
        "all steps taken so far is the same under it (--decay 0, say)",
        least=1,
    )
    batch_size: int | None = setting(
        None, "samples an optimizer step, over all processes; default: by recipe", least=1
    )
    layout: str | None = setting(
        None,
        "how samples are laid into rows: one each; packed, blind to one another (the same "
        "losses); or in one context (another training). Default: by recipe",
        choices=LAYOUTS,
    )
    row_tokens: int = setting(
        256, "tokens a row, for pack and long_rows", least=1, most=10**6, free=True
    )
    accumulate: int = setting(
        1,
        "parts that a step's samples are split into, to save memory; of rows with one sample, "
        "fewer where they are shorter than 256 tokens",
        least=1,
        free=True,
    )
    lr: float | None = setting(
        None, "peak learning rate of AdamW; default: by recipe", above=0, most=1e30
    )
    warmup: int | None = setting(None, "steps of linear warm-up; default: by recipe", least=0)
    decay: float | None = setting(
        None,
        "share of the steps after it, at the end, over which the rate falls to zero as a cosine; "
        "it is constant before; default: by recipe",
        least=0,
        most=1,
    )
    weight_decay: float = setting(
        0.0, "AdamW weight decay, of matrices only: not of norms and biases", least=0, most=1e30
    )
    clip: float = setting(1.0, "largest gradient norm", above=0, most=1e30)
    lm_loss: str = setting(
        "answer",
        "tokens that L_LM is a mean over: the answer's (CoT's steps are a part of it), or all, the "
        "prompt's too",
        choices=("answer", "all"),
    )
    thought_weight: float = setting(1.0, "weight w of the thought loss", least=0, most=1e30)
    max_thought_tokens: int | None = setting(
        None, "tokens of the longest thought, closing EOS not counted; default: 64", least=1
    )
    seed: int = setting(
        0, "seed of initial weights and data", least=-(2**63), most=2**63 - 1, free=True
    )
    compile: bool = setting(
        False,
        "torch.compile the layers: half a minute to start, then faster steps (cuda)",
        free=True,
    )
    eval_samples: int = setting(500, "examples of each final evaluation", least=1)
    eval_every: int = setting(
        0, "steps between evaluations on a fifth of the examples; 0: none", least=0, free=True
    )
    keep_best: bool = setting(
        False,
        "evaluate at the end the weights that were best on the first evaluation set (--eval-every, "
        "on all of its examples up to --eval-samples)",
    )
    save_every: int = setting(
        0, "steps between checkpoints; 0: only at the end and on Ctrl-C", least=0, free=True
    )
    no_save: bool = setting(
        False, "write no checkpoint (for measurements whose weights cannot be kept)", free=True
    )
    save_dtype: str = setting(
        "float32",
        "type of the weights in checkpoints, with which later runs (--model) begin; beside those "
        "of bfloat16 lie the float32 ones, for an exact resume alone",
        choices=("float32", "bfloat16"),
        free=True,
    )
    keep: int = setting(
        2,
        "number of the last checkpoints that are kept. With 1, saving the next one removes what "
        "another process may be reading",
        least=1,
        free=True,
    )
    log_every: int = setting(
        20, "steps between log lines where there is no terminal", least=1, free=True
    )


class Plan(NamedTuple):
    """All that makes a training what it is, which run.json holds."""

    settings: TrainSettings
    task: Task
    method: Method


def recipe_of(task: Task, method: str, model: str) -> Json:
    """The good settings that a task knows for this method and kind of model; perhaps none.

    A model that was trained from the tiny one is of its kind.
    """
    checkpoint, width = local_checkpoint(model), tiny_config(None).hidden_size
    tiny = model == "tiny" or (checkpoint and config_of(checkpoint).hidden_size == width)
    return task.recipe(method, "tiny" if tiny else "real")


def local_checkpoint(model: str) -> Path | None:
    """The checkpoint in the folder that --model names; None for the tiny model and a hub id."""
    folder = Path(model).expanduser()
    return checkpoint_of(folder) if model != "tiny" and folder.is_dir() else None


def trained_with(settings: TrainSettings) -> Json:
    """The settings that T and C in --model were trained with; none for a method without thoughts.

    A hub id counts as having no T and C.
    """
    checkpoint = local_checkpoint(settings.model) if METHODS[settings.method].thinks else None
    if not (checkpoint and present(checkpoint / "thinking.safetensors")):
        return {}
    about = read_about(checkpoint)
    return {name: about[name] for name in (*CHOICES, "max_thought_tokens") if name in about}


def resolve(settings: TrainSettings, task: Task) -> TrainSettings:
    """`settings` with every None replaced by its value.

    Raises ValueError naming the flag that does not fit.
    """
    check_settings(settings, flag)
    tiny, method = settings.model == "tiny", METHODS[settings.method]
    if settings.window is not None and not tiny:
        raise ValueError(
            f"--window {settings.window}: only the tiny model is made with a window. The attention "
            f"of {settings.model} is as its config.json says; leave --window out."
        )
    limit = ThinkingConfig.max_thought_tokens
    usual = {"inject_after": 1, "max_thought_tokens": limit, "window": 0}
    if tiny:
        usual |= {"extract_after": 3, "window": 16 if method.thinks else 0}
    recipe = usual | recipe_of(task, settings.method, settings.model) | trained_with(settings)
    layouts = method.layouts
    if recipe.get("layout", layouts[0]) not in layouts:
        recipe["layout"] = layouts[0]
    if settings.layout not in (None, *layouts):
        raise ValueError(
            f"--layout {settings.layout}: --method {settings.method} knows {', '.join(layouts)}. "
            "Leave it out."
        )
    if settings.lm_loss == "all" and method.spare:
        raise ValueError(
            f"--lm-loss all: the prompts of --method {settings.method} hold latents, which no "
            "model says. Leave it out."
        )
    chosen = {name: value for name, value in recipe.items() if getattr(settings, name) is None}
    device, dtype = resolve_device(settings.device, settings.dtype)
    if dtype == "float64":
        raise ValueError(
            "--dtype float64: training computes in float32 or bfloat16, on float32 weights."
        )
    settings = replace(settings, **chosen, device=device, dtype=dtype)
    check_complete(settings)
    if settings.accumulate > settings.batch_size:
        raise ValueError(
            f"--accumulate {settings.accumulate}: a step has --batch-size {settings.batch_size} "
            "samples, which make at most as many parts. Lower it, or raise --batch-size."
        )
    return check_settings(settings, flag)


def check_complete(settings: TrainSettings) -> None:
    """Raises ValueError if a setting that a recipe chooses has no value."""
    for name in REQUIRED:
        if getattr(settings, name) is None:
            raise ValueError(f"{flag(name)} has no value: neither the recipe nor a flag gives one.")


def learning_rate(settings: TrainSettings, step: int) -> float:
    """Linear warm-up, a constant rate, then a cosine that would reach zero after the last step.

    The longer a task stays on its plateau (Vars: for hundreds of steps), the later it should fall.
    """
    if step < settings.warmup:
        return settings.lr * (step + 1) / settings.warmup
    decay_steps = settings.decay * (settings.steps - settings.warmup)
    into_decay = step - (settings.steps - decay_steps)
    share = max(into_decay, 0.0) / max(decay_steps, 1.0)
    return settings.lr * (1 + cos(pi * share)) / 2


def resolve_device(device: str | None, dtype: str | None) -> tuple[str, str]:
    """(device, compute type) with None replaced.

    Raises ValueError for what this machine or program lacks.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    kind, colon, index = device.partition(":")
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"--device {device}: only cpu and cuda are supported (tested).")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"--device {device}: this machine or this build of torch has no CUDA; use --device cpu."
        )
    count = torch.cuda.device_count() if kind == "cuda" else 1
    if colon and index not in map(str, range(count)):
        raise ValueError(
            f"--device {device}: there is no such device; this machine has {count} of the kind "
            f"{kind}, numbered from 0 on."
        )
    device = distributed.own_device(device)
    if ":" in device and kind == "cuda":
        # Streams, graphs and kernels go to the current card, not to that of their tensors.
        torch.cuda.set_device(device)
    return device, dtype or ("bfloat16" if kind == "cuda" else "float32")


def names_of(settings: type) -> set[str]:
    """The names of a dataclass's fields; of a class that is none yet, no names."""
    return {each.name for each in fields(settings)} if is_dataclass(settings) else set()


def typed(name: str, value: object) -> str:
    """A setting as it is typed; the task alone has no flag."""
    words = [] if name == "task" else [flag(name)]
    return " ".join(words if value is True else [*words, quote(str(value))])


def pop_fields(given: Json, settings: type) -> Json:
    """What `given` holds for the fields of a dataclass, which is taken out of it."""
    return {name: given.pop(name) for name in names_of(settings) & given.keys()}
