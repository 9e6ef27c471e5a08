"""`run.py bench`: speed on real weights."""
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from minits.cli.flags import Output, Weights, add_flags, note, take
from minits.cli.sources import open_model, trained_task
from minits.lab.bench import Line, bench, bench_drafts
from minits.lab.bench_train import bench_train
from minits.lab.provenance import machine, record
from minits.settings import flag, setting
from minits.supervision import encode_prompt
from minits.training.recipe import Machine

WORDS = "measure speed beside the limits of the machine"
OPTIONS = ()
PARTS = ("all", "prefill", "decode", "drafts", "train")


@dataclass(frozen=True)
class BenchFlags(Output, Machine, Weights):
    """What `run.py bench` takes. The speed of a toy says nothing: it wants real weights."""

    part: str = setting("all", "what to measure", choices=PARTS, positional=True)
    chunk_size: int | None = setting(None, "c: tokens a chunk; default: 8", least=1)
    run: str | None = setting(None, "drafts: a trained run, whose task gives the prompts")
    repeats: int = setting(10, "timed calls; the median is reported", least=1)
    compile: bool = setting(False, "train: torch.compile the layers (cuda)")
    plain: bool = setting(False, "the plain path, without kernels and graphs (cuda)")


add_arguments = partial(add_flags, config=BenchFlags)


def run(given: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Measures speed; one line a measurement."""
    flags = take(given, BenchFlags)
    part, source = flags.part, flags.run if flags.part == "drafts" else flags.model
    if not source:
        needed = "--run FOLDER" if part == "drafts" else "--model FOLDER"
        raise ValueError(f"bench {part} needs {needed}: the weights to measure.")
    if part == "train" and (flags.plain or flags.chunk_size):
        raise ValueError(
            "bench train takes neither --plain nor --chunk-size: it measures the tasks' recipes."
        )
    idle = {"run": part != "drafts", "model": part == "drafts", "compile": part != "train"}
    for name in idle:
        if idle[name] and getattr(flags, name):
            raise ValueError(f"{flag(name)} does nothing in bench {part}; leave it out.")
    engine, tokenizer, about, folder = open_model(flags)
    device, kind = str(engine.device), engine.backbone.lm_head.weight.dtype
    how = {"dtype": str(kind).removeprefix("torch.")}
    words = engine.backbone.config.vocab_size
    if part not in ("drafts", "train") and words < 1000:
        raise ValueError(
            f"bench {part} --model {source}: its made-up texts need a vocabulary of 1000 ids, this "
            f"one has {words}. Name real weights; bench drafts --run measures a small run."
        )
    if part == "drafts" and not (about and engine.thinks):
        raise ValueError(
            f"bench drafts --run {source}: it measures prefill with a model's own thoughts, and "
            f"this one was not trained to think (method: {about.get('method')}). Name a run of the "
            "method thinking."
        )
    note(f"{source} in {how['dtype']} on {machine(device)}")
    if part == "train":
        del engine  # training loads its own
        lines = bench_train(str(folder), device, how["dtype"], flags.compile, flags.repeats)
        return told(lines, how, device)
    how["path"] = "graphs" if hasattr(engine, "graphs") else "plain"
    if part == "drafts":
        task = trained_task(folder, about)
        split = task.splits[-1]
        few = min(task.size(split) or 16, 16)
        prompts = [task.example(split, i, seed=7).prompt for i in range(few)]
        ids = [encode_prompt(tokenizer, prompt) for prompt in prompts]
        lines = bench_drafts(engine, ids, flags.repeats)
    else:
        lines = bench(engine, part, flags.repeats)
    return told(lines, how, device)


def told(
    lines: Iterable[Line], how: dict[str, Any], device: str
) -> tuple[dict[str, Any], int]:
    """Prints measurements as they come, and returns their record and the exit status.

    how: what they were made with. Ctrl-C ends the measuring: the record is that of the lines
    before.
    """
    found, status = [], 0
    try:
        for line in lines:
            found.append(line)
            print(json.dumps(rounded(line)), flush=True)
    except KeyboardInterrupt:
        note(f"interrupted: {len(found)} measurements were made, the others were not.")
        how, status = how | {"interrupted": True}, 130
    return record(how | {"lines": found}, device=device), status


def rounded(value: Any) -> Any:
    """`value` with every float to 4 significant digits, for reading."""
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value
