"""How fast training is: whole optimizer steps, with and without thoughts."""
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from minits.lab.bench import Line, machine_limits, ratio, summary, time_interleaved
from minits.methods import make_method
from minits.tasks import make_task
from minits.training.loop import Training
from minits.training.recipe import Plan, TrainSettings, resolve
from minits.training.session import set_up


def bench_train(
    folder: str, device: str, dtype: str, compile: bool, repeats: int
) -> Iterator[Line]:
    """All measurements, one dict a line. folder: of real weights. Nothing is written.

    Steps at a learning rate of 0 on Parity and Vars N = 40, by the recipe of Thinking States, which
    take turns with steps without thoughts on the same samples. The first call of each pays for
    capture of graphs and compilation.
    """
    yield machine_limits(device, getattr(torch, dtype))
    for name, options in (("parity", {}), ("vars", {"max_ops": 40})):
        task, trainings = make_task(name, **options), {}
        asked = TrainSettings(
            task=name, model=folder, compile=compile, device=device, dtype=dtype
        )
        settings = resolve(asked, task)
        for method in ("no-cot", "thinking"):
            plan = Plan(replace(settings, method=method), task, make_method(method))
            trainings[method] = set_up(plan, Path("nowhere"))
        yield from steps(trainings, name, repeats)


def steps(trainings: dict[str, Training], task: str, repeats: int) -> Iterator[Line]:
    """Milliseconds of a step of each training, its tokens, and the ratio of the two."""
    calls, lines = [], []
    for how, training in trainings.items():
        samples = training.stream.rows(0)
        parts = training.stream.parts(samples)
        calls.append(partial(training.optimizer_step, parts, 0.0))
        lines.append({
            "what": f"step, {how} on {task}",
            "samples": len(samples),
            "rows": list(parts[0].ids.shape),
            "tokens": sum(len(row.ids) - 1 for row in samples),
        })
    times = time_interleaved(calls, repeats)
    for line, mine in zip(lines, times):
        yield line | summary(mine)
    plain, thinking = times
    yield {"what": f"thinking over no-cot on {task}"} | ratio(thinking, plain)
