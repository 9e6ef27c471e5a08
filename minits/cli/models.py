"""Models as commands find and open them: run folders, checkpoints, what ships."""
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from minits.checkpoint.download import finished_checkpoints, local_folder
from minits.checkpoint.files import Json, around, listing, printable, read_json, require
from minits.checkpoint.tiny import ASSETS
from minits.checkpoint.tokenizer import Tokenizer
from minits.checkpoint.weights import CHOICES, load_checkpoint
from minits.cli.flags import note
from minits.fast.accelerate import accelerate
from minits.methods import METHODS, Method, make_method
from minits.tasks import TASKS, Task, check_options, make_task
from minits.thinking import Engine
from minits.training.recipe import resolve_device
from minits.training.run_folder import kept_options, read_run

RUNS = Path("runs")
SHIPPED = ASSETS / "parity"


def newest_run(task: str | None = None) -> Path:
    """The run folder in runs/ that was saved to last, of `task` if one is named.

    What is no run of ours, or no whole one, is passed over with a note.
    """
    found = []
    for folder in RUNS.glob("*/"):
        checkpoints = finished_checkpoints(folder)
        if not checkpoints:
            continue
        try:
            settings = read_run(folder).settings
            require(checkpoints[-1] / "thinking.json")
        except (ValueError, OSError) as error:
            note(f"passed over: {error}")
            continue
        if task in (None, settings.task):
            found.append((checkpoints[-1].stat().st_mtime, folder))
    if not found:
        of_task = f" of {task}" if task else ""
        raise FileNotFoundError(
            f"no run{of_task} with a checkpoint in {RUNS.absolute()} (it holds {listing(RUNS)}). "
            f"Train one with: python run.py train {task or 'parity'}"
        )
    return max(found)[1]


def run_named(name: str | None, given: str) -> Path:
    """The folder that the flag `given` names, which is never looked for on the hub.

    Without a name: the newest run, or the checkpoint that ships.
    """
    if not name:
        with suppress(FileNotFoundError):
            return newest_run()
        return SHIPPED
    folder = Path(name)
    if not folder.is_dir():
        raise FileNotFoundError(f"{given} {name}: no such folder ({around(folder)}). Name another.")
    return folder


class Opened(NamedTuple):
    """A model as a command asked for it."""

    engine: Engine
    tokenizer: Tokenizer
    about: Json  # thinking.json
    folder: Path  # of the run, or of the model
    task: Task  # as in training
    method: Method


def open_model(flags: Any, given: str = "--run") -> Opened:
    """The model that --model, --run, --device, --dtype and --plain of a command name.

    Its task is the one that the command names, if it does. given: what the user calls --run.
    """
    asked = vars(flags)  # no command has all of them
    device, dtype = resolve_device(flags.device, flags.dtype)
    source = asked.get("model") or run_named(flags.run, given)
    folder = local_folder(source, asked.get("revision"))
    choices = {name: asked.get(name) for name in CHOICES}
    model, tokenizer, about = load_checkpoint(folder, getattr(torch, dtype), device, **choices)
    if about and "max_thought_tokens" not in about and (folder / "run.json").exists():
        # Checkpoints of older versions leave it to their run.
        limit = read_run(folder).settings.max_thought_tokens
        model.config = replace(model.config, max_thought_tokens=limit)
        about["max_thought_tokens"] = limit
    engine = model if asked.get("plain") else accelerate(model)
    task = trained_task(folder, about, asked.get("task"))
    return Opened(engine, tokenizer, about, folder, task, trained_method(folder, about))


def measured_on(opened: Opened) -> Json:
    """What a record says of the weights that it measured."""
    width, path = opened.engine.backbone.config.hidden_size, opened.folder / "run.json"
    found = {"run": str(opened.folder), "hidden_size": width}
    if path.exists():
        found["settings"] = read_json(path)
    return found


def trained_task(folder: Path, about: Json, name: str | None = None) -> Task:
    """The task called `name`, with the options that the run in `folder` was trained with.

    name: None for the task of the weights, as far as `about` names it; else Parity.
    """
    if name is None:
        name = about["task"] if about.get("task") in TASKS else "parity"
    if (folder / "run.json").exists():
        settings, task, _ = read_run(folder)
        if settings.task == name:
            return task
    check_options(name)
    options = kept_options(TASKS[name], about) if about.get("task") == name else {}
    try:
        return make_task(name, spell=str, **options)
    except ValueError as error:
        raise ValueError(f"{folder}, thinking.json: {printable(error)}") from error


def trained_method(folder: Path, about: Json) -> Method:
    """How the weights in `folder` answer; a plain Qwen2.5 does not think, as in `infer`.

    Its T and C are untrained copies of layers.
    """
    if (folder / "run.json").exists():
        return read_run(folder).method
    name = about.get("method", "thinking") if about else "no-cot"
    options = kept_options(METHODS[name], about) if name in METHODS else {}
    try:
        return make_method(name, spell=str, **options)
    except ValueError as error:
        raise ValueError(f"{folder}, thinking.json: {printable(error)}") from error


def say_limit(about: Json, limit: int | None) -> None:
    """Says so where thoughts may grow longer, or are cut sooner, than in training."""
    trained = about.get("max_thought_tokens")
    if limit and trained and limit != trained:
        note(f"--max-thought-tokens {limit}: trained with {trained}, which is the default.")


def describe_model(about: Json) -> str:
    """One line on where a checkpoint comes from."""
    if not about:
        return "a plain Qwen2.5 without trained T and C"
    kind = TASKS.get(about.get("task"))
    return (
        f"{about.get('method')} on {about.get('task')}{kind.trained_on(about) if kind else ''}, "
        f"base {about.get('base_model')}, step {about.get('step')}, seed {about.get('seed')}, "
        f"c = {about['chunk_size']}"
    )
