"""`run.py bench train`: how fast training is, beside the measured matrix rate of the machine."""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from minits.lab.bench import machine_limits, timed
from minits.training.recipe import TrainConfig, resolve_train
from minits.supervision import Row, encode_example
from minits.tasks import draw_example
from minits.training.loop import Run, set_up


def bench_train(folder: str, *, device: str, dtype: str, compile: bool, repeats: int) -> list[dict]:
    """All measurements, one dict a line. `folder`: of real weights.

    Times are of whole optimizer steps on the same samples again and again, the learning rate being 0; `first` holds the
    capture of graphs, and compilation. Nothing is written.
    """
    limits = machine_limits(torch.device(device), getattr(torch, dtype))
    lines = [{"what": "limits", "copy_TB_per_s": limits["bandwidth"] / 1e12, "matmul_TFLOP_per_s": limits["matmul"] / 1e12}]

    def start(task: str, **changes) -> Run:
        config = resolve_train(TrainConfig(task=task, model=folder, device=device, dtype=dtype, compile=compile, **changes))
        return set_up(config, Path("nowhere"))

    for task, changes in (("parity", {}), ("vars", {"max_ops": 40})):
        times = {}
        for method in ("no-cot", "thinking"):
            run = start(task, method=method, **changes)
            samples = run.stream.rows(0)
            line = step_time(run, samples, repeats, limits)
            times[method] = line["ms"]
            lines.append({"what": f"step, {method} on {task}", "c": run.config.chunk_size, "samples": len(samples)} | line)
            if task == "parity" and method == "thinking":
                samples, run = full_rows(run, 32, 256), replaced(run, layout="rows")
                lines.append({"what": "step, thinking on parity, 32 x 256 tokens"}
                             | step_time(run, samples, repeats, limits))
                run = replaced(run)
                run.update.descend = lambda losses: torch.cat([losses, losses[:1]])  # no norm, no optimizer
                lines.append({"what": "its forward and backward pass"} | step_time(run, samples, repeats, limits))
                lines.append(flatness(run, repeats))
            del run
        lines.append({"what": f"thinking over no-cot on {task}", "ratio": times["thinking"] / times["no-cot"]})
    return lines


def replaced(run: Run, **changes) -> Run:
    """The same model with other settings; graphs are made anew."""
    run.update = None  # lets go of its graphs and their memory
    return Run(replace(run.config, **changes), run.folder, run.model, run.tokenizer, run.task, run.optimizer)


def step_time(run: Run, samples: list[Row], repeats: int, limits: dict) -> dict:
    """Milliseconds of a step on `samples`, the tokens in it, the most memory it took and its `useful` share."""
    parts = run.stream.parts(samples)
    cuda = run.config.device.startswith("cuda")
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    line = timed(lambda: run.update(parts, 0.0), repeats)
    return line | {"tokens": sum(len(row.ids) - 1 for row in samples), "rows": list(parts[0].ids.shape),
                   "peak_GB": torch.cuda.max_memory_allocated() / 1e9 if cuda else None} | useful(
                       run, samples, line["ms"], limits)


def full_rows(run: Run, rows: int, tokens: int) -> list[Row]:
    """`rows` samples cut to `tokens` tokens each (and the one that is only predicted), the last ten as the answer."""
    examples = [draw_example(run.task, seed=1, split="bench", index=i, operations=(tokens // 4,) * 2) for i in range(rows)]
    encoded = [encode_example(example, run.tokenizer, run.model.config) for example in examples]
    return [replace(row, ids=row.ids[:tokens + 1], prompt_length=tokens - 9,
                    thoughts=row.thoughts[:tokens // run.config.chunk_size]) for row in encoded]


def useful(run: Run, samples: list[Row], ms: float, limits: dict) -> dict:
    """Share of the matrix rate: 6 operations for each weight of a layer and token it reads, and of an unembedding and
    position it runs on, padding not counted, over the step's whole time."""
    backbone, c = run.model.backbone, run.config.chunk_size

    def size(module: torch.nn.Module) -> int:
        return sum(p.numel() for p in module.parameters())
    operations = size(backbone.model.layers) * sum(len(row.ids) - 1 for row in samples)
    positions = sum(len(row.ids) - row.prompt_length for row in samples)
    if run.model.thinks:
        thoughts = [z for row in samples for z in row.thoughts]
        full = [z for z in thoughts if len(z) > 1]
        positions += sum(map(len, thoughts))
        operations += size(run.model.thinking_block.layer) * (c * len(thoughts) + sum(len(z) - 1 for z in full))
        operations += size(run.model.compression_block) * sum(max(c, len(z)) for z in full)
    operations += backbone.lm_head.weight.numel() * positions
    return {"unembedded": positions, "useful_TFLOP": 6 * operations / 1e12,
            "useful_share": 6 * operations / limits["matmul"] / ms * 1e3}


def flatness(run: Run, repeats: int) -> dict:
    """One row of 128 tokens in K = 2 … 32 chunks, each with a thought of 3 tokens: slowest step over fastest."""
    times, config = {}, run.model.config
    for chunks in (2, 4, 8, 16, 32):
        run.model.config = replace(config, chunk_size=128 // chunks)
        run = replaced(run, layout="rows")
        row = Row([5 + 7 * i % 900 for i in range(129)], 120, [[11, 12, 13, run.model.config.thought_end]] * chunks)
        times[chunks] = timed(lambda run=run, parts=run.stream.parts([row]): run.update(parts, 0.0), repeats)
    run.model.config = config
    medians = [line["ms"] for line in times.values()]
    return {"what": "step, one row of 128 tokens, by chunks", "times": times, "slowest_over_fastest":
            max(medians) / min(medians)}
