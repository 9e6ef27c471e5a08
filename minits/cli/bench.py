"""`run.py bench`: speed on real weights."""
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from minits.cli.flags import Output, Weights, add_flags, check_new_file, note, take
from minits.cli.sources import Opened, measured_on, open_model, trained_method, trained_task
from minits.generation import GenerationConfig
from minits.lab import bench_cost, figures
from minits.lab.bench import Line, bench, bench_drafts
from minits.lab.bench_answers import Side, bench_answers
from minits.lab.bench_train import bench_train
from minits.lab.provenance import machine, record
from minits.settings import flag, setting
from minits.supervision import encode_prompt
from minits.training.recipe import Machine
from minits.training.scoring import draw_rows, with_room

WORDS = "measure speed beside the limits of the machine"
OPTIONS = ()
PARTS = ("all", "prefill", "decode", "drafts", "answers", "train", "cost")


@dataclass(frozen=True)
class BenchFlags(Output, Machine, Weights):
    """What `run.py bench` takes. The speed of a toy says nothing: it wants real weights."""

    part: str = setting("all", "what to measure", choices=PARTS, positional=True)
    chunk_size: int | None = setting(None, "c: tokens a chunk; default: 8", least=1)
    run: str | None = setting(None, "drafts, answers: a trained run, whose task gives the prompts")
    against: str | None = setting(None, "answers: another run of that task, to compare with")
    samples: int | None = setting(None, "answers: prompts; default: 200", least=1)
    repeats: int = setting(10, "timed calls; the median is reported", least=1)
    compile: bool = setting(False, "train: torch.compile the layers (cuda)")
    plain: bool = setting(False, "the plain path, without kernels and graphs (cuda)")
    figure: str | None = setting(None, "cost: a PNG file to draw (needs matplotlib)")


add_arguments = partial(add_flags, config=BenchFlags)


def run(given: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Measures speed; one line a measurement."""
    flags = take(given, BenchFlags)
    part, of_run = flags.part, flags.part in ("drafts", "answers")
    source = flags.run if of_run else flags.model
    if not source or (part == "answers" and not flags.against):
        needed = "--model FOLDER" if not of_run else "--run FOLDER"
        needed += " --against FOLDER" if part == "answers" else ""
        raise ValueError(f"bench {part} needs {needed}: the weights to measure.")
    if part == "train" and (flags.plain or flags.chunk_size):
        raise ValueError(
            "bench train takes neither --plain nor --chunk-size: it measures the tasks' recipes."
        )
    idle = {"run": not of_run, "model": of_run, "compile": part != "train"}
    idle |= {name: part != "answers" for name in ("against", "samples")}
    idle |= {"figure": part != "cost", "chunk_size": part == "cost"}
    for name in idle:
        if idle[name] and getattr(flags, name):
            raise ValueError(f"{flag(name)} does nothing in bench {part}; leave it out.")
    if flags.figure:
        check_new_file(flags.figure, name="--figure")
        figures.pyplot()
    opened = open_model(flags)
    engine, _, about, folder = opened
    device, kind = str(engine.device), engine.backbone.lm_head.weight.dtype
    how = {"dtype": str(kind).removeprefix("torch.")}
    words = engine.backbone.config.vocab_size
    if not (of_run or part == "train") and words < 1000:
        raise ValueError(
            f"bench {part} --model {source}: its made-up texts need a vocabulary of 1000 ids, this "
            f"one has {words}. Name real weights; bench drafts --run measures a small run."
        )
    if of_run and not (about and engine.thinks):
        raise ValueError(
            f"bench {part} --run {source}: it measures reading with a model's own thoughts, and "
            f"this one was not trained to think (method: {about.get('method')}). Name a run of the "
            "method thinking."
        )
    note(f"{source} in {how['dtype']} on {machine(device)}")
    if part == "train":
        del engine  # training loads its own
        lines = bench_train(str(folder), device, how["dtype"], flags.compile, flags.repeats)
        return told(lines, how, device)
    how |= measured_on(opened) if of_run else {}
    how["path"] = "graphs" if hasattr(engine, "graphs") else "plain"
    if part == "drafts":
        lines = bench_drafts(engine, some_prompts(opened), flags.repeats)
    elif part == "answers":
        lines = answers(flags, opened)
    elif part == "cost":
        lines = bench_cost.bench_cost(folder, engine, how["dtype"], flags.plain, flags.repeats)
    else:
        lines = bench(engine, part, flags.repeats)
    found, status = told(lines, how, device)
    if part == "cost":
        show_cost(found["lines"], flags.figure)
    return found, status


def some_prompts(opened: Opened) -> list[list[int]]:
    """At most 16 prompts of a run's last split, as ids."""
    task = trained_task(opened.folder, opened.about)
    split = task.splits[-1]
    few = min(task.size(split) or 16, 16)
    prompts = [task.example(split, i, seed=7).prompt for i in range(few)]
    return [encode_prompt(opened.tokenizer, prompt) for prompt in prompts]


def show_cost(lines: list[Line], figure: str | None) -> None:
    """Prints the table of what was measured, and draws it where there is anything to draw."""
    table = bench_cost.table(lines)
    if table:
        print(table, flush=True)
    if figure and table:
        figures.cost(lines, figure)


def answers(flags: BenchFlags, thinking: Opened) -> Iterable[Line]:
    """The two runs on the same questions, those of the thinking one's last split."""
    task = trained_task(thinking.folder, thinking.about)
    split, wanted = task.splits[-1], flags.samples or 200
    sides = []
    other = open_model(replace(flags, run=flags.against))
    for run, opened in ((flags.run, thinking), (flags.against, other)):
        method = trained_method(opened.folder, opened.about)
        config = opened.engine.config
        rows = draw_rows(task, method, split, opened.tokenizer, config, seed=7, n=wanted)
        prompts = [row.ids[: row.prompt_length] for _, row in rows]
        how = with_room(opened.engine, rows, GenerationConfig())
        sides.append(Side(run, opened.engine, method, prompts, how))
    return bench_answers(*sides, flags.repeats)


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
