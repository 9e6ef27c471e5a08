"""The folder of a run: run.json (settings), metrics.jsonl (a line a step), checkpoints/step-NNNNNN.

Nothing but the initial weights and the data is random, and the data are a function of (seed, step).
So weights, optimizer and step number are all that a checkpoint needs for an exact resume: to the
bit on a CPU, up to rounding on CUDA, where the padded sizes of batches depend on those before and
sums have no fixed order.
"""
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from minits.checkpoint.download import finished_checkpoints
from minits.checkpoint.files import flush, new_folder, read_json, require, write_text
from minits.checkpoint.tokenizer import Tokenizer
from minits.checkpoint.weights import write_model
from minits.methods import METHODS, Method, make_method
from minits.settings import check_settings
from minits.tasks import Task, make_task, options_of
from minits.thinking import ThinkingStates
from minits.training.recipe import TrainSettings, names_of


def flat(settings: TrainSettings, task: Task, method: Method) -> dict[str, Any]:
    """What run.json and records hold: settings, options of task and method, files of examples."""
    sources = task.sources()
    files = {FILES: sources} if sources else {}
    return asdict(settings) | options_of(task) | options_of(method) | files


def write_run(folder: Path, settings: TrainSettings, task: Task, method: Method) -> None:
    """Writes run.json."""
    text = json.dumps(flat(settings, task, method), indent=2)
    write_text(folder / "run.json", text + "\n")


def read_run(folder: Path) -> tuple[TrainSettings, Task, Method]:
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
    found.pop(FILES, None)
    try:
        options = {name: value for name, value in found.items() if name not in SETTINGS}
        settings = TrainSettings(**{name: found[name] for name in found if name in SETTINGS})
        check_settings(settings)
        # Runs of older versions name the options of every task, None where they have none.
        options = {name: value for name, value in options.items() if value is not None}
        known = names_of(METHODS[settings.method]) if settings.method in METHODS else set()
        mine = {name: options.pop(name) for name in known & set(options)}
        task = make_task(settings.task, spell=str, **options)
        return settings, task, make_method(settings.method, **mine)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: {error} Put back what it was, or start a new run."
        ) from error


SETTINGS = names_of(TrainSettings)
FILES = "data_files"  # the key of `Task.sources` in run.json


def check_sources(folder: Path, task: Task) -> None:
    """Raises ValueError if a run goes on that began with other contents of the task's files."""
    path = folder / "run.json"
    before = read_json(path).get(FILES, {}) if path.exists() else {}
    for split, now in task.sources().items() if before else ():
        then = before.get(split, {})
        if now["sha256"] != then.get("sha256"):
            raise ValueError(
                f"{now['file']} is not what the run in {folder} began with: it has {now['rows']} "
                f"rows and SHA-256 {now['sha256']:.12}…, {path} says {then.get('rows')} and "
                f"{then.get('sha256')!s:.12}…. Put the old file back, or start a new run."
            )


# -- checkpoints -----------------------------------------------------------------------------------


def save_checkpoint(
    folder: Path,
    model: ThinkingStates,
    tokenizer: Tokenizer,
    about: dict[str, Any],  # for thinking.json
    state: dict[str, Any],  # optimizer, step, seconds, stage
) -> Path:
    """Writes checkpoints/step-NNNNNN whole or not at all, then drops the older ones."""
    target = folder / "checkpoints" / f"step-{state['step']:06d}"
    if not target.exists():
        with new_folder(target) as unfinished:
            write_model(model, tokenizer, unfinished, about)
            torch.save(state, unfinished / "training_state.pt")
            flush(unfinished / "training_state.pt")
    for other in target.parent.glob("step-*"):  # half-written ones of a killed process, too
        if other != target:
            shutil.rmtree(other)
    return target


def read_state(folder: Path, device: str) -> dict[str, Any] | None:
    """The `state` that the newest checkpoint of a run was saved with; None: there is none.

    Raises ValueError naming the file if it is damaged.
    """
    checkpoints = finished_checkpoints(folder)
    if not checkpoints:
        return None
    path = require(checkpoints[-1] / "training_state.pt")
    try:
        state = torch.load(path, map_location=device, weights_only=True)
        return {"stage": 0} | state | {name: state[name] for name in ("optimizer", "step")}
    except (OSError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # damage has many names
        raise ValueError(
            f"{path} is damaged ({type(error).__name__}): no state of a training can be read. The "
            "weights beside it are whole, but an exact resume is not possible. Start a new run."
        ) from error


def keep_metrics(path: Path, step: int) -> None:
    """Drops the metrics of steps that a resumed run will do again.

    There is one line a step, the last one perhaps cut off.
    """
    if path.exists():
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        write_text(path, "".join(lines[:step]))
