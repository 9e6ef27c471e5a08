"""A training from its settings to its figures: set up, checked, trained, evaluated."""
import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from minits.checkpoint.download import finished_checkpoints
from minits.checkpoint.files import locked, made
from minits.checkpoint.tiny import make_tiny
from minits.checkpoint.tokenizer import Tokenizer
from minits.checkpoint.weights import CHOICES, load
from minits.fast.layouts import round_up
from minits.methods import Method
from minits.settings import flag
from minits.tasks import Task, options_of
from minits.thinking import ThinkingStates
from minits.training import distributed, run_folder
from minits.training.loop import Log, Training, evaluation_rows, measure, train
from minits.training.recipe import TrainSettings
from minits.training.scoring import Report, describe


def set_up(settings: TrainSettings, task: Task, method: Method, folder: Path) -> Training:
    """A training with resolved settings; it goes on from the newest checkpoint in `folder`, if any.

    Meets the other processes, if there are any. Raises ValueError for settings that do not go
    together.
    """
    if settings.batch_size < distributed.world():
        raise ValueError(
            f"--batch-size {settings.batch_size}: fewer samples than the {distributed.world()} "
            "processes that share them; raise it, or start fewer."
        )
    distributed.join(settings.device)
    model, tokenizer = make_model(settings, method, finished_checkpoints(folder))
    model = model.to(settings.device).train()
    state = run_folder.read_state(folder, settings.device)
    if state is None:
        return Training(settings, folder, task, method, model, tokenizer)
    if state["step"] > settings.steps:
        raise ValueError(
            f"{finished_checkpoints(folder)[-1]} is past the {settings.steps} steps that "
            f"{folder / 'run.json'} names. Put back their number, or start a new run."
        )
    done, seconds = state["step"], state["seconds"]
    training = Training(settings, folder, task, method, model, tokenizer, done, seconds)
    optimizer = training.update.optimizer
    if state.get("stage", 0) != training.number:  # saved at the very end of a stage
        return training
    for ours, saved in zip(optimizer.param_groups, state["optimizer"]["param_groups"]):
        # These go with the device, which may change.
        saved |= {name: ours[name] for name in ("lr", "fused", "capturable")}
    optimizer.load_state_dict(state["optimizer"])
    return training


def make_model(
    settings: TrainSettings, method: Method, checkpoints: list[Path]
) -> tuple[ThinkingStates, Tokenizer]:
    """The newest checkpoint, else what `--model` names."""
    choices = {name: getattr(settings, name) for name in CHOICES}
    if not checkpoints and settings.model == "tiny":
        window = settings.window if method.thinks else 0
        how = choices | {"seed": settings.seed, "window": window or None}
        model, tokenizer = make_tiny(thinks=method.thinks, **how)
    else:
        source = checkpoints[-1] if checkpoints else settings.model
        revision = None if checkpoints else settings.revision
        model, tokenizer = load(source, revision=revision, **choices)
        if not method.thinks:
            model.thinking_block = model.compression_block = None
    config = replace(model.config, max_thought_tokens=settings.max_thought_tokens)
    model.config = config.check(model.backbone.config)
    return model, tokenizer


def run_training(
    settings: TrainSettings,
    task: Task,
    method: Method,
    folder: Path,
    log: Log = print,  # takes results
    note: Log = print,  # takes remarks
) -> dict[str, Any]:
    """`train` and the final evaluations; returns the figures.

    What cannot be trained or evaluated is refused before the first step, and before anything is
    written. Raises ValueError, also if another process trains in `folder`.
    """
    lead, new = distributed.rank() == 0, not folder.exists()
    with ExitStack() as stack:
        if lead and not new:
            stack.enter_context(locked(folder))
        training = set_up(settings, task, method, folder)
        rows = check_data(training)
        if lead and new:
            stack.enter_context(locked(made(folder)))
        if lead:
            note(f"run folder {folder}")
            if (folder / "run.json").exists():
                goes_on = f"it goes on after step {training.done} of {settings.steps}"
                note(goes_on if training.done else "it has no checkpoint: from the start")
            note("settings " + json.dumps(run_folder.flat(settings, task, method)))
            run_folder.write_run(folder, settings, task, method)
        return train_and_evaluate(training, rows, log)


def check_data(training: Training) -> dict[str, list]:
    """The rows of the evaluation sets.

    Raises ValueError if they or the first samples do not fit the model.
    """
    settings, task = training.settings, training.task
    limit = training.model.backbone.config.max_position_embeddings
    width = round_up(settings.row_tokens, settings.chunk_size)
    if settings.layout == "long_rows" and width > limit:
        raise ValueError(
            f"--row-tokens {settings.row_tokens}: long rows need as many positions, the model has "
            f"{limit} (max_position_embeddings)."
        )
    training.stream.rows(0)
    rows = {}
    for split in task.splits[1:]:
        try:
            rows[split] = evaluation_rows(training, split, settings.eval_samples)
        except ValueError as error:
            given = " ".join(f"{flag(name)} {value}" for name, value in options_of(task).items())
            raise ValueError(f"evaluation, {task.title(split)} ({given}): {error}") from error
    return rows


def train_and_evaluate(training: Training, rows: dict[str, list], log: Log) -> dict[str, Any]:
    """The figures of a training that is ready to go, `interrupted` among them."""
    folder, start, task = training.folder, training.done, training.task
    finished = train(training, log)
    # The others only take part in the steps, and do not wait for the evaluation.
    training.update.leave()
    place = {"step": training.done, "run": str(folder)}
    if not (distributed.rank() == 0 and finished):
        return {"interrupted": not finished} | place
    reports: dict[str, Report] = {}
    try:
        for split, chosen in rows.items():
            reports[split] = measure(training, chosen, folder / f"predictions_{split}.jsonl")
            log(f"{task.title(split)}: {describe(reports[split])}")
    except KeyboardInterrupt:  # the training is saved
        return {"interrupted": True} | place
    figures = {f"accuracy_{split}": report.accuracy for split, report in reports.items()}
    figures |= {"steps": training.done, "train_seconds": round(training.seconds, 2)}
    figures |= {split: report.record() for split, report in reports.items()}
    resumed = {"resumed_after_step": start} if start else {}
    return figures | {"run": str(folder)} | resumed
