"""What training costs: Coconut's passes one after another beside the one pass of Thinking States.

The paper's figure: forward and backward pass of one row of 128 tokens, against recurrent steps.
All sides read as many tokens, answer with the same ones, and take turns. They run on the same
weights, float32 ones under autocast as in training, and on the code that trains:

- no latents: plain Qwen2.5, one pass (fast/flat_batch.py).
- Thinking States: the flat pass, T and C. n steps are chunks of c = 128 // n tokens, of which n are
  complete. The thought of each is given and has 8 tokens. Every thought makes a state that a chunk
  reads, but for the last one where the chunks come out even.
- Coconut: n latents among the 128 tokens, over one cache (methods/coconut.py), as the official
  training does it; or all before a latent read again for each, as its generation does.

`path` says how: "eager" launches every kernel from Python, the same for all sides; "graphs" (CUDA)
replays CUDA graphs, as training does with one card. Gradients begin at None, no optimizer steps.
"""
import random
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import correlation, linear_regression
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minits.checkpoint.weights import load_checkpoint
from minits.fast.cross_entropy import cross_entropy_sum
from minits.fast.flat_batch import FoldedFrame
from minits.fast.graphs import capture
from minits.fast.layouts import BucketedSizes, ExactSizes
from minits.generation import GenerationConfig
from minits.lab.bench import Line, prompt_of, ratio, summary, time_interleaved
from minits.lab.columns import markdown
from minits.methods import make_method
from minits.methods.coconut import LatentBatch
from minits.supervision import Row
from minits.teacher_forcing import Losses, loss
from minits.thinking import Engine, ThinkingStates
from minits.training.loop import objects_frozen
from minits.training.recipe import TrainSettings
from minits.training.step import OptimizerStep

LENGTH, ANSWER, THOUGHT = 128, 8, 8  # tokens that are read, supervised, thought in a chunk
STEPS = (1, 2, 4, 8, 10, 16, 32)
BEGIN, END, LATENT = 995, 996, 997  # of Coconut; `prompt_of` gives no such ids
PLAIN, THINKING, COCONUT = "no latents", "Thinking States", "Coconut"
REFED = f"{COCONUT}, prefix re-fed"
SIDES = (PLAIN, THINKING, COCONUT, REFED)
CALLS = 2 * (1 + (len(SIDES) - 1) * len(STEPS))  # of a round: of each side's passes both functions


class Side(NamedTuple):
    """A pass that is measured."""

    name: str
    steps: int  # recurrent ones
    losses: Callable[[], Losses]


def bench_cost(
    folder: Path,
    engine: Engine,  # answers; what trains has weights of its own, from `folder`
    dtype: str,
    plain: bool,  # without CUDA graphs
    repeats: int,
) -> Iterator[Line]:
    """All measurements, one dict a line. Raises ValueError for weights without T and C."""
    device = engine.device
    cuda = device.type == "cuda"
    graphs = cuda and not plain
    half = dtype == "bfloat16"
    model = load_checkpoint(folder, device=device)[0].train()
    if not model.thinks:
        raise ValueError(f"{folder} was trained without T and C. Name a plain Qwen2.5.")
    with objects_frozen():
        sides = sides_of(model, STEPS)
        if graphs:  # first: it is the figure, and takes a tenth of the other path's time
            yield from passes(sides, model, half, repeats, torch.cuda.graph_pool_handle())
        yield from answers(engine, 64 if cuda else 4, repeats)
        settings = TrainSettings(device=str(device), dtype=dtype, lr=1e-5, layout="rows")
        yield from optimizer_steps(model, settings, 32 if cuda else 2, repeats, graphs)
        yield from passes(sides, model, half, repeats)


# -- forward and backward pass ---------------------------------------------------------------------


def sides_of(model: ThinkingStates, steps: Sequence[int]) -> list[Side]:
    """The passes, all over the same weights."""
    plain = ThinkingStates(model.backbone, model.config, thinks=False)
    text, answer = prompt_of(LENGTH - ANSWER + 1), prompt_of(ANSWER)
    thought = [*prompt_of(THOUGHT), model.config.thought_end]
    row = Row(text + answer, len(text), [])
    found = [Side(PLAIN, 0, losses_of("no-cot", plain, row))]
    for n in steps:
        chunked = copy(model)
        chunked.config = replace(model.config, chunk_size=LENGTH // n)
        thinking = replace(row, thoughts=[thought] * n)
        prompt = with_latents(text[: len(text) - n - 2], n)
        latent = Row(prompt + answer, len(prompt), [])
        found += [
            Side(THINKING, n, losses_of("thinking", chunked, thinking)),
            Side(COCONUT, n, losses_of("coconut", plain, latent)),
            Side(REFED, n, losses_of("coconut", plain, latent, refed_losses)),
        ]
    return found


def with_latents(question: list[int], latents: int) -> list[int]:
    """Coconut's prompt."""
    return [*question, BEGIN, *[LATENT] * latents, END]


def losses_of(name: str, model: ThinkingStates, row: Row, losses: Any = None) -> Callable:
    """The losses of a row by a method; its batch has no room to grow, for there is no other one."""
    method = make_method(name)
    sizes = ExactSizes(least=int(method.thinks))
    batch = method.collate([row], model.config, sizes=sizes).map(lambda x: x.to(model.device))
    return partial(losses or method.losses, model, batch)


def refed_losses(model: ThinkingStates, batch: LatentBatch) -> Losses:
    """As `Coconut.losses`, for one row without padding: all before a latent is read for each."""
    backbone, R = model.backbone, batch.rest.shape[1]
    net = backbone.model

    def read(x: Tensor) -> Tensor:
        frame = FoldedFrame(backbone, torch.arange(x.shape[1], device=x.device)[None])
        return net.norm(backbone.run_layers(x, range(len(net.layers)), frame))

    x, rest = net.embed_tokens(batch.ids), net.embed_tokens(batch.rest)  # [1, P or R, E]
    for _ in range(batch.latents.shape[1]):
        x = torch.cat([x, read(x)[:, -1:]], dim=1)
    out = read(torch.cat([x, rest], dim=1))[0, -R:]
    lm = cross_entropy_sum(out, backbone.lm_head.weight, batch.labels[0])
    return Losses(lm, torch.zeros_like(lm), *batch.counts)


def passes(
    sides: Sequence[Side], model: ThinkingStates, half: bool, repeats: int, pool: Any = None
) -> Iterator[Line]:
    """A line for each side: milliseconds of forward and backward pass; then the findings.

    half: under autocast. pool: of memory for CUDA graphs, where they are used. The backward pass is
    what both passes take longer than the forward pass alone.
    """
    values = [torch.zeros((), device=model.device) for _ in sides]
    calls = []
    for side, value in zip(sides, values):
        calls += functions_of(side, value, model, half)
    if pool:
        calls = [capture(call, pool).replay for call in calls]
    times = time_interleaved(calls, repeats)
    lines = [
        {
            "what": "forward and backward",
            "side": side.name,
            "steps": side.steps,
            "path": "graphs" if pool else "eager",
            "loss": float(value),
            "forward": summary(forward),
            "backward": summary([whole - part for whole, part in zip(both, forward)]),
            "both": summary(both),
        }
        for side, value, forward, both in zip(sides, values, times[::2], times[1::2])
    ]
    yield from [*lines, findings(lines)]


def functions_of(
    side: Side, value: Tensor, model: ThinkingStates, half: bool
) -> list[Callable[[], object]]:
    """The forward pass, which leaves its loss in `value` and returns it, and both passes."""

    def forward() -> Tensor:
        with torch.autocast(model.device.type, torch.bfloat16, enabled=half):
            found = loss(side.losses())
        value.copy_(found.detach())
        return found

    def both() -> None:
        forward().backward()
        model.zero_grad(set_to_none=True)

    return [forward, both]


def findings(lines: Sequence[Line]) -> Line:
    """What the figure shows, of forward and backward pass together, by the lines of one path."""
    ms = {(line["side"], line["steps"]): line["both"]["ms"] for line in lines}
    steps = sorted({n for _, n in ms} - {0})
    ten = min(steps, key=lambda n: abs(n - 10))
    thinking = [ms[THINKING, n] for n in steps]
    return {
        "what": "findings",
        "path": lines[0]["path"],
        **{side: line_through(steps, [ms[side, n] for n in steps]) for side in (COCONUT, REFED)},
        THINKING: {"slowest_over_fastest": max(thinking) / min(thinking)},
        f"{COCONUT} at {ten} steps over": {
            THINKING: ms[COCONUT, ten] / ms[THINKING, ten],
            REFED: ms[COCONUT, ten] / ms[REFED, ten],
            PLAIN: ms[COCONUT, ten] / ms[PLAIN, 0],
        },
    }


def line_through(steps: Sequence[int], ms: Sequence[float]) -> Line:
    """Least squares: time against latents."""
    slope, intercept = linear_regression(steps, ms)
    squared = correlation(steps, ms) ** 2
    return {"ms_a_latent": slope, "intercept_ms": intercept, "r_squared": squared}


def table(lines: Sequence[Line]) -> str:
    """Milliseconds as Markdown: both passes (forward + backward), a table for each path."""
    cells: dict[str, dict[tuple[int, str], str]] = {}
    for line in lines:
        if "both" in line:
            both, forward, backward = (line[part]["ms"] for part in ("both", "forward", "backward"))
            text = f"{both:.1f} ({forward:.1f} + {backward:.1f})"
            cells.setdefault(line["path"], {})[line["steps"], line["side"]] = text
    parts = []
    for path, found in cells.items():
        steps = sorted({n for n, _ in found})
        rows = [[str(n), *(found.get((n, side), "") for side in SIDES)] for n in steps]
        parts.append(markdown([f"steps, {path}", *SIDES], rows))
    return "\n\n".join(parts)


# -- a whole step, whole answers -------------------------------------------------------------------


def optimizer_steps(
    model: ThinkingStates, settings: TrainSettings, samples: int, repeats: int, graphs: bool
) -> Iterator[Line]:
    """Steps at a rate of 0 on the same made-up problems: CoT's, and those of Coconut's last stage.

    A question has 40 to 80 tokens, its chain 20 to 40, an answer 6. CoT's rows are laid out as on
    gsm, packed, and one by one, too.
    """
    rng, cot, latent = random.Random(0), [], []
    for _ in range(samples):
        question, rest = prompt_of(rng.randint(40, 80)), prompt_of(rng.randint(26, 46))
        prompt = with_latents(question, 6)
        cot.append(Row(question + rest, len(question), []))
        latent.append(Row(prompt + rest[-6:], len(prompt), []))
    plain = ThinkingStates(model.backbone, model.config, thinks=False)
    sizes = BucketedSizes if settings.device.startswith("cuda") else ExactSizes
    updates, calls, lines = [], [], []
    for name, layout, rows in (
        ("cot", "rows", cot),
        ("cot", "pack", cot),
        ("coconut", "rows", latent),
    ):
        method = make_method(name)
        batch = method.collate(rows, plain.config, layout=layout, row_tokens=256, sizes=sizes())
        update = OptimizerStep(plain, method, settings)
        if not graphs:
            update.graphs = None
        updates.append(update)
        calls.append(partial(update, [batch], 0.0))
        lines.append({
            "what": f"optimizer step, {name}",
            "layout": layout,
            "samples": samples,
            "tokens": sum(len(row.ids) - 1 for row in rows),
            "path": "graphs" if graphs else "eager",
        })
    times = time_interleaved(calls, repeats)
    for line, mine in zip(lines, times):
        yield line | summary(mine)
    *cots, coconut = times
    for line, mine in zip(lines, cots):
        what = {"what": "optimizer step, coconut over cot", "layout": line["layout"]}
        yield what | ratio(coconut, mine)
    for update in updates:
        update.release()


def answers(engine: Engine, rows: int, repeats: int) -> Iterator[Line]:
    """Coconut's rows/s on an engine: prompts of 40 to 80 tokens, 6 latents, answers of 8 tokens.

    All prompts as one batch, and the same ones one at a time.
    """
    rng, method = random.Random(0), make_method("coconut")
    prompts = [with_latents(prompt_of(rng.randint(40, 80)), 6) for _ in range(rows)]
    config = GenerationConfig(max_new_tokens=8, eos_ids=[])

    def in_batches(size: int) -> None:
        for start in range(0, rows, size):
            method.answer(engine, prompts[start : start + size], config)

    sizes = (1, rows)
    times = time_interleaved([partial(in_batches, size) for size in sizes], repeats)
    for size, mine in zip(sizes, times):
        taken = summary(mine)
        yield {
            "what": "answers, coconut",
            "batch": size,
            "rows": rows,
            "rows_per_s": rows / taken["ms"] * 1e3,
            **taken,
        }
    yield {"what": f"answers, batch of {rows} over batch of 1"} | ratio(*times)
