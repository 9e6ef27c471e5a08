"""Teacher-forced training (paper, section 3.2): one loop for all methods.

    Training (session.py sets it up) -> train -> checkpoints
    (seed, step) -> SampleStream -> OptimizerStep -> figures -> metrics.jsonl
"""
import copy
import gc
import json
import sys
import time
from bisect import bisect
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from io import StringIO
from itertools import accumulate
from math import isfinite
from pathlib import Path
from shlex import quote
from typing import NamedTuple, TextIO

import torch
from torch import Tensor
from tqdm import tqdm

from minits.checkpoint.download import finished_checkpoints
from minits.checkpoint.files import Json
from minits.checkpoint.tokenizer import Tokenizer
from minits.checkpoint.weights import load_checkpoint
from minits.fast.accelerate import accelerate
from minits.fast.flat_batch import FlatBatch
from minits.supervision import Row
from minits.thinking import ThinkingStates
from minits.training import distributed, run_folder
from minits.training.recipe import Plan, learning_rate
from minits.training.run_folder import save_checkpoint
from minits.training.scoring import (
    Pairs,
    Report,
    describe,
    draw_rows,
    predict,
    summarise,
    with_room,
)
from minits.training.step import OptimizerStep
from minits.training.stopping import UNSAVED, Log, Stop
from minits.training.stream import SampleStream


class TrainingError(RuntimeError):
    """Training cannot go on; the message says at which step and why."""


@dataclass
class Training:
    """A training in progress."""

    plan: Plan
    folder: Path
    model: ThinkingStates
    tokenizer: Tokenizer
    done: int = 0  # optimizer steps
    seconds: float = 0.0  # spent in steps; evaluation and saving are not counted

    def __post_init__(self) -> None:
        self.settings, self.task, self.method = self.plan
        # Of the best weights so far (--keep-best): their step, their accuracy, and they themselves
        # where nothing is saved.
        self.best_step, self.best_accuracy = run_folder.best_so_far(self.folder)
        self.best_weights: dict[str, Tensor] | None = None
        self.optimizer_step = OptimizerStep(self.model, self.method, self.settings)
        self.stages = self.method.stages(self.settings.steps, self.settings.batch_size)
        self.stage_ends = list(accumulate(stage.steps for stage in self.stages))
        self.stream: SampleStream | None = None
        self.begin_stage()

    def stage_of(self, step: int) -> int:
        """The number of the stage of a step, counted from 0; past the last one the last stage's."""
        return min(bisect(self.stage_ends, step), len(self.stages) - 1)

    def begin_stage(self) -> None:
        """The optimizer's state, and samples, as this stage wants them."""
        self.stage_number = self.stage_of(self.done)
        self.stage_end = self.stage_ends[self.stage_number]
        stage = self.stages[self.stage_number]
        self.optimizer_step.begin_stage(stage)
        self.stream = SampleStream(
            self.plan,
            self.tokenizer,
            self.model.config,
            positions=self.model.backbone.config.max_position_embeddings,
            stage=self.stage_number,
            sizes=None if stage.fresh or self.stream is None else self.stream.sizes,
        )

    def ends_partial(self) -> bool:
        """Whether the steps so far end a part of a curriculum that is worth an evaluation."""
        stage, *later = self.stages[self.stage_number :]
        ends = self.done == self.stage_end and stage.partial and later[0].fresh
        return ends and len(self.task.splits) > 1

    def save(self) -> None:
        """Writes a checkpoint and drops those that are more than --keep asks for."""
        state = {
            "optimizer": self.optimizer_step.optimizer.state_dict(),
            "step": self.done,
            "seconds": self.seconds,
            "stage": self.stage_number,
            "settings": run_folder.run_json(self.plan),
        }
        if getattr(torch, self.settings.save_dtype) != self.model.backbone.lm_head.weight.dtype:
            state["weights"] = self.model.state_dict()  # the files hold them rounded
        about = {"step": self.done}
        save_checkpoint(self.folder, self.plan, self.model, self.tokenizer, about, state)

    def keep_if_best(self, accuracy: float) -> str:
        """With --keep-best: keeps the weights if none before were better; returns a log line.

        Weights that were evaluated before an interruption are not kept again.
        """
        if not self.settings.keep_best:
            return ""
        if accuracy < self.best_accuracy or self.done < self.best_step:
            return f"\nbest so far: {self.best_accuracy:.2%} at step {self.best_step}"
        self.best_step, self.best_accuracy = self.done, accuracy
        if self.settings.no_save:
            state = self.model.state_dict()
            self.best_weights = {name: x.to("cpu", copy=True) for name, x in state.items()}
        else:
            about = {"step": self.done, "valid_accuracy": accuracy}
            save_checkpoint(self.folder, self.plan, self.model, self.tokenizer, about, None)
        return "\nthe best so far"

    def load_best(self) -> None:
        """Replaces the last weights by the best ones; no step may follow."""
        weights = self.best_weights
        if weights is None:
            kept = finished_checkpoints(self.folder, "best")[-1]
            weights = load_checkpoint(kept)[0].state_dict()
        self.model.load_state_dict(weights)


# -- one step --------------------------------------------------------------------------------------


class TakenStep(NamedTuple):
    """An optimizer step that was started: what is known of it, and where its figures will be."""

    metrics: Json  # its number, learning rate, tokens of all processes; the seconds so far
    names: str  # this process's first and last sample
    figures: Tensor  # [3] answer loss, thought loss, gradient norm; perhaps still being computed


def take_step(training: Training, rows: list[Row], parts: list[FlatBatch]) -> TakenStep:
    """Starts the next optimizer step, without waiting for the device."""
    rate = learning_rate(training.settings, training.done)
    figures = training.optimizer_step(parts, rate)
    training.done += 1
    tokens = distributed.total(torch.tensor(sum(len(row.ids) - 1 for row in rows)))
    metrics = {"step": training.done, "lr": rate, "tokens": int(tokens)}
    return TakenStep(metrics, f"{rows[0].name} … {rows[-1].name}", figures)


def read_figures(training: Training, taken: TakenStep) -> Json:
    """All metrics of a step; waits for the device.

    Raises TrainingError if a figure is not finite. The training is then back at the step before:
    no later one has had an effect.
    """
    lm, thought, norm = taken.figures.tolist()
    step = taken.metrics["step"]
    if not isfinite(lm + thought + norm):
        training.done = step - 1
        training.optimizer_step.stopped.zero_()
        raise TrainingError(
            f"step {step}: loss {lm} (answer), {thought} (thoughts), gradient norm {norm}, on rows "
            f"{taken.names}. The weights are unchanged since step {training.done}. Lower --lr, or "
            "use --dtype float32."
        )
    found = {"step": step, "lm_loss": lm, "thought_loss": thought, "grad_norm": norm}
    return found | taken.metrics


# -- the loop --------------------------------------------------------------------------------------


@contextmanager
def objects_frozen() -> Iterator[None]:
    """Within, Python's garbage collector leaves alone what is there now.

    A full collection takes 0.1–0.4 s with torch in memory. It falls due every few pools of samples,
    at another step in each process, and all processes wait for it, as does the answer to a signal.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def train(training: Training, log: Log, stop: Stop) -> bool:
    """Trains to the last step; returns False if it was interrupted.

    Either way it saves a checkpoint (not with --no-save). It also does before it raises ValueError
    for a sample of the first process that does not fit, and TrainingError for output that cannot be
    written; but not if the training itself fails. Figures are read only at the steps that are
    logged, for reading them waits for the device; metrics.jsonl has every step.
    """
    settings, lead = training.settings, distributed.rank() == 0
    metrics_file = training.folder / "metrics.jsonl"
    if lead:
        run_folder.keep_metrics(metrics_file, training.done)
    file = metrics_file.open("a", encoding="utf-8") if lead else StringIO()
    bar = tqdm(
        total=settings.steps,
        initial=training.done,
        unit="step",
        desc="train",
        disable=not (sys.stderr.isatty() and lead),
    )
    if settings.no_save:
        stop.answer = UNSAVED
    with objects_frozen(), ExitStack() as around:
        around.callback(stop.guard, file.close)
        around.callback(stop.guard, bar.close)
        interrupted = False
        # The run may have been interrupted at a step to evaluate at, before it was evaluated.
        if lead and settings.keep_best and 0 < training.done < settings.steps:
            if training.done % settings.eval_every == 0:
                evaluate_between(training, stop, log)
        while training.done < settings.steps and not interrupted:
            if training.done == training.stage_end:
                training.begin_stage()
            try:
                interrupted = train_stage(training, stop, file, bar, log)
            except ValueError:  # a sample that does not fit; the steps before it are sound
                if lead and training.done and not settings.no_save:
                    stop.guard(training.save)  # if it fails, the cause to raise is still the sample
                    run = quote(str(training.folder))
                    saved = stop.error or f"saved: --model {run} begins with its weights"
                    stop.guard(log, f"stopped after step {training.done}; {saved}")
                raise
        interrupted = distributed.anyone(stop.asked)
        if lead and not settings.no_save:
            training.save()
    raise_output_error(training, stop)
    return training.done == settings.steps and not interrupted


def raise_output_error(training: Training, stop: Stop) -> None:
    """Raises TrainingError if output failed; the training is saved then."""
    if stop.error:
        kept = "nothing was saved (--no-save)" if training.settings.no_save else "all is saved"
        raise TrainingError(
            f"the output cannot be written ({stop.error}); stopped after step {training.done}, "
            f"{kept}. Go on with --resume --out {quote(str(training.folder))}."
        ) from stop.error


def train_stage(training: Training, stop: Stop, file: TextIO, bar: tqdm, log: Log) -> bool:
    """Trains to the end of the stage; returns whether it was interrupted."""
    settings, lead = training.settings, distributed.rank() == 0
    unread: list[TakenStep] = []
    interrupted = False
    with (
        ExitStack() as at_end,
        closing(training.stream.ahead(training.done, training.stage_end)) as batches,
    ):
        # Also after an error among the samples.
        at_end.callback(write_metrics, training, unread, file, stop)
        while training.done < training.stage_end and not interrupted:
            started = time.perf_counter()
            taken = take_step(training, *next_batch(batches))
            seconds = training.seconds + time.perf_counter() - started
            taken.metrics["seconds"] = round(seconds, 3)
            unread.append(taken)
            interrupted = distributed.anyone(stop.asked)
            last = training.done == settings.steps
            to_log, to_evaluate, to_save = (
                every > 0 and training.done % every == 0
                for every in (settings.log_every, settings.eval_every, settings.save_every)
            )
            to_log |= last
            to_evaluate |= training.ends_partial()
            if to_log or to_evaluate or to_save or interrupted:
                metrics = write_metrics(training, unread, file, stop)
                losses = {"answer": metrics["lm_loss"], "thoughts": metrics["thought_loss"]}
                if not training.method.thinks:
                    del losses["thoughts"]
                stop.guard(bar.set_postfix, {name: f"{x:.3f}" for name, x in losses.items()})
            training.seconds += time.perf_counter() - started
            stop.guard(bar.update)
            if to_log and not sys.stderr.isatty():
                figures = "  ".join(f"{name} {x:.4f}" for name, x in losses.items())
                line = (
                    f"step {training.done}/{settings.steps}  {figures}  lr {metrics['lr']:.2e}  "
                    f"{training.seconds:.0f} s"
                )
                stop.guard(log, line)
            if to_evaluate and lead and not last:
                evaluate_between(training, stop, log)
            if to_save and lead and not settings.no_save:
                training.save()
    return interrupted


def write_metrics(training: Training, unread: list[TakenStep], file: TextIO, stop: Stop) -> Json:
    """Writes a line of metrics for each step in `unread`, and empties it; returns the last one.

    Raises as `read_figures`; the step that failed and those after it get no line.
    """
    taken, metrics = list(unread), {}
    unread.clear()
    for each in taken:
        metrics = read_figures(training, each)
        stop.guard(file.write, json.dumps(metrics) + "\n")
    stop.guard(file.flush)
    return metrics


def next_batch(batches: Iterator) -> tuple[list[Row], list[FlatBatch]]:
    """The next samples. Raises TrainingError if the process that draws them is gone."""
    try:
        return next(batches)
    except RuntimeError as error:
        raise TrainingError(
            f"{error} (the process that draws samples; killed, perhaps for memory). Go on from the "
            "last checkpoint with --resume."
        ) from error


# -- evaluation ------------------------------------------------------------------------------------


def evaluation_rows(training: Training, split: str, n: int, stage: int = -1) -> Pairs:
    """`n` examples of a split, encoded. Raises ValueError if one does not fit the model."""
    rows = draw_rows(
        training.task,
        training.method,
        split,
        training.tokenizer,
        training.model.config,
        seed=training.settings.seed,
        n=n,
        stage=stage,
    )
    with_room(training.model, rows)  # raises; `predict` makes its own
    return rows


def evaluate_between(training: Training, stop: Stop, log: Log) -> None:
    """An evaluation between steps: on a fifth of the examples, on all if the best are kept."""
    samples = training.settings.eval_samples
    n = samples if training.settings.keep_best else max(samples // 5, 1)
    task, number = training.task, training.stage_of(training.done - 1)  # of the last step taken
    stage = training.stages[number]
    # The weights of a partial stage are evaluated on rows like its own, see `Stage`.
    rows = evaluation_rows(training, task.splits[1], n, number if stage.partial else -1)
    report = stop.unless_asked(measure, training, rows)
    if report:
        kept = "" if stage.partial else training.keep_if_best(report["accuracy"])
        after = f" ({stage.name})" if stage.partial else ""
        stop.guard(log, f"step {training.done}{after}: {describe(report, task.unit)}{kept}")


def measure(training: Training, rows: Pairs, predictions: Path | None = None) -> Report:
    """Free-running evaluation of the model as it is now.

    On CUDA a copy in the compute type is accelerated and measured: it can only infer.
    """
    engine, settings = training.model.eval(), training.settings
    if settings.device.startswith("cuda"):
        dtype = getattr(torch, settings.dtype)
        engine = accelerate(copy.deepcopy(engine).to(dtype))
    elif settings.compile:
        engine = copy.deepcopy(engine)  # is not compiled: that is for the shapes of steps
    task = training.task
    try:
        lines, _ = predict(
            engine, training.tokenizer, task, training.method, rows, predictions=predictions
        )
        return summarise(lines, task)
    finally:
        training.model.train()
