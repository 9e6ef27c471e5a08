"""`run.py data`: an example of a task as the model sees it, and what the supervision is like."""
import sys
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

from minits.checkpoint.download import checkpoint_of, resolve
from minits.checkpoint.tiny import tiny_tokenizer
from minits.checkpoint.tokenizer import Tokenizer
from minits.checkpoint.weights import read_about, special_ids
from minits.cli.flags import Output, add_flags, note, take
from minits.cli.sources import run_folder, trained_task
from minits.settings import setting
from minits.supervision import Example, Row, encode_example, render_marked
from minits.tasks import TASKS, Task, check_options, make_task, options_of
from minits.tasks.task import check_overlap
from minits.thinking import ThinkingConfig
from minits.training.late import is_late, late_share

WORDS = "show an example of a task with its chunks, markers and targets"
OPTIONS = ("task",)


@dataclass(frozen=True)
class DataFlags(Output):
    """What `run.py data` takes beside the task's options."""

    task: str | None = setting(
        None, "the task; default: that of --run, else parity", positional=True
    )
    model: str = setting("tiny", "whose tokenizer: tiny, a folder or a hub id")
    revision: str | None = setting(None, "branch, tag or commit of a hub id")
    run: str | None = setting(None, "run folder: the task, tokenizer and limits of its training")
    chunk_size: int | None = setting(
        None, "c: tokens a chunk; default: as in training, else 8", least=1
    )
    max_thought_tokens: int | None = setting(
        None, "longest thought, in tokens; default: as in training, else 64", least=1
    )
    ops: int | None = setting(None, "length of the example shown; default: 4", least=0)
    seed: int = setting(0, "seed of the examples")
    index: int = setting(0, "which example of the stream to show", least=0)
    samples: int = setting(500, "examples that the statistics are over", least=1)


add_arguments = partial(add_flags, config=DataFlags)


def run(given: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Shows one example as the model sees it, and statistics of the supervision."""
    flags = take(given, DataFlags)
    task, tokenizer, config = described(flags, given)
    check_overlap(task)
    split, c = task.splits[0], config.chunk_size
    size = task.size(split) or sys.maxsize
    if flags.index >= size:
        raise ValueError(f"--index {flags.index}: there are {size} examples, from 0 on.")
    example = task.sized(flags.ops).example(split, flags.index, flags.seed)
    row = encode_example(example, tokenizer, config, example.name or f"example {flags.index}")
    show(example, row, tokenizer, c)
    numbers = range(min(flags.samples, size))
    many = [task.example(split, i, flags.seed) for i in numbers]
    rows = [
        encode_example(each, tokenizer, config, each.name or f"example {i}")
        for i, each in zip(numbers, many)
    ]
    figures = statistics(rows)
    marks = [is_late(*pair, tokenizer, c) for pair in zip(many, rows)]
    figures |= {"late_share": late_share(marks)}
    late = figures["late_share"]
    print(
        f"{task.title(split)}, {figures['samples']} examples: {figures['tokens_mean']:.0f} tokens "
        f"and {figures['chunks_mean']:.1f} complete chunks a row, "
        f"{figures['nontrivial_share']:.1%} of thoughts non-trivial, the longest of "
        f"{figures['thought_tokens_max']} tokens; "
        f"{'' if late is None else f'late thoughts in {late:.1%} of rows; '}"
        f"{figures['steps_without_target']} steps without a target",
        flush=True,
    )
    figures |= {"prompt": example.prompt, "ids": row.ids, "thoughts": row.thoughts}
    files = task.sources()
    for name, source in files.items():
        note(f"{name}: " + ", ".join(f"{key} {value}" for key, value in source.items()))
    return figures | ({"data_files": files} if files else {}), 0


def described(flags: DataFlags, given: dict[str, Any]) -> tuple[Task, Tokenizer, ThinkingConfig]:
    """The task, tokenizer and limits that the flags ask for; given: the task's options."""
    if flags.run and flags.model != "tiny":
        raise ValueError("--run and --model were both given; name one of them.")
    name, usual, about, folder = flags.task or "parity", {}, {}, None
    if flags.run:
        folder = run_folder(flags.run)
    elif flags.model != "tiny":
        folder = resolve(flags.model, flags.revision)
    if folder:
        about = read_about(checkpoint_of(folder))
    if flags.run:
        trained = trained_task(folder, about, flags.task)
        name, usual = trained.name, options_of(trained)
        check_options(name, given)
    elif name in TASKS:
        usual = TASKS[name].data_options
    task = make_task(name, **(usual | given))
    if folder:
        folder = checkpoint_of(folder)
        tokenizer = Tokenizer.from_folder(folder, *special_ids(folder, sys.maxsize))
    else:
        tokenizer = tiny_tokenizer(task.texts())
    config = ThinkingConfig(
        flags.chunk_size or about.get("chunk_size", 8),
        1,
        1,
        tokenizer.eos_ids,
        tokenizer.pad_id,
        flags.max_thought_tokens or about.get("max_thought_tokens", 64),
    )
    return task, tokenizer, config


def show(example: Example, row: Row, tokenizer: Tokenizer, c: int) -> None:
    """Prints an example: markers in the text, then every chunk with its target."""
    print("marked: " + render_marked(example.prompt, example.steps))
    print("answer: " + example.answer)
    print(f"chunks of {c} tokens, | between tokens; thoughts are what T must say after the chunk:")
    for k in range(-(-len(row.ids) // c)):
        text = "|".join(tokenizer.decode([i]) for i in row.ids[k * c : (k + 1) * c])
        target = "(never complete: no thought)"
        if k < len(row.thoughts):
            target = repr(tokenizer.decode(row.thoughts[k]))
        print(f"{k:4}  {text!r} -> {target}")
    print(
        f"the prompt's {row.prompt_length} tokens end in chunk {(row.prompt_length - 1) // c}; "
        f"steps without a target: {row.without_target}"
    )


def statistics(rows: list[Row]) -> dict[str, Any]:
    """What the supervision of `rows` is like."""
    thoughts = [thought for row in rows for thought in row.thoughts]
    nontrivial = sum(len(thought) > 1 for thought in thoughts)
    return {
        "samples": len(rows),
        "tokens_mean": fmean(len(row.ids) for row in rows),
        "chunks_mean": fmean(len(row.thoughts) for row in rows),
        "nontrivial_share": nontrivial / max(len(thoughts), 1),
        "thought_tokens_max": max(map(len, thoughts), default=0),
        "steps_without_target": sum(row.without_target for row in rows),
    }
