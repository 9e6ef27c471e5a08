"""`run.py bench`: speed on real weights."""
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from minits.checkpoint.files import parted
from minits.cli.flags import Given, Output, Weights, add_flags, check_new_file, note, take
from minits.cli.models import Opened, measured_on, open_model, run_named
from minits.generation import GenerationConfig
from minits.lab import bench_cost, figures
from minits.lab.bench import WARM_UP, Line, bench, bench_drafts
from minits.lab.bench_answers import WAYS, Side, bench_answers
from minits.lab.bench_train import bench_train
from minits.lab.provenance import Record, machine, record
from minits.settings import flag, setting
from minits.training.recipe import Machine
from minits.training.scoring import Pairs, draw_rows, prompts_of, with_room

DESCRIPTION = "measure speed beside the limits of the machine"
PARTS = ("all", "prefill", "decode", "drafts", "answers", "train", "cost")


@dataclass(frozen=True)
class BenchFlags(Output, Machine, Weights):
    """What `run.py bench` takes. The speed of a toy says nothing: it wants real weights."""

    part: str = setting("all", "what to measure", choices=PARTS, positional=True)
    chunk_size: int | None = setting(None, "c: tokens a chunk; default: 8", least=1)
    run: str | None = setting(None, "drafts, answers: a trained run, whose task gives the prompts")
    against: str | None = setting(None, "answers: other runs of that task, with commas between")
    samples: int | None = setting(None, "answers: prompts; default: 200", least=1)
    repeats: int = setting(10, "timed calls; the median is reported", least=1)
    compile: bool = setting(False, "train: torch.compile the layers (cuda)")
    plain: bool = setting(False, "the plain path, without kernels and graphs (cuda)")
    figure: str | None = setting(None, "cost: a PNG file to draw (needs matplotlib)")


add_arguments = partial(add_flags, config=BenchFlags)
OF_RUN = ("drafts", "answers")  # what is measured on a trained run
# The parts in which a flag does something, of those that do nothing in others.
USED_IN = {
    "run": OF_RUN,
    "model": set(PARTS).difference(OF_RUN),
    "compile": ("train",),
    "against": ("answers",),
    "samples": ("answers",),
    "figure": ("cost",),
    "chunk_size": set(PARTS).difference({"train", "cost"}),
    "plain": set(PARTS).difference({"train"}),
}


def check_flags(flags: BenchFlags) -> None:
    """Raises ValueError or FileNotFoundError where flags do not go with the part."""
    part = flags.part
    needed = [name for name in ("run", "model", "against") if part in USED_IN[name]]
    if not all(getattr(flags, name) for name in needed):
        words = " ".join(f"{flag(name)} FOLDER" for name in needed)
        raise ValueError(f"bench {part} needs {words}: the weights to measure.")
    for name, parts in USED_IN.items():
        if part not in parts and getattr(flags, name):
            raise ValueError(f"{flag(name)} does nothing in bench {part}; leave it out.")
    if part == "answers":
        runs_against(flags)
    if flags.figure:
        check_new_file(flags.figure, name="--figure")
        figures.pyplot()


def runs_against(flags: BenchFlags) -> list[str]:
    """The runs that --against names.

    Raises FileNotFoundError where one is not there, ValueError where one has no name, or stands
    twice, be it by another path.
    """
    runs = parted("--against", flags.against, "run")
    named = [(flags.run, "--run"), *((run, "--against") for run in runs)]
    folders = [run_named(run, given).resolve() for run, given in named]
    for run, folder in zip(runs, folders[1:]):
        if folders.count(folder) > 1:
            raise ValueError(
                f"--run {flags.run} --against {flags.against}: {run} stands there twice; every run "
                "is timed once. Take one out."
            )
    return runs


def check_weights(flags: BenchFlags, opened: Opened) -> None:
    """Raises ValueError for weights that the part cannot measure."""
    engine, about, part = opened.engine, opened.about, flags.part
    vocab_size = engine.backbone.config.vocab_size
    if part not in (*OF_RUN, "train") and vocab_size < 1000:
        raise ValueError(
            f"bench {part} --model {flags.model}: its made-up texts need a vocabulary of 1000 ids, "
            f"this one has {vocab_size}. Name real weights; bench drafts --run measures a small "
            "run."
        )
    if part in OF_RUN and not (about and engine.thinks):
        raise ValueError(
            f"bench {part} --run {flags.run}: it measures reading with a model's own thoughts, and "
            f"this one was not trained to think (method: {about.get('method')}). Name a run of the "
            "method thinking."
        )


def run(given: Given) -> tuple[Record, int]:
    """Measures speed; one line a measurement."""
    flags = take(given, BenchFlags)
    check_flags(flags)
    opened = open_model(flags)
    engine, folder = opened.engine, opened.folder
    check_weights(flags, opened)
    part, device = flags.part, str(engine.device)
    dtype = str(engine.backbone.lm_head.weight.dtype).removeprefix("torch.")
    how = {"dtype": dtype}
    note(f"{flags.run or flags.model} in {dtype} on {machine(device)}")
    if part == "train":
        del opened, engine  # training loads its own
        lines = bench_train(str(folder), device, dtype, flags.compile, flags.repeats)
        return measured(lines, how, device)
    if part in OF_RUN:
        how |= measured_on(opened)
        if opened.task.splits[-1] == "train":
            note(f"{opened.task.name} has nothing to evaluate on: its training rows are read.")
    how["path"] = "graphs" if hasattr(engine, "graphs") else "plain"
    if part == "drafts":
        prompts = prompts_of(questions(opened, 16))
        note(
            "each way takes turns with sequential reading: "
            f"{2 * len(prompts) * (WARM_UP + flags.repeats)} prompts are read for a line"
        )
        lines = bench_drafts(engine, prompts, flags.repeats)
    elif part == "answers":
        lines = answers(flags, opened)
    elif part == "cost":
        note(
            "the passes of all sides take turns: "
            f"{bench_cost.CALLS * (WARM_UP + flags.repeats)} calls before the first of their lines"
        )
        lines = bench_cost.bench_cost(folder, engine, dtype, flags.plain, flags.repeats)
    else:
        lines = bench(engine, part, flags.repeats)
    found, status = measured(lines, how, device)
    if part == "cost" and (table := bench_cost.table(found["lines"])):
        print(table)
        if flags.figure:
            figures.cost(found["lines"], Path(flags.figure))
    return found, status


def questions(opened: Opened, n: int) -> Pairs:
    """At most n rows of the task's last split, as the method of the weights encodes them."""
    task, config = opened.task, opened.engine.config
    return draw_rows(task, opened.method, task.splits[-1], opened.tokenizer, config, seed=7, n=n)


def answers(flags: BenchFlags, thinking: Opened) -> Iterable[Line]:
    """All runs on the same questions: those of the thinking one's task."""
    opened = {run: beside(thinking, run, flags) for run in runs_against(flags)}
    sides = []
    for run, each in (opened | {flags.run: thinking}).items():
        rows = questions(each, flags.samples or 200)
        config = with_room(each.engine, rows, GenerationConfig())
        sides.append(Side(run, each.engine, each.method, prompts_of(rows), config))
    *others, own = sides
    ways = len(others) + len(WAYS)
    note(
        "all ways take turns at every prompt: "
        f"{len(own.prompts) * ways * (WARM_UP + flags.repeats)} answers before the first line"
    )
    return bench_answers(own, others, flags.repeats)


def beside(thinking: Opened, run: str, flags: BenchFlags) -> Opened:
    """A run to compare with the thinking one, on its task.

    Raises ValueError where the two were not trained on questions in common.
    """
    other, task = open_model(replace(flags, run=run), "--against"), thinking.task
    trained_on = other.about.get("task", task.name)  # a plain Qwen2.5 names none
    if trained_on != task.name:
        raise ValueError(
            f"--against {run} was trained on {trained_on}, --run {flags.run} on {task.name}: they "
            f"have no questions in common. Name another run of {task.name}."
        )
    theirs, ours = other.about.get("suffix"), thinking.about.get("suffix")
    if "task" in other.about and theirs != ours:
        raise ValueError(
            f"--against {run} was trained behind {theirs!r}, --run {flags.run} behind {ours!r} "
            "(--suffix). Name another run behind the same text."
        )
    return other._replace(task=task)


def measured(lines: Iterable[Line], how: Record, device: str) -> tuple[Record, int]:
    """Prints measurements as they come, and returns their record and the exit status.

    how: what they were made with. Ctrl-C ends the measuring: the record is that of what was whole
    before.
    """
    found, status = [], 0
    try:
        for line in lines:
            found.append(line)
            print(json.dumps(rounded(line)))
    except KeyboardInterrupt:
        note(f"interrupted: {len(found)} measurements were made, the others were not.")
        how, status = how | {"interrupted": True}, 130
    return record(how | {"lines": found}, device=device), status


def rounded(value: Any) -> Any:
    """`value` with every float to 4 significant digits, for reading."""
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value
