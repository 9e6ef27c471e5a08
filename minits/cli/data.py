"""`run.py data`: an example of a task as the model sees it, and what the supervision is like."""
import sys
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

from minits.checkpoint.download import checkpoint_of, resolve
from minits.checkpoint.tiny import tiny_tokenizer
from minits.checkpoint.tokenizer import Tokenizer
from minits.checkpoint.weights import special_ids
from minits.cli.flags import Output, add_flags, take
from minits.settings import setting
from minits.supervision import Example, Row, encode_example, render_marked
from minits.tasks import TASKS, make_task
from minits.thinking import ThinkingConfig
from minits.training.late import is_late, late_share

WORDS = "show an example of a task with its chunks, markers and targets"
OPTIONS = ("task",)


@dataclass(frozen=True)
class DataFlags(Output):
    """What `run.py data` takes beside the task's options."""

    task: str = setting("parity", "the task", positional=True)
    model: str = setting("tiny", "whose tokenizer: tiny, a folder or a hub id")
    revision: str | None = setting(None, "branch, tag or commit of a hub id")
    chunk_size: int = setting(8, "c: tokens a chunk", least=1)
    ops: int | None = setting(None, "length of the example shown; default: 4", least=0, most=10**5)
    seed: int = setting(0, "seed of the examples")
    index: int = setting(0, "which example of the stream to show", least=0)
    samples: int = setting(500, "examples that the statistics are over", least=1)


add_arguments = partial(add_flags, config=DataFlags)


def run(given: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Shows one example as the model sees it, and statistics of the supervision."""
    flags = take(given, DataFlags)
    usual = TASKS[flags.task].data_options if flags.task in TASKS else {}
    task = make_task(flags.task, **(usual | given))
    if flags.model == "tiny":
        tokenizer = tiny_tokenizer()
    else:
        folder = checkpoint_of(resolve(flags.model, flags.revision))
        tokenizer = Tokenizer.from_folder(folder, *special_ids(folder, sys.maxsize))
    config = ThinkingConfig(flags.chunk_size, 1, 1, tokenizer.eos_ids, tokenizer.pad_id)
    split = task.splits[0]
    example = task.sized(flags.ops).example(split, flags.index, flags.seed)
    row = encode_example(example, tokenizer, config)
    show(example, row, tokenizer, flags.chunk_size)
    size = task.size(split) or flags.samples
    many = [task.example(split, i, flags.seed) for i in range(min(flags.samples, size))]
    rows = [encode_example(each, tokenizer, config) for each in many]
    figures = statistics(rows)
    marks = [is_late(*pair, tokenizer, flags.chunk_size) for pair in zip(many, rows)]
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
    return figures | {"prompt": example.prompt, "ids": row.ids, "thoughts": row.thoughts}, 0


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
