"""Short trainings, and what the tests of training look at in them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from strategies import Shape, fresh
from torch.utils.hooks import RemovableHandle

from minits.checkpoint.tiny import tiny_tokenizer
from minits.fast.flat_batch import collate, flat_losses
from minits.methods import make_method
from minits.supervision import Row
from minits.tasks import make_task
from minits.teacher_forcing import Losses
from minits.thinking import ThinkingStates
from minits.training import loop
from minits.training.loop import Training, read_figures, take_step
from minits.training.recipe import Plan, TrainSettings, resolve
from minits.training.session import set_up
from minits.training.stopping import Log, Stop

ROOT = Path(__file__).parents[1]
QUICK = {
    "steps": 12,
    "batch_size": 4,
    "warmup": 2,
    "max_thought_tokens": 8,
    "log_every": 5,
    "eval_samples": 2,
    "device": "cpu",
}
SHORT = {"max_ops": 3, "eval_max_ops": 4}  # options of the task
FLAGS = [
    part
    for key, value in (QUICK | SHORT).items()
    if key != "steps"
    for part in ("--" + key.replace("_", "-"), str(value))
]


def settings(**changes: Any) -> TrainSettings:
    """Resolved settings that train on Parity in about a second."""
    return resolve(TrainSettings(**({"task": "parity"} | QUICK | changes)), make_task("parity"))


def begin(folder: Path, **changes: Any) -> Training:
    """A training in `folder`, gone on with if there is one. changes: of settings or task."""
    folder.mkdir(parents=True, exist_ok=True)
    options = {name: changes.pop(name, value) for name, value in SHORT.items()}
    chosen = settings(**changes)
    plan = Plan(chosen, make_task("parity", **options), make_method(chosen.method))
    return set_up(plan, folder)


def silent(_text: str) -> None:
    """A log that nobody reads."""


def train(training: Training, log: Log, stop: Stop | None = None) -> bool:
    """`loop.train`, with a `Stop` of its own where none is given."""
    if stop:
        return loop.train(training, log, stop)
    with Stop(silent) as stop:
        return loop.train(training, log, stop)


def train_step(training: Training, rows: list[Row]) -> dict[str, Any]:
    """One whole optimizer step on `rows`, started and waited for: its metrics."""
    return read_figures(training, take_step(training, rows, training.stream.parts(rows)))


def step_on(shape: Shape, rows: list[Row], **changes: Any) -> tuple[Training, dict[str, Any]]:
    """A float64 model of `shape` after one unclipped step on `rows`, and the step's metrics."""
    chosen = settings(warmup=0, clip=1e12, row_tokens=1, **changes)
    plan = Plan(chosen, make_task("parity"), make_method("thinking"))
    training = Training(plan, Path(), fresh(shape).train(), tiny_tokenizer())
    return training, train_step(training, rows)


def sums(model: ThinkingStates, rows: list[Row], **how: Any) -> torch.Tensor:
    """(answer, thought) losses summed over `rows` in a layout, as one tensor."""
    losses = flat_losses(model, collate(rows, model.config, **how))
    return torch.stack([losses.lm, losses.thought])


def gradients(model: ThinkingStates) -> dict[str, torch.Tensor]:
    """The gradient of every parameter, zero where there is none."""
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }


# -- what a training is at -------------------------------------------------------------------------


def leaves(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested dicts, lists and tuples as one dict of their leaves."""
    if not isinstance(value, (dict, list, tuple)):
        return {prefix: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {k: leaf for key, part in items for k, leaf in leaves(part, f"{prefix}/{key}").items()}


def snapshot(training: Training) -> dict[str, torch.Tensor]:
    """Copies of the weights and of the optimizer's whole state."""
    optimizer = training.optimizer_step.optimizer.state_dict()["state"]
    found = leaves({"model": training.model.state_dict(), "optimizer": optimizer})
    return {name: leaf.detach().clone() for name, leaf in found.items()}


def assert_same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def assert_close(
    one: dict[str, torch.Tensor],
    other: dict[str, torch.Tensor],
    *,
    rtol: float = 1e-9,
    atol: float = 1e-9,
) -> None:
    """Names the tensor that differs."""
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(
            one[name], other[name], rtol=rtol, atol=atol, msg=lambda m: f"{name}: {m}"
        )


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, without the seconds."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def checkpoints_in(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


# -- what happens to it ----------------------------------------------------------------------------


def break_loss(training: Training, step: int) -> RemovableHandle:
    """Makes the answer loss NaN in optimizer step `step`."""

    def spoil(_module: Any, _inputs: Any, losses: Losses) -> Losses:
        if training.done != step - 1:
            return losses
        return replace(losses, lm=losses.lm * float("nan"))

    return training.optimizer_step.loss_module.register_forward_hook(spoil)


def press_ctrl_c(training: Training, step: int) -> None:
    """Sends SIGINT to this process once, within the first part of optimizer step `step`."""

    def press(*_: Any) -> None:
        if training.done == step - 1:
            handle.remove()
            os.kill(os.getpid(), signal.SIGINT)

    handle = training.optimizer_step.loss_module.register_forward_hook(press)


# -- processes of its own --------------------------------------------------------------------------


SERVER = """
import json, os, signal, sys
import torch._dynamo
import torch.distributed.nn
import run

job = child = None
for line in sys.stdin:
    job, children = json.loads(line), []
    for environment in job["environments"]:
        child = os.fork()
        if child == 0:
            break
        children.append(child)
    if child == 0:
        break
    ends = [os.waitstatus_to_exitcode(os.waitpid(each, 0)[1]) for each in children]
    print(json.dumps(ends), flush=True)
if child == 0:
    signal.alarm(120)
    os.environ |= environment
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(os.path.join(job["folder"], name), os.O_WRONLY | os.O_APPEND), number)
    exec(job["before"])
    status = run.main(job["arguments"])
    sys.stdout.flush()
    os._exit(status)  # to take down what was imported takes a second
"""


class Ended(NamedTuple):
    """How processes ended, and what all of them together printed."""

    codes: list[int]
    stdout: str
    stderr: str


class Processes:
    """Runs `run.py` in processes of its own.

    They are forked from one that has imported everything, which takes longer than what they do.
    """

    def __init__(self) -> None:
        self.server = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def run(
        self, folder: Path, arguments: list[str], *, before: str = "", world: int | None = None
    ) -> Ended:
        """`run.py` with `arguments`; what it prints comes to lie in files in `folder`.

        before: code to run first. world: run by so many processes, as torchrun starts them.
        """
        environments = [{}] if world is None else places(world)
        files = [folder / "stdout", folder / "stderr"]
        for file in files:
            file.write_text("")
        job = {"folder": str(folder), "arguments": arguments, "before": before}
        print(json.dumps(job | {"environments": environments}), file=self.server.stdin, flush=True)
        codes = json.loads(self.server.stdout.readline())
        return Ended(codes, *(file.read_text() for file in files))

    def close(self) -> None:
        self.server.communicate()


def places(world: int) -> list[dict[str, str]]:
    """What torchrun tells each of `world` processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    return [
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)} | address
        for rank in range(world)
    ]
