"""Teacher-forced training (paper, section 3.2): one loop for `thinking`, `no-cot` and `cot`.

    TrainConfig -> set_up -> Run (model, tokenizer, task, optimizer, step) -> train -> checkpoints -> evaluation
    (seed, step) -> Stream (stream.py) -> launch -> Update (update.py) -> finish -> metrics

Nothing but the initial weights and the data is random, and the data is a function of (seed, step). So weights,
optimizer and step number are all that a checkpoint needs for an exact resume: to the bit on a CPU, up to rounding on
CUDA, where the padded sizes of batches depend on those before and sums have no fixed order.
"""
from __future__ import annotations

import copy
import gc
import json
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from io import StringIO
from math import cos, isfinite, pi
from pathlib import Path
from typing import NamedTuple, TextIO, get_type_hints

import torch
from torch import Tensor
from tqdm import tqdm

from minits.training import distributed
from minits.training.recipe import TrainConfig, task_options
from minits.training.scoring import Report, describe, draw_rows, evaluate, options
from minits.checkpoint.files import flush, held, made, new_folder, read_json, require, write_text
from minits.generation import GenerationConfig, accelerate
from minits.training.stream import Stream
from minits.supervision import Row, round_up
from minits.tasks import Task, make_task
from minits.thinking import Batch, ThinkingStates
from minits.checkpoint.tiny import make_tiny
from minits.checkpoint.tokenizer import Tokenizer
from minits.training.step import Update, make_optimizer
from minits.checkpoint.weights import CHOICES, finished_checkpoints, load, write_model


class TrainingError(RuntimeError):
    """Training cannot go on; the message says at which step and why."""


@dataclass
class Run:
    """A training in progress."""

    config: TrainConfig
    folder: Path
    model: ThinkingStates
    tokenizer: Tokenizer
    task: Task
    optimizer: torch.optim.Optimizer
    step: int = 0  # optimizer steps done
    seconds: float = 0.0  # spent in steps, evaluation and saving not counted

    def __post_init__(self) -> None:
        self.update = Update(self.model, self.config, self.optimizer)
        self.stream = Stream(self.config, self.task, self.tokenizer, self.model)


# -- setting up ----------------------------------------------------------------------------------------------------------


def set_up(config: TrainConfig, folder: Path) -> Run:
    """Model, task and optimizer for a resolved `config`; the newest checkpoint of `folder` if there is one.

    Meets the other processes, if there are any. Raises ValueError for settings that do not go together.
    """
    if config.batch_size < distributed.world():
        raise ValueError(f"--batch-size {config.batch_size}: fewer samples than the {distributed.world()} processes that "
                         "share them; raise it, or start fewer.")
    distributed.join(config.device)
    task = make_task(config.task, **task_options(config))
    checkpoints = finished_checkpoints(folder)
    thinks = config.method == "thinking"
    choices = {name: getattr(config, name) for name in CHOICES}
    if checkpoints:
        model, tokenizer = load(checkpoints[-1], **choices)
    elif config.model == "tiny":
        model, tokenizer = make_tiny(seed=config.seed, window=(config.window or None) if thinks else None, thinks=thinks,
                                     **choices)
    else:
        model, tokenizer = load(config.model, revision=config.revision, **choices)
        if not thinks:
            model.thinking_block = model.compression_block = None
    model = model.to(config.device).train()
    optimizer = make_optimizer(model, config)
    if not checkpoints:
        return Run(config, folder, model, tokenizer, task, optimizer)
    state = read_state(checkpoints[-1] / "training_state.pt", config.device)
    if state["step"] > config.steps:
        raise ValueError(f"{checkpoints[-1]} is past the {config.steps} steps that {folder / 'run.json'} names. Put back "
                         "their number, or start a new run.")
    for ours, saved in zip(optimizer.param_groups, state["optimizer"]["param_groups"]):
        saved |= {key: ours[key] for key in ("lr", "fused", "capturable")}  # these go with the device, which may change
    optimizer.load_state_dict(state["optimizer"])
    return Run(config, folder, model, tokenizer, task, optimizer, state["step"], state["seconds"])


# -- one step ------------------------------------------------------------------------------------------------------------


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up, a constant rate, then a cosine that would reach zero one step after the last.

    The longer a task stays on its plateau (Vars: for hundreds of steps), the later the rate should fall.
    """
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    decay_steps = config.decay * (config.steps - config.warmup)
    share = max(step - (config.steps - decay_steps), 0.0) / max(decay_steps, 1.0)
    return config.lr * (1 + cos(pi * share)) / 2


class TakenStep(NamedTuple):
    """An optimizer step that was started: what is known of it, and where its figures will be."""

    metrics: dict  # its number, learning rate and tokens of all processes
    names: str  # this process's first and last sample
    figures: Tensor  # [3] answer loss, thought loss, gradient norm; perhaps still being computed


def take_step(run: Run, rows: list[Row], parts: list[Batch]) -> TakenStep:
    """Starts the next optimizer step, without waiting for the device."""
    rate = learning_rate(run.config, run.step)
    figures = run.update(parts, rate)
    run.step += 1
    tokens = distributed.total(torch.tensor(sum(len(row.ids) - 1 for row in rows)))
    metrics = {"step": run.step, "lr": rate, "tokens": int(tokens)}
    return TakenStep(metrics, f"{rows[0].name} … {rows[-1].name}", figures)


def read_figures(run: Run, taken: TakenStep) -> dict:
    """All metrics of a step; waits for the device.

    Raises TrainingError if a figure is not finite, the run being back at the step before: no later one has had an effect.
    """
    lm, thought, norm = taken.figures.tolist()
    if not isfinite(lm + thought + norm):
        step = taken.metrics["step"]
        run.step = step - 1
        run.update.stopped.zero_()
        raise TrainingError(
            f"step {step}: loss {lm} (answer), {thought} (thoughts), gradient norm {norm}, on rows "
            f"{taken.names}. The weights are unchanged since step {run.step}. Lower --lr, or use --dtype float32.")
    return {"step": taken.metrics["step"], "lm_loss": lm, "thought_loss": thought, "grad_norm": norm} | taken.metrics


def train_step(run: Run, rows: list[Row]) -> dict:
    """One whole optimizer step on `rows`; returns its metrics."""
    return read_figures(run, take_step(run, rows, run.stream.parts(rows)))


# -- checkpoints ---------------------------------------------------------------------------------------------------------


def save_checkpoint(run: Run) -> Path:
    """Writes checkpoints/step-NNNNNN whole or not at all, then drops the older ones."""
    target = run.folder / "checkpoints" / f"step-{run.step:06d}"
    if not target.exists():
        about = {"method": run.config.method, "task": run.config.task, "base_model": run.config.model,
                 "max_ops": run.config.max_ops, "seed": run.config.seed, "step": run.step}
        with new_folder(target) as folder:
            write_model(run.model, run.tokenizer, folder, about)
            torch.save({"optimizer": run.optimizer.state_dict(), "step": run.step, "seconds": run.seconds},
                       folder / "training_state.pt")
            flush(folder / "training_state.pt")
    for other in target.parent.glob("step-*"):  # half-written ones of a killed process, too
        if other != target:
            shutil.rmtree(other)
    return target


def read_state(path: Path, device: str) -> dict:
    """Optimizer and step of a checkpoint. Raises ValueError naming the file if it is damaged."""
    require(path)
    try:
        state = torch.load(path, map_location=device, weights_only=True)
        return {name: state[name] for name in ("optimizer", "step", "seconds")}
    except (OSError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # damage has many names
        raise ValueError(f"{path} is damaged ({type(error).__name__}): no state of a training can be read. The weights beside "
                         "it are whole, but an exact resume is not possible. Start a new run.") from error


@contextmanager
def deferred_interrupt() -> Iterator[list[int]]:
    """Ctrl-C and termination are noted in the list that is given, so that a step is never left half done.

    A second one acts at once.
    """
    seen: list[int] = []

    def note(number: int, _frame) -> None:
        seen.append(number)
        signal.signal(number, previous[number])

    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield seen
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def objects_frozen() -> Iterator[None]:
    """Within, Python's garbage collector leaves alone what is there now.

    A look at all objects takes 0.1–0.4 s with torch in memory, falls due every few pools of samples, at another step in each
    process, and all wait for it.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


# -- the loop ------------------------------------------------------------------------------------------------------------


def train(run: Run, log=print) -> bool:
    """Trains to the last step; returns False if it was interrupted. Leaves a checkpoint then, too, but not if it fails.

    Figures are read at the steps that are told of, for reading them waits for the device; metrics.jsonl has every step.
    """
    config, lead, stop = run.config, distributed.rank() == 0, False
    if lead:
        keep_metrics(run.folder / "metrics.jsonl", run.step)
    terminal, unread = sys.stderr.isatty(), []
    bar = tqdm(total=config.steps, initial=run.step, unit="step", disable=not (terminal and lead), desc="train")
    file = (run.folder / "metrics.jsonl").open("a", encoding="utf-8") if lead else StringIO()
    with (deferred_interrupt() as interrupted, objects_frozen(), file, ExitStack() as stack, bar,
          closing(run.stream.ahead(run.step)) as batches):
        stack.callback(lambda: write_metrics(run, unread, file))  # also after an error among the samples
        while run.step < config.steps and not stop:
            started = time.perf_counter()
            taken = take_step(run, *next_of(batches))
            taken.metrics["seconds"] = round(run.seconds + time.perf_counter() - started, 3)
            unread.append(taken)
            stop, last = distributed.anyone(bool(interrupted)), run.step == config.steps
            to_log, to_evaluate, to_save = (every > 0 and run.step % every == 0 for every in (
                config.log_every, config.eval_every, config.save_every))
            if stop or last or to_log or to_evaluate or to_save:
                metrics = write_metrics(run, unread, file)
                bar.set_postfix(lm=f"{metrics['lm_loss']:.3f}", thought=f"{metrics['thought_loss']:.3f}")
            run.seconds += time.perf_counter() - started
            bar.update()
            if not terminal and (to_log or last):
                log(f"step {run.step}/{config.steps}  answer {metrics['lm_loss']:.4f}  thoughts "
                    f"{metrics['thought_loss']:.4f}  lr {metrics['lr']:.2e}  {run.seconds:.0f} s")
            if to_evaluate and lead and not last:
                log(f"step {run.step}: " + describe(
                    measure(run, *evaluation_set(run, (1, config.max_ops), max(config.eval_samples // 5, 1)))))
            if to_save and lead and not config.no_save:
                save_checkpoint(run)
        stop = distributed.anyone(bool(interrupted))
    if lead and not config.no_save:
        save_checkpoint(run)
    return run.step == config.steps and not stop


def write_metrics(run: Run, unread: list[TakenStep], file: TextIO) -> dict:
    """Reads the figures of the steps in `unread`, a line each, and empties it; returns the last ones. Raises as `read_figures`."""
    taken, metrics = list(unread), {}
    unread.clear()  # of a step that failed, and of those after it, nothing is left to tell
    for each in taken:
        metrics = read_figures(run, each)
        file.write(json.dumps(metrics) + "\n")
        file.flush()
    return metrics


def next_of(batches: Iterator) -> tuple[list[Row], list[Batch]]:
    """The next samples. Raises TrainingError if the process that draws them is gone."""
    try:
        return next(batches)
    except RuntimeError as error:
        raise TrainingError(f"{error} (the process that draws samples; killed, perhaps for memory). Go on from the last "
                            "checkpoint with --resume.") from error


def keep_metrics(path: Path, step: int) -> None:
    """Drops the metrics of steps that a resumed run will do again: one line a step, the last one perhaps cut off."""
    if path.exists():
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        write_text(path, "".join(lines[:step]))


def evaluation_set(run: Run, operations: tuple[int, int], n: int) -> tuple[list, GenerationConfig]:
    """`n` examples with `operations` (least, most), encoded, and how to answer them; raises if one does not fit."""
    config = run.config
    rows = draw_rows(run.task, run.tokenizer, run.model, method=config.method, seed=config.seed, n=n,
                     operations=operations, max_thought_tokens=config.max_thought_tokens)
    return rows, options(run.model, rows, max_thought_tokens=config.max_thought_tokens)


def measure(run: Run, rows: list, config: GenerationConfig, predictions: Path | None = None) -> Report:
    """Free-running evaluation of the model as it is now, on what `evaluation_set` gave.

    On CUDA a copy of the model in the compute type does it, on the fast path, which is for inference only.
    """
    model = run.model.eval()
    if run.config.device.startswith("cuda"):
        model = accelerate(copy.deepcopy(model).to(getattr(torch, run.config.dtype)))
    report = evaluate(model, run.tokenizer, run.task, rows, config, predictions=predictions)
    run.model.train()
    return report


def run_training(config: TrainConfig, folder: Path, log=print, note=print) -> dict:
    """`train` and the final evaluations; returns the figures. `log` takes results, `note` remarks.

    What cannot be trained or evaluated is refused before the first step, and before anything is written. Raises
    ValueError, also if another process trains in `folder`.
    """
    lead, new = distributed.rank() == 0, not folder.exists()
    with ExitStack() as stack:
        if lead and not new:
            stack.enter_context(held(folder))
        run = set_up(config, folder)
        longer_set = check_data(run)
        if lead and new:
            stack.enter_context(held(made(folder)))
        if lead:
            note(f"run folder {folder}")
            if (folder / "run.json").exists():
                note(f"it goes on after step {run.step} of {config.steps}" if run.step else
                     "it has no checkpoint: from the start")
            note("settings " + json.dumps(asdict(config)))
            write_text(folder / "run.json", json.dumps(asdict(config), indent=2) + "\n")
        return train_and_evaluate(run, longer_set, log)


def check_data(run: Run) -> tuple[list, GenerationConfig]:
    """The examples of the evaluation on longer inputs; raises ValueError if they or the first samples do not fit."""
    config, limit = run.config, run.model.backbone.config.max_position_embeddings
    if config.layout == "long_rows" and round_up(config.row_tokens, config.chunk_size) > limit:
        raise ValueError(f"--row-tokens {config.row_tokens}: long rows need as many positions, the model has {limit} "
                         "(max_position_embeddings).")
    run.stream.rows(0)
    least, most = longer_operations(config)
    try:
        return evaluation_set(run, (least, most), config.eval_samples)
    except ValueError as error:
        raise ValueError(f"evaluation on {least} … {most} operations (--eval-max-ops {config.eval_max_ops}): "
                         f"{error}") from error


def longer_operations(config: TrainConfig) -> tuple[int, int]:
    """(least, most) operations of the evaluation on longer inputs."""
    return config.max_ops, max(config.eval_max_ops, config.max_ops)


def train_and_evaluate(run: Run, longer_set: tuple[list, GenerationConfig], log) -> dict:
    """The figures of a run that is ready, `interrupted` among them."""
    config, folder, start = run.config, run.folder, run.step
    finished = train(run, log)
    run.update.leave()  # the others only take part in the steps, and do not wait for the evaluation
    place = {"step": run.step, "run": str(folder)}
    if not (distributed.rank() == 0 and finished):
        return {"interrupted": not finished} | place
    try:
        known_set = evaluation_set(run, (1, config.max_ops), config.eval_samples)
        known = measure(run, *known_set, folder / "predictions_id.jsonl")
        log(f"in distribution (1 … {config.max_ops} operations): " + describe(known))
        ood = measure(run, *longer_set, folder / "predictions_ood.jsonl")
        least, most = longer_operations(config)
        log(f"longer ({least} … {most} operations): " + describe(ood))
    except KeyboardInterrupt:  # the training is saved
        return {"interrupted": True} | place
    figures = {"accuracy_id": known.accuracy, "accuracy_ood": ood.accuracy, "steps": run.step,
               "train_seconds": round(run.seconds, 2), "id": asdict(known), "ood": asdict(ood), "run": str(folder)}
    return figures | ({"resumed_after_step": start} if start else {})


def read_run(folder: Path) -> TrainConfig:
    """The configuration of a run folder. Raises where `folder` is not one of ours, or its run.json was changed."""
    path = folder / "run.json"
    if not path.exists():
        raise FileNotFoundError(f"{folder} is not a run folder: it has no run.json. --resume continues a run that "
                                "`run.py train` made; name its folder with --out.")
    try:
        config = TrainConfig(**read_json(path))
    except TypeError as error:
        raise ValueError(f"{path} was not written by this version ({error}); start a new run.") from error
    for name, kind in get_type_hints(TrainConfig).items():
        value = getattr(config, name)
        if not (isinstance(value, kind) or (type(value) is int and isinstance(0.0, kind))):
            raise ValueError(f"{path}: {name} is {value!r}, which is no value for it. Put back what it was, or start a "
                             "new run.")
    return config
