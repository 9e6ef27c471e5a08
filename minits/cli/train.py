"""`run.py train`: trains on a task and evaluates."""
import argparse
import json
import os
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from shlex import quote

from minits.checkpoint.files import listing, write_text
from minits.cli.flags import Given, Output, add_flags, add_options, check_idle, note, take
from minits.cli.models import RUNS, newest_run
from minits.lab.presets import check_contents, check_needs, find_preset
from minits.lab.provenance import Record, record
from minits.methods import METHODS
from minits.settings import check_settings, flag, setting
from minits.tasks import TASKS, check_options, make_task
from minits.tasks.task import check_dataclass
from minits.training import distributed, run_folder
from minits.training.recipe import (
    Plan,
    TrainSettings,
    check_complete,
    names_of,
    resolve,
    resolve_device,
    typed,
)
from minits.training.session import run_training

DESCRIPTION = "train on a task and evaluate, in and beyond the trained examples"
EPILOG = "recipes (task, method, model: settings):\n" + "\n".join(
    f"  {name}, {method}, {kind}: " + " ".join(f"{flag(k)} {v}" for k, v in recipe.items())
    for name, task in TASKS.items()
    for (method, kind), recipe in task.recipes.items()
)


@dataclass(frozen=True)
class TrainFlags(Output):
    """What `run.py train` takes beside the settings that make the run what it is."""

    out: str | None = setting(None, "folder of the run; default: runs/TASK-METHOD-sSEED-TIME")
    resume: bool = setting(
        False,
        "go on from the last checkpoint in --out (default: of the newest run), exactly as without "
        "the interruption; for a new schedule on a run's weights: train TASK --model RUN",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All flags of the command."""
    add_flags(parser, TrainSettings)
    add_flags(parser, TrainFlags)
    add_options(parser, TASKS, "task")
    add_options(parser, METHODS, "method")


def run(given: Given) -> tuple[Record, int]:
    """Trains, evaluates and records a run."""
    flags = take(given, TrainFlags)
    if flags.resume:
        folder = Path(flags.out) if flags.out else newest_run(given.get("task"))
        plan = settings, task, _ = resumed(folder, given)
    else:
        plan = settings, task, _ = chosen(given)
        if settings.preset:
            check_contents(settings.preset, settings.model, settings.revision, task)
        folder = new_run_folder(flags.out, settings)
    named = bool(flags.out or flags.resume)
    figures = run_training(plan, folder, log=tell, note=note, named=named)
    folder = Path(figures["run"])  # made under another name, perhaps
    status = 130 if figures.get("interrupted") else 0
    if distributed.rank() != 0:
        return figures, status
    if status:
        again = f"python run.py train {settings.task} --out={quote(str(folder))} --resume"
        saved = "nothing was saved (--no-save)" if settings.no_save else f"continue with: {again}"
        note(f"interrupted after step {figures['step']}; {saved}")
        return figures, status
    figures["settings"] = run_folder.run_json(plan)
    if settings.preset:
        figures["preset"] = settings.preset
    line = record(figures, device=settings.device, seed=settings.seed)
    write_text(folder / "record.json", json.dumps(line) + "\n")
    look = "" if settings.no_save else f"; look: python run.py infer --run={quote(str(folder))}"
    accuracies = ", ".join(
        f"{task.title(split).partition(' (')[0]} {figures[f'accuracy_{split}']:.2%}"
        for split in task.splits[1:]
    ) or "not evaluated (no evaluation set was named)"
    print(
        f"{settings.method} on {settings.task}: {accuracies}; {figures['steps']} steps in "
        f"{figures['train_seconds']:.0f} s on {line['machine']}{look}"
    )
    return line, 0


def tell(text: str) -> None:
    """Prints a line of results."""
    try:
        print(text)
    except OSError:
        # Nobody reads them any more. Python writes the rest as it exits: that must not fail again.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def chosen(given: Given) -> Plan:
    """What the flags of a new run ask for."""
    asked = dict(given)
    if given.get("preset"):
        given = with_preset(given)
    if given.get("task") is None:
        raise ValueError(f"name a task ({', '.join(TASKS)}) or a --preset.")
    check_options(given["task"])  # an unknown task is the first thing to say
    samples = given.get("eval_samples")
    settings = take(given, TrainSettings)
    check_dataclass(METHODS[settings.method], "method")
    method = take(given, METHODS[settings.method])
    theirs = {name for kind in METHODS.values() for name in names_of(kind)}
    if others := sorted(theirs & given.keys()):  # its own were taken
        raise ValueError(
            f"{flag(others[0])}: the method {settings.method} has no such option; leave it out."
        )
    task = check_idle(make_task(settings.task, **given), asked)
    method.check(task)
    if samples and len(task.splits) < 2:
        raise ValueError(
            f"--eval-samples {samples}: the task has nothing to evaluate on; leave it out, or name "
            "an evaluation set."
        )
    return Plan(check_idle(resolve(settings, task), asked), task, method)


def new_run_folder(out: str | None, settings: TrainSettings) -> Path:
    """The folder of a new run, which must not hold anything yet."""
    if not out:
        now = time.strftime("%Y%m%d-%H%M%S")
        name = f"{settings.task}-{settings.method}-s{settings.seed}-{now}"
        return run_folder.unused(RUNS / name)
    folder = Path(out)
    taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    if taken and distributed.rank() == 0:
        raise ValueError(
            f"--out {folder} exists (it holds {listing(folder)}). Nothing is overwritten: name "
            "another folder, or continue a run there with --resume."
        )
    return folder


# Settings that may be chosen beside a preset, for they leave it the same run.
FREE = {each.name for each in fields(TrainSettings) if each.metadata.get("free")}


def with_preset(given: Given) -> Given:
    """`given` with its preset's settings; raises ValueError for a flag that makes another run."""
    name = given["preset"]
    preset = find_preset(name)
    settings = dict(preset.settings)
    if "accumulate" in given:  # in how many parts a step is taken goes with the machine's memory
        settings["accumulate"] = given["accumulate"]
    # Files lie where whoever runs it has them; other settings make another run.
    free = FREE.union(preset.files)
    contrary = [
        f"{typed(key, value)} (preset: {settings.get(key, 'the default')})"
        for key, value in sorted(given.items())
        if (value != settings[key] if key in settings else key not in free)
    ]
    if contrary:
        raise ValueError(
            f"--preset {name} has its own settings, but {', '.join(contrary)} was given. Leave it "
            "out, or give the settings without --preset."
        )
    check_needs(name, given)
    return given | settings


def resumed(folder: Path, given: Given) -> Plan:
    """What the run was trained with; raises ValueError if a flag contradicts it.

    Only the device may change, the steps as far as those taken stay the same, and where files lie.
    """
    plan = settings, task, _ = run_folder.read_run(folder)
    stored = {
        name: value
        for part in plan
        for name, value in asdict(part).items()
        if value is not None and value is not False
    }
    # Files are known by their content, see `check_sources`.
    free = {"device", "steps", *stored.keys() & task.paths}
    contrary = [
        f"{typed(name, value)} (run: {stored.get(name, 'not given')})"
        for name, value in sorted(given.items())
        if name not in free and value != stored.get(name)
    ]
    if contrary:
        raise ValueError(
            f"--resume continues a run with its own settings, but {', '.join(contrary)} was given. "
            "Leave it out, or start a new run."
        )
    try:
        check_complete(settings)
    except ValueError as error:
        raise ValueError(
            f"{folder / 'run.json'}: {error} The run was made by an older version, which this one "
            "does not continue exactly. Start a new run."
        ) from error
    device, dtype = resolve_device(given.get("device", settings.device), settings.dtype)
    steps = given.get("steps", settings.steps)
    settings = replace(settings, device=device, dtype=dtype, steps=steps)
    moved = {name: given[name] for name in task.paths if name in given}
    return plan._replace(settings=check_settings(settings, flag), task=replace(task, **moved))
