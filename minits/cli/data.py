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
from minits.cli.sources import trained_task
from minits.settings import setting
from minits.supervision import Example, Row, encode_example, render_marked
from minits.tasks import TASKS, Task, make_task, options_of
from minits.tasks.task import check_overlap, describe_sources
from minits.thinking import ThinkingConfig
from minits.training.late import is_late, late_share

WORDS = "show an example of a task with its chunks, markers and targets"
OPTIONS = ("task",)


@dataclass(frozen=True)
class DataFlags(Output):
    """What `run.py data` takes beside the task's options."""

    task: str | None = setting(
        None, "the task; default: that of --model, else parity", positional=True
    )
    model: str = setting(
        "tiny", "whose tokenizer and limits: tiny, a folder (of a run, too) or a hub id"
    )
    revision: str | None = setting(None, "branch, tag or commit of a hub id")
    chunk_size: int | None = setting(
        None, "c: tokens a chunk; default: as in training, else 8", least=1
    )
    max_thought_tokens: int | None = setting(
        None, "longest thought, in tokens; default: as in training, else 64", least=1
    )
    ops: int | None = setting(None, "length of the example shown; default: 4", least=0, most=10**5)
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
    for line in describe_sources(task):
        note(line)
    return figures | ({"data_files": files} if files else {}), 0


def described(flags: DataFlags, given: dict[str, Any]) -> tuple[Task, Tokenizer, ThinkingConfig]:
    """Task, tokenizer and limits: of the training that --model names, where no flag says otherwise.

    given: options of the task.
    """
    name = "parity" if flags.task is None else flags.task
    usual, about, folder = {}, {}, None
    if flags.model != "tiny":
        source = resolve(flags.model, flags.revision)
        folder = checkpoint_of(source)
        about = read_about(folder)
    if about:
        trained = trained_task(source, about, flags.task)
        name, usual = trained.name, options_of(trained)
    elif name in TASKS:
        usual = TASKS[name].data_options
    task = make_task(name, **(usual | given))
    if folder:
        tokenizer = Tokenizer.from_folder(folder, *special_ids(folder, sys.maxsize))
    else:
        tokenizer = tiny_tokenizer(task.texts())
    c = flags.chunk_size or about.get("chunk_size", 8)
    limit = flags.max_thought_tokens or about.get("max_thought_tokens", 64)
    return task, tokenizer, ThinkingConfig(c, 1, 1, tokenizer.eos_ids, tokenizer.pad_id, limit)


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
