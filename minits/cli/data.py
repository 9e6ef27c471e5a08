"""`run.py data`: an example of a task as the model sees it, and what the supervision is like."""
import argparse
import json
import sys
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean

from minits.checkpoint.download import checkpoint_of, local_folder
from minits.checkpoint.files import write_text
from minits.checkpoint.tiny import tiny_tokenizer
from minits.checkpoint.tokenizer import Tokenizer
from minits.checkpoint.weights import read_about, special_ids
from minits.cli.flags import (
    Given,
    Output,
    Weights,
    add_flags,
    add_options,
    check_idle,
    check_new_file,
    note,
    take,
)
from minits.cli.models import open_model, trained_method, trained_task
from minits.lab.provenance import Record
from minits.methods.thinking import Thinking
from minits.settings import setting
from minits.supervision import Example, Row, render_marked
from minits.tasks import TASKS, Task, make_task
from minits.tasks.align.problems import Problem
from minits.tasks.align.teacher import align_with_teacher
from minits.tasks.gsm import Gsm
from minits.tasks.knowledge import ask_model, replies_of
from minits.tasks.rows import FILES, row_line
from minits.tasks.task import check_overlap, describe_sources
from minits.tasks.two_hop import TwoHop
from minits.thinking import ThinkingConfig
from minits.training.late import is_late, late_share
from minits.training.recipe import Machine, pop_fields, recipe_of
from minits.training.run_folder import data_files
from minits.training.scoring import draw_rows, sharing

DESCRIPTION = "show an example of a task with its chunks, markers and targets"


@dataclass(frozen=True)
class DataFlags(Weights, Output, Machine):
    """What `run.py data` takes beside the task's options."""

    task: str | None = setting(
        None, "the task; default: that of --model, else parity", positional=True
    )
    model: str = setting(
        "tiny", "whose tokenizer and limits: tiny, a folder (of a run, too) or a hub id"
    )
    chunk_size: int | None = setting(
        None, "c: tokens a chunk; default: as in training, else by recipe", least=1
    )
    max_thought_tokens: int | None = setting(
        None, "longest thought, in tokens; default: as in training, else 64", least=1
    )
    ops: int | None = setting(None, "length of the example shown; default: 4", least=0, most=10**5)
    seed: int = setting(0, "seed of the examples")
    split: str | None = setting(None, "which examples; default: those that are trained on")
    index: int = setting(0, "which example of the split to show", least=0)
    samples: int = setting(500, "examples that the statistics are over", least=1)
    out: str | None = setting(
        None, "new file for the whole split, as JSON lines that the task rows reads"
    )
    teacher_url: str | None = setting(
        None,
        "OpenAI-compatible endpoint, such as http://localhost:8000/v1, whose model places the "
        "steps (gsm); --out takes those that it copied exactly, OUT.replies.jsonl all replies, and "
        "the same call goes on after an interruption. MINITS_TEACHER_KEY in the environment is "
        "the key, if it needs one",
    )
    teacher_model: str | None = setting(None, "the name that the endpoint knows its model by")
    teacher_threads: int = setting(8, "problems that the endpoint gets at a time", least=1)
    ask_model: bool = setting(
        False,
        "two-hop: ask --model both facts of every row, and write to --out which rows it knows and "
        "does not guess, for --known",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All flags of the command."""
    add_flags(parser, DataFlags)
    # T's warm-up has other targets for some time, but none that would be shown here.
    options = parser.add_argument_group("options of the method thinking")
    add_flags(options, Thinking, omit=("thought_warmup",))
    add_options(parser, TASKS, "task")


def run(given: Given) -> tuple[Record, int]:
    """Shows one example as the model sees it, and statistics of the supervision."""
    flags = take(given, DataFlags)
    check_out(flags)
    task, method, tokenizer, config = described(flags, given)
    check_overlap(task)
    if flags.ask_model:
        return knowledge(task, flags), 0
    split, c = flags.split or task.splits[0], config.chunk_size
    if split not in task.splits:
        raise ValueError(f"--split {split}: {task.name} has {', '.join(task.splits)}.")
    counts = {}
    if flags.teacher_url:
        task, counts = placed_by_teacher(task, split, flags)
    size = task.size(split) or sys.maxsize
    if flags.index >= size:
        raise ValueError(f"--index {flags.index}: there are {size} examples, from 0 on.")
    if flags.out and not counts:
        write_rows(task, split, flags)
    example = task.sized(flags.ops).example(split, flags.index, flags.seed)
    row = method.encode(example, tokenizer, config, example.name or f"example {flags.index}")
    show(example, row, tokenizer, c)
    pairs = draw_rows(task, method, split, tokenizer, config, seed=flags.seed, n=flags.samples)
    marks = [is_late(*pair, tokenizer, c) for pair in pairs]
    figures = statistics([each for _, each in pairs]) | {"late_share": late_share(marks)}
    print(f"{task.title(split)}, {in_words(figures)}")
    coverage = task.coverage(split, len(pairs))
    if coverage:
        shares = (f"{name.replace('_', ' ')} {share:.1%}" for name, share in coverage.items())
        print(", ".join(shares))
    for line in describe_sources(task):
        note(line)
    figures["coverage"] = coverage
    if counts:
        figures["teacher"] = counts
    figures |= {"prompt": example.prompt, "ids": row.ids, "thoughts": row.thoughts}
    return figures | data_files(task), 0


def in_words(figures: Record) -> str:
    """The statistics of the supervision."""
    late, shared = figures["late_share"], figures["sharing"]
    return (
        f"{figures['samples']} examples: {figures['tokens_mean']:.0f} tokens "
        f"and {figures['chunks_mean']:.1f} complete chunks a row, "
        f"{figures['nontrivial_share']:.1%} of thoughts non-trivial, the longest of "
        f"{figures['thought_tokens_max']} tokens; "
        f"{'' if shared is None else f'{shared:.1%} of steps share a chunk with another; '}"
        f"{'' if late is None else f'late thoughts in {late:.1%} of rows; '}"
        f"{figures['steps_without_target']} steps without a target"
    )


def knowledge(task: Task, flags: DataFlags) -> Record:
    """Writes to --out what --model knows of all files. Raises ValueError for another task."""
    if not isinstance(task, TwoHop):
        raise ValueError(f"--ask-model: {task.name} has no two hops to ask; leave it out.")
    task = replace(task, knowledge="rows", facts=None, known=None, valid_share=0.0, ask="question")
    rows = {split: task.loaded(split).examples for split in task.splits if task.size(split)}
    opened = open_model(flags)
    found = {"model": str(opened.folder), "revision": flags.revision, "data": task.sources()}
    found |= ask_model(rows, partial(replies_of, opened.engine, opened.tokenizer))
    write_text(Path(flags.out), json.dumps(found, indent=1) + "\n")
    for split, shares in found["shares"].items():
        print(f"{split}: " + ", ".join(f"{k} {v:.4g}" for k, v in shares.items()))
    return found


def check_out(flags: DataFlags) -> None:
    """Raises as `check_new_file`, and ValueError if --out is missing."""
    if flags.ask_model and (flags.model == "tiny" or not flags.out):
        raise ValueError("--ask-model needs --model (a folder or hub id) and --out FILE beside it.")
    if flags.teacher_url and not (flags.teacher_model and flags.out):
        raise ValueError("--teacher-url needs --teacher-model NAME and --out FILE beside it.")
    # What a teacher wrote may grow; align_with_teacher looks whether it did.
    check_new_file(flags.out, grows=bool(flags.teacher_url))


def write_rows(task: Task, split: str, flags: DataFlags) -> None:
    """Writes a split to --out, questions without suffix and answers without opening.

    Raises ValueError for a split without an end, or examples that a row cannot say.
    """
    size, opening = task.size(split), task.opening.strip()
    if size is None:
        raise ValueError(f"--out: the examples of {task.name} have no end; leave it out.")
    lines = []
    for example in (task.example(split, i, flags.seed) for i in range(size)):
        if not example.taught:
            raise ValueError(
                "--out: no row can say --fact-thoughts untaught, be it asked for or how --model "
                "was trained; name another value."
            )
        question = example.prompt.removesuffix(task.asked(""))
        answer = example.answer.removeprefix(f"{opening} " if opening else "")
        lines.append(row_line(question, example.steps, answer))
    write_text(Path(flags.out), "".join(lines))
    note(f"{len(lines)} rows of {task.title(split)}: {flags.out}")


def placed_by_teacher(task: Task, split: str, flags: DataFlags) -> tuple[Task, dict[str, int]]:
    """(the task with a split's steps placed by a teacher, how many problems went which way).

    Raises ValueError if the task has no problems, or if none was accepted; else as
    `align_with_teacher`.
    """
    problems = task.loaded(split).examples if isinstance(task, Gsm) else [None]
    if not isinstance(problems[0], Problem):
        raise ValueError(
            f"--teacher-url: the steps of {task.name} have their places; a teacher gives them to "
            "those of gsm, without --align given."
        )
    counts = align_with_teacher(
        problems,
        flags.out,
        url=flags.teacher_url,
        model=flags.teacher_model,
        threads=flags.teacher_threads,
    )
    ways = ", ".join(f"{number} {reason}" for reason, number in counts.most_common())
    print(f"{flags.teacher_model}, {len(problems)} problems: {ways}")
    if not counts["accepted"]:
        raise ValueError(f"no reply was accepted; {flags.out}.replies.jsonl holds the reasons.")
    files = dict.fromkeys(FILES) | {split: flags.out}
    return replace(task, align="given", **files), dict(counts)


def described(
    flags: DataFlags, given: Given
) -> tuple[Task, Thinking, Tokenizer, ThinkingConfig]:
    """What the supervision depends on: that of --model's training, unless flags say otherwise.

    given: options of task and method.
    """
    name = "parity" if flags.task is None else flags.task
    usual, about, folder, method = {}, {}, None, Thinking()
    options = pop_fields(given, Thinking)
    if flags.model != "tiny":
        source = local_folder(flags.model, flags.revision)
        folder = checkpoint_of(source)
        about = read_about(folder)
    if about:
        trained = trained_task(source, about, flags.task)
        name, usual = trained.name, asdict(trained)
        of_run = trained_method(source, about)
        method = of_run if isinstance(of_run, Thinking) else method
    task = check_idle(make_task(name, **(usual | given)), given)
    if folder:
        tokenizer = Tokenizer.from_folder(folder, *special_ids(folder, sys.maxsize))
    else:
        tokenizer = tiny_tokenizer(task.texts())
    recipe = recipe_of(task, method.name, str(folder or "tiny"))
    c = flags.chunk_size or about.get("chunk_size") or recipe.get("chunk_size", 8)
    config = ThinkingConfig(c, 1, 1, tokenizer.eos_ids, tokenizer.pad_id)
    if limit := flags.max_thought_tokens or about.get("max_thought_tokens"):
        config = replace(config, max_thought_tokens=limit)
    return task, replace(method, **options), tokenizer, config


def show(example: Example, row: Row, tokenizer: Tokenizer, c: int) -> None:
    """Prints an example: markers in the text, then every chunk with its target."""
    print("marked: " + render_marked(example.prompt, example.steps))
    print("answer: " + example.answer)
    print(f"chunks of {c} tokens, | between tokens; thoughts are what T must say after the chunk:")
    pieces = tokenizer.pieces(row.ids)
    for k in range(-(-len(pieces) // c)):
        text = "|".join(pieces[k * c : (k + 1) * c])
        target = "(never complete: no thought)"
        if k < len(row.thoughts):
            target = repr(tokenizer.decode(row.thoughts[k]))
        print(f"{k:4}  {text!r} -> {target}")
    print(
        f"the prompt's {row.prompt_length} tokens end in chunk {(row.prompt_length - 1) // c}; "
        f"steps without a target: {row.without_target}"
    )


def statistics(rows: list[Row]) -> Record:
    """What the supervision of `rows` is like."""
    thoughts = [thought for row in rows for thought in row.thoughts]
    steps = sum(len(row.ends) for row in rows)
    nontrivial = sum(len(thought) > 1 for thought in thoughts)
    return {
        "samples": len(rows),
        "tokens_mean": fmean(len(row.ids) for row in rows),
        "chunks_mean": fmean(len(row.thoughts) for row in rows),
        "nontrivial_share": nontrivial / max(len(thoughts), 1),
        "thought_tokens_max": max(map(len, thoughts), default=0),
        "sharing": sum(map(sharing, rows)) / steps if steps else None,
        "steps_without_target": sum(row.without_target for row in rows),
    }
