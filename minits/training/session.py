"""A training from its settings to its figures: set up, checked, trained, evaluated."""
import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from shlex import quote
from typing import Any

import torch

from minits.checkpoint.download import checkpoint_of, finished_checkpoints, local_folder
from minits.checkpoint.files import Json, locked, present, printable
from minits.checkpoint.tiny import make_tiny
from minits.checkpoint.tokenizer import Tokenizer
from minits.checkpoint.weights import CHOICES, load_checkpoint, read_about
from minits.fast.layouts import round_up
from minits.supervision import Example, Row
from minits.tasks.task import check_overlap, describe_sources
from minits.thinking import ThinkingStates
from minits.training import distributed, run_folder
from minits.training.late import is_late
from minits.training.loop import (
    Training,
    TrainingError,
    evaluation_rows,
    measure,
    raise_output_error,
    train,
)
from minits.training.recipe import Plan, TrainSettings, learning_rate, typed
from minits.training.scoring import Pairs, Report, describe
from minits.training.stopping import Log, Stop


def set_up(plan: Plan, folder: Path) -> Training:
    """A training by a resolved plan; it goes on from the newest checkpoint in `folder`, if any.

    Joins the group of processes, if there is one. Raises ValueError for settings that do not go
    together.
    """
    settings = plan.settings
    if settings.batch_size < distributed.world():
        raise ValueError(
            f"--batch-size {settings.batch_size}: fewer samples than the {distributed.world()} "
            "processes that share them; raise it, or start fewer."
        )
    distributed.join(settings.device)
    checkpoints = finished_checkpoints(folder)
    model, tokenizer = make_model(plan, checkpoints)
    model = model.to(settings.device).train()
    state = run_folder.read_state(folder, settings.device)
    if state is None:
        return Training(plan, folder, model, tokenizer)
    newest = checkpoints[-1]
    if state["step"] > settings.steps:
        raise ValueError(
            f"{newest} is past the {settings.steps} steps that {folder / 'run.json'} names. Put "
            "back their number, or start a new run."
        )
    run_folder.check_agreement(newest, state, plan)
    check_steps(plan, state, folder)
    if "weights" in state:
        model.load_state_dict(state["weights"])
    training = Training(plan, folder, model, tokenizer, state["step"], state["seconds"])
    optimizer = training.optimizer_step.optimizer
    ended = state["stage"] != training.stage_number  # saved at the very end of a stage
    if ended and training.stages[training.stage_number].resets:
        return training
    for ours, saved in zip(optimizer.param_groups, state["optimizer"]["param_groups"]):
        # These go with the device, which may change.
        saved |= {name: ours[name] for name in ("lr", "fused", "capturable")}
    optimizer.load_state_dict(state["optimizer"])
    return training


def check_steps(plan: Plan, state: dict[str, Any], folder: Path) -> None:
    """Raises ValueError if the steps taken so far would be others in a run of this length."""
    settings = plan.settings
    before = replace(settings, steps=state["settings"]["steps"])

    def schedule(run: TrainSettings) -> list[tuple[float, int]]:
        stages = enumerate(plan.method.stages(run.steps, run.batch_size))
        numbers = (number for number, stage in stages for _ in range(stage.steps))
        taken = zip(range(state["step"]), numbers)  # a run until Ctrl-C may have a billion steps
        return [(learning_rate(run, step), number) for step, number in taken]

    if schedule(settings) != schedule(before):
        raise ValueError(
            f"--steps {settings.steps}: {folder} is a run of {before.steps} steps, whose learning "
            f"rate up to step {state['step']} was another. For more steps on its weights: python "
            f"run.py train {settings.task} --model {quote(str(folder))} --steps NUMBER, and the "
            "run's other flags (the task's, too)."
        )


def make_model(plan: Plan, checkpoints: list[Path]) -> tuple[ThinkingStates, Tokenizer]:
    """The newest checkpoint, else what `--model` names.

    T and C start as copies where that has none, whatever it was trained for.
    """
    settings, task, method = plan
    torch.manual_seed(settings.seed)  # of weights that T or C of one's own has besides
    choices = {
        name: value for name in CHOICES if (value := getattr(settings, name)) is not None
    }
    if not checkpoints and settings.model == "tiny":
        about = {}
        model, tokenizer = make_tiny(
            thinks=method.thinks,
            texts=task.texts(),
            seed=settings.seed,
            window=settings.window or None,
            spare=method.spare,
        )
    else:
        if checkpoints:
            folder = checkpoints[-1]
        else:
            folder = checkpoint_of(local_folder(settings.model, settings.revision))
        # Choices must fit where checkpoint and training both have T and C; plain weights take any.
        theirs = method.thinks and present(folder / "thinking.safetensors")
        asked = choices if theirs or not read_about(folder) else {}
        model, tokenizer, about = load_checkpoint(folder, **asked)
        if method.thinks != model.thinks:
            blocked = model.blocked  # ids that the tokenizer lacks
            model = ThinkingStates(model.backbone, model.config, thinks=method.thinks)
            model.blocked = blocked
            if method.thinks:
                model.copy_blocks()
    if not checkpoints:
        method.prepare(model, tokenizer, about)
    config = replace(model.config, **choices, max_thought_tokens=settings.max_thought_tokens)
    model.config = config.check(model.backbone.config)
    return model, tokenizer


def ran_out(error: Exception) -> bool:
    """Whether memory ran out, of the host or of a card, where torch raises a RuntimeError."""
    said = re.search("allocate|out of memory", str(error))
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and bool(said))


@contextmanager
def memory_errors() -> Iterator[None]:
    """Raises TrainingError, which says what to do, where memory runs out."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not ran_out(error) or distributed.rank():  # only the first one's words are shown
            raise
        raise TrainingError(
            f"no memory left ({printable(error)}). Start a new run with a higher --accumulate, a "
            "lower --batch-size or, where rows hold several samples, --row-tokens. The last "
            "checkpoint, if there is one, stays: --resume goes on from there, but with these "
            "settings, which need more memory."
        ) from error


def run_training(
    plan: Plan,
    folder: Path,
    *,
    log: Log,  # takes results
    note: Log,  # takes remarks
    named: bool,  # whether the user named `folder`; else another free name would do
) -> Json:
    """`train` and the final evaluations; returns the figures.

    What cannot be trained or evaluated is refused before the first step, and before anything is
    written. Raises ValueError, also if another process trains in `folder`, and TrainingError.
    """
    lead, new = distributed.rank() == 0, not folder.exists()
    if not lead:
        log = note = lambda _text: None  # only the first process speaks
    with memory_errors(), ExitStack() as stack:
        if lead and not new:
            stack.enter_context(locked(folder))
        run_folder.check_sources(folder, plan.task)
        training = set_up(plan, folder)
        check_training(training, note)
        rows = evaluation_sets(training)
        # From here on there is something to lose.
        stop = stack.enter_context(Stop(note))
        if lead and new:
            training.folder = folder = run_folder.make_folder(folder, named)
            stack.enter_context(locked(folder))
        if lead:
            announce(training, note)
            for half in folder.glob("*.tmp"):  # of a process that ended while it wrote
                half.unlink()
            run_folder.write_run(folder, plan)
        return train_and_evaluate(training, rows, log, stop)


def announce(training: Training, note: Log) -> None:
    """Notes what is about to be trained, and where."""
    settings, folder = training.settings, training.folder
    note(f"run folder {folder}")
    if (folder / "run.json").exists():
        goes_on = f"it goes on after step {training.done} of {settings.steps}"
        note(goes_on if training.done else "it has no checkpoint: from the start")
    note("settings " + json.dumps(run_folder.run_json(training.plan)))
    for line in describe_sources(training.task):
        note(line)
    if settings.warmup > settings.steps:
        note(
            f"--warmup {settings.warmup} is longer than the run's {settings.steps} steps: the rate "
            f"never reaches --lr {settings.lr:g}."
        )


def check_training(training: Training, note: Log) -> None:
    """Raises ValueError if settings, task and first samples do not fit together, or the model."""
    settings, task = training.settings, training.task
    limit = training.model.backbone.config.max_position_embeddings
    width = round_up(settings.row_tokens, settings.chunk_size)
    if settings.layout == "long_rows" and width > limit:
        raise ValueError(
            f"--row-tokens {settings.row_tokens}: long rows need as many positions, the model has "
            f"{limit} (max_position_embeddings)."
        )
    if settings.eval_every and len(task.splits) < 2:
        raise ValueError(
            f"--eval-every {settings.eval_every}: the task has nothing to evaluate on; leave it "
            "out, or name an evaluation set."
        )
    if settings.keep_best and not settings.eval_every:
        raise ValueError(
            "--keep-best: nothing is evaluated before the end, so there is nothing to choose from; "
            "leave it out, or give --eval-every STEPS."
        )
    example = training.stream.example(0)
    # What has no steps, as two-hop's facts, needs no opening.
    if example.steps and not example.answer.startswith(task.opening.strip()):
        raise ValueError(
            f"task {task.name}: the answer {printable(repr(example.answer))} does not begin with "
            f"the task's opening {task.opening!r}, by which it is told from steps; put it there."
        )
    check_overlap(task)
    first = training.stream.pool(0)
    check_prompt(training, example)
    if training.method.thinks:
        check_chunks([row for step in first for row in step], settings.chunk_size, note)


def check_prompt(training: Training, example: Example) -> None:
    """Raises ValueError if a method of one's own asks otherwise than it is trained."""
    method, tokenizer = training.method, training.tokenizer
    row = method.encode(example, tokenizer, training.model.config, example.name or "row 0")
    trained, asked = row.ids[: row.prompt_length], method.prompt(example.prompt, tokenizer)
    if trained != asked:
        raise ValueError(
            f"--method {method.name}: of {row.name} `encode`, which makes what is trained and "
            f"evaluated on, has a prompt of {len(trained)} tokens, and `prompt`, with which infer "
            f"asks, another one, of {len(asked)}. Let `encode` call `prompt`."
        )


def evaluation_sets(training: Training) -> dict[str, Pairs]:
    """The rows of the evaluation sets. Raises ValueError if they do not fit the model."""
    task, rows = training.task, {}
    for split in task.splits[1:]:
        try:
            rows[split] = evaluation_rows(training, split, training.settings.eval_samples)
            for pair in rows[split]:  # raises; the evaluation asks again
                is_late(*pair, training.tokenizer, training.model.config.chunk_size)
        except ValueError as error:
            given = " ".join(typed(name, value) for name, value in asdict(task).items() if value)
            raise ValueError(f"evaluation, {task.title(split)} ({given}): {error}") from error
    return rows


def check_chunks(rows: list[Row], c: int, note: Log) -> None:
    """Raises ValueError if no row of any process completes a chunk; notes it if only few do.

    Notes, too, if no row has a step to think: a file in the form of another task, perhaps.
    """
    complete = sum(bool(row.thoughts) for row in rows)
    thinking = sum(any(len(thought) > 1 for thought in row.thoughts) for row in rows)
    counts = torch.tensor([complete, thinking, len(rows)])
    complete, thinking, n = distributed.total(counts).tolist()
    if not complete:
        longest = max(len(row.ids) for row in rows)
        raise ValueError(
            f"--chunk-size {c}: none of the first {n} training rows completes a chunk (the longest "
            f"has {longest} tokens, the last of which is not read), so no thought can arise. "
            "Lower it."
        )
    if complete < n / 2:
        note(
            f"--chunk-size {c}: only {complete / n:.0%} of the first {n} training rows complete a "
            "chunk; the others have no thought to learn."
        )
    if not thinking:
        note(
            f"none of the first {n} training rows has a step in a complete chunk, so T learns to "
            "think nothing. Look at one: run.py data. (Lines of GSM8K are for the task gsm.)"
        )


def train_and_evaluate(
    training: Training, rows: dict[str, Pairs], log: Log, stop: Stop
) -> Json:
    """The figures of a training that is ready to go, `interrupted` among them."""
    folder, start, task = training.folder, training.done, training.task
    finished = train(training, log, stop)
    # The others only take part in the steps, and do not wait for the evaluation.
    training.optimizer_step.release()
    distributed.leave()
    place = {"step": training.done, "run": str(folder)}
    if not (distributed.rank() == 0 and finished):
        return {"interrupted": not finished} | place
    reports: dict[str, Report] = {}
    saved = "" if training.settings.no_save else "; the training is saved"
    stop.answer = f"stopping the evaluation{saved}"
    for split, chosen in rows.items():
        predictions = folder / f"predictions_{split}.jsonl"
        report = stop.unless_asked(measure, training, chosen, predictions)
        if report and training.settings.keep_best and not reports:
            training.keep_if_best(report["accuracy"])  # the last weights, too
            stop.guard(log, f"the best weights are those of step {training.best_step}")
            if training.best_step != training.done:
                training.load_best()
                report = stop.unless_asked(measure, training, chosen, predictions)
        if report:
            reports[split] = report
            stop.guard(log, f"{task.title(split)}: {describe(report, task.unit)}")
    raise_output_error(training, stop)
    if len(reports) < len(rows):
        return {"interrupted": True} | place
    figures = {f"accuracy_{split}": report["accuracy"] for split, report in reports.items()}
    figures |= {
        "samples": training.done * training.settings.batch_size,
        "steps": training.done,
        "train_seconds": round(training.seconds, 2),
        "hidden_size": training.model.backbone.config.hidden_size,
        "run": str(folder),
        **reports,
    }
    if training.settings.keep_best:
        figures["best_step"] = training.best_step
    if start:
        figures["resumed_after_step"] = start
    return figures
