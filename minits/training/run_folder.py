"""The folder of a run: run.json (settings), metrics.jsonl (a line a step), checkpoints/step-NNNNNN.

With --keep-best also best/step-NNNNNN: the best weights so far, for inference alone. The final
evaluation leaves predictions_SPLIT.jsonl of every set; `run.py train` adds record.json.

Nothing but the initial weights and the data is random, and the data are a function of (seed, step).
So weights, optimizer and step number are all that a checkpoint needs for an exact resume: to the
bit on a CPU, up to rounding on CUDA, where the padded sizes of batches depend on those before and
sums have no fixed order.
"""
import json
import shutil
from dataclasses import asdict
from itertools import count
from pathlib import Path
from shlex import quote
from typing import Any
from zipfile import ZipFile

import torch

from minits.checkpoint.download import finished_checkpoints
from minits.checkpoint.files import (
    Json,
    flush,
    new_folder,
    printable,
    read_json,
    require,
    write_text,
)
from minits.checkpoint.tokenizer import Tokenizer
from minits.checkpoint.weights import ThinkingFile, read_about, write_model
from minits.methods import METHODS, Method, make_method
from minits.settings import check_settings, flag
from minits.tasks import TASKS, Task, make_task
from minits.thinking import ThinkingStates
from minits.training.recipe import Plan, TrainSettings, names_of, pop_fields

DATA_FILES = "data_files"  # the key of `Task.sources` in run.json and records


def run_json(plan: Plan) -> Json:
    """What run.json and records hold: settings, options of task and method, files of examples."""
    settings, task, method = map(asdict, plan)
    return settings | task | method | data_files(plan.task)


def data_files(task: Task) -> Json:
    """What run.json and records say of the files of examples; empty where there are none."""
    sources = task.sources()
    return {DATA_FILES: sources} if sources else {}


def origin(plan: Plan) -> Json:
    """What thinking.json says of where a checkpoint comes from, but for the step."""
    settings, task, method = plan
    about = {"method": settings.method, "task": settings.task, "base_model": settings.model}
    for kind in (task, method):
        about |= kept_options(kind, asdict(kind))
    return about | {"seed": settings.seed}


def kept_options(kind: Task | Method | type, options: Json) -> Json:
    """Those of a task's or method's options that go into thinking.json, beside its own keys."""
    kept = names_of(kind) - {*kind.paths} if kind.kept is None else {*kind.kept}
    kept -= names_of(ThinkingFile)  # an option called `step`, say
    return {name: value for name, value in options.items() if name in kept}


def unused(folder: Path) -> Path:
    """`folder`, or the first of folder-2, folder-3, … where there is nothing yet."""
    others = (folder.with_name(f"{folder.name}-{number}") for number in count(2))
    return next(each for each in others if not each.exists()) if folder.exists() else folder


def make_folder(folder: Path, named: bool) -> Path:
    """Makes the folder of a new run. Raises ValueError if it cannot be made.

    Where another training takes it at the same moment, the next free name is taken, unless the
    user `named` it.
    """
    while True:
        try:
            folder.mkdir(parents=True)
            return folder
        except OSError as error:
            if named or not folder.exists():
                raise ValueError(
                    f"the folder {folder} cannot be made ({error.strerror}); name another one "
                    "with --out."
                ) from error
            folder = unused(folder)


def write_run(folder: Path, plan: Plan) -> None:
    """Writes run.json."""
    write_text(folder / "run.json", json.dumps(run_json(plan), indent=2) + "\n")


def read_run(folder: Path) -> Plan:
    """What a run folder was trained with.

    Raises where `folder` is not one of ours, or its run.json was changed to what cannot be.
    """
    path = folder / "run.json"
    if not path.exists():
        raise FileNotFoundError(
            f"{folder} is not a run folder: it has no run.json. --resume continues a run that "
            "`run.py train` made; name its folder with --out."
        )
    found = read_json(path)
    found.pop(DATA_FILES, None)
    try:
        settings = TrainSettings(**pop_fields(found, TrainSettings))
        check_settings(settings)
        # Runs of older versions name the options of every task, None where they have none.
        own = names_of(TASKS[settings.task]) if settings.task in TASKS else ()
        options = {k: value for k, value in found.items() if value is not None or k in own}
        mine = pop_fields(options, METHODS[settings.method])
        task = make_task(settings.task, spell=str, **options)
        return Plan(settings, task, make_method(settings.method, spell=str, **mine))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: {printable(error)} Put back what it was, take the version of this package "
            "that wrote it, or start a new run."
        ) from error


def check_sources(folder: Path, task: Task) -> None:
    """Raises ValueError if a run goes on that began with other contents of the task's files."""
    path = folder / "run.json"
    before = read_json(path).get(DATA_FILES) if path.exists() else None
    if not before:
        return
    for option, now in task.sources().items():
        then = before.get(option, {})
        if now["sha256"] != then.get("sha256"):
            raise ValueError(
                f"{flag(option)} {now['file']} is not what the run in {folder} began with: it has "
                f"{now['rows']} rows and SHA-256 {now['sha256']:.12}…, {path} says "
                f"{then.get('rows')} and {then.get('sha256')!s:.12}…. Put the old file back, name "
                "where it lies now, or start a new run."
            )


# -- checkpoints -----------------------------------------------------------------------------------


def save_checkpoint(
    folder: Path,
    plan: Plan,
    model: ThinkingStates,
    tokenizer: Tokenizer,
    about: Json,  # for thinking.json, beside where the weights come from
    state: dict[str, Any] | None,  # optimizer, step, seconds, stage, settings; None: for inference
) -> None:
    """Writes checkpoints/step-NNNNNN whole or not at all, then drops all but the newest ones.

    Without `state` best/step-NNNNNN, of which one stays. Raises OSError if it cannot be written;
    those before it stay then.
    """
    kind, keep = ("checkpoints", plan.settings.keep) if state else ("best", 1)
    target, about = folder / kind / f"step-{about['step']:06d}", origin(plan) | about
    dtype = getattr(torch, plan.settings.save_dtype)
    if not target.exists():
        try:
            with new_folder(target) as unfinished:
                write_model(model, tokenizer, unfinished, about, dtype=dtype)
                if state:
                    torch.save(state, unfinished / "training_state.pt")
                    flush(unfinished / "training_state.pt")
        except Exception as error:  # a full disk has many names
            before = [each.name for each in finished_checkpoints(folder)]
            raise OSError(
                f"{target} cannot be written ({error}); {before[-1] if before else 'nothing'} is "
                "the last checkpoint. Make room and go on from there with --resume."
            ) from error
    kept = finished_checkpoints(folder, kind)[-keep:]
    # Half-written ones of a killed process, too, and those first.
    for other in sorted(target.parent.glob("step-*"), reverse=True):
        if other not in kept:
            # In two moves, so that no half of it is left under the name of a whole one.
            going = other.with_name(f"{other.name.removesuffix('.tmp')}.tmp")
            shutil.rmtree(other.rename(going), ignore_errors=True)


def best_so_far(folder: Path) -> tuple[int, float]:
    """(step, accuracy) of the best weights that a run has kept; (0, -1) where there are none."""
    kept = finished_checkpoints(folder, "best")
    about = read_json(kept[-1] / "thinking.json") if kept else {}
    return about.get("step", 0), about.get("valid_accuracy", -1.0)


# Settings that may differ from those that a checkpoint was saved under.
HARMLESS = "device steps log_every eval_every keep_best save_every save_dtype keep no_save".split()


def check_agreement(
    checkpoint: Path,
    state: dict[str, Any],  # its training_state.pt
    plan: Plan,  # what run.json says
) -> None:
    """Raises ValueError if a checkpoint is not one of this training, or run.json was edited.

    Settings that change no step may differ; whether `steps` may, `check_steps` decides.
    """
    settings, task, method = plan
    again = (
        "Put back what training wrote, or start from these weights with: python run.py train "
        f"{settings.task} --model {quote(str(checkpoint))}"
    )
    if "settings" not in state:
        raise ValueError(
            f"{checkpoint} was saved by an older version, whose steps round differently; this one "
            f"cannot continue it exactly. {again}"
        )
    about, saved = read_about(checkpoint), state["settings"]
    said = origin(plan) | {
        "max_thought_tokens": settings.max_thought_tokens,
        "thinks": method.thinks,
        "step": state["step"],
    }
    wrong = [
        f"{name} {about.get(name)!r} in thinking.json, {value!r} in "
        + ("training_state.pt" if name == "step" else "run.json")
        for name, value in said.items()
        if about.get(name, value) != value
    ]
    # Files may lie elsewhere: `check_sources` knows them by their content.
    harmless = {*HARMLESS, DATA_FILES, *task.sources()}
    wrong += [
        f"{name} {saved[name]!r} in training_state.pt, {value!r} in run.json"
        for name, value in run_json(plan).items()
        if name not in harmless and saved.get(name, value) != value
    ]
    if wrong:
        raise ValueError(f"{checkpoint} is not of this training: {wrong[0]}. {again}")


def read_state(folder: Path, device: str) -> dict[str, Any] | None:
    """The `state` that the newest checkpoint of a run was saved with; None: there is none.

    Raises ValueError naming the file if it is damaged.
    """
    checkpoints = finished_checkpoints(folder)
    if not checkpoints:
        return None
    path = require(checkpoints[-1] / "training_state.pt")
    try:
        with ZipFile(path) as parts:  # torch.load passes over the checksums
            if broken := parts.testzip():
                raise ValueError(broken)
        state = torch.load(path, map_location=device, weights_only=True)
        state["optimizer"], state["step"]  # damaged, too, without them
        return state
    except (OSError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # damage has many names
        raise ValueError(
            f"{path} is damaged ({type(error).__name__}): no state of a training can be read. The "
            "weights beside it are whole, but an exact resume is not possible. Start a new run."
        ) from error


def keep_metrics(path: Path, step: int) -> None:
    """Drops the metrics of steps that a resumed run will do again.

    There is one line a step, the last one perhaps cut off; a full disk may have lost some. Raises
    ValueError naming the line that is none.
    """
    if not path.exists():
        return
    kept, text = [], path.read_text(encoding="utf-8", errors="replace")
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        try:
            if line.endswith("\n") and json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(
                f"{path}, line {number} is no step's metrics: {printable(line.strip(), 60)!r}. "
                "Take it out; a resume needs none of the lines."
            ) from error
    write_text(path, "".join(kept))
