"""`run.py eval`: free-running accuracy of a trained run on fresh examples."""
import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from minits.cli.flags import Given, Output, add_flags, add_options, check_new_file, note, take
from minits.cli.models import Opened, describe_model, measured_on, open_model, say_limit
from minits.cli.page import MOST_ROWS, head, write_page
from minits.cli.show import Card
from minits.generation import PREFILLS, GenerationConfig, GenerationResult, with_texts
from minits.lab.interventions import STATES
from minits.lab.provenance import Record, record
from minits.methods import Method
from minits.settings import check_settings, flag, setting
from minits.tasks import TASKS, Task, check_options
from minits.tasks.rows import Rows, question_first
from minits.tasks.task import check_overlap
from minits.training.recipe import Machine
from minits.training.run_folder import data_files
from minits.training.scoring import (
    HookMaker,
    Pairs,
    describe,
    draw_rows,
    predict,
    summarise,
    with_room,
)

DESCRIPTION = "evaluate a trained run on a task"
# Fields of GenerationConfig without a flag here: `EvalFlags` has its own, or nobody chooses them.
OWN = ("prefill", "max_new_tokens", "lookahead")
# Options as in training: the record names those that are otherwise.
AS_TRAINED = {"states": "normal", "prompt_thoughts": False, "ask": "question"}
# Flags that do nothing without thoughts.
OF_THOUGHTS = ("prompt_thoughts", "max_thought_tokens", "draft")


@dataclass(frozen=True)
class EvalFlags(Output, Machine):
    """What `run.py eval` takes beside the task's options."""

    task: str | None = setting(None, "the task; default: as in training", positional=True)
    run: str | None = setting(None, "run or model folder; default: the newest, else what ships")
    samples: int = setting(500, "number of examples", least=1)
    seed: int = setting(0, "seed of the examples")
    batch_size: int = setting(64, "rows a batch; the answers do not depend on it", least=1)
    # As in training: in state tracking nearly every chunk thinks, so there is little to guess.
    prefill: str = setting("sequential", "how prompts are read: the same answers", choices=PREFILLS)
    states: str = setting(
        "normal",
        "what is read in place of states, or of Coconut's latents: themselves, zero, those of "
        "another row of the batch (shuffled), or those of the gold thoughts",
        choices=tuple(STATES),
    )
    prompt_thoughts: bool = setting(
        False, "no thought after the one of the prompt's last whole chunk: none in the answer"
    )
    question_first: bool = setting(
        False, "a second time with each question's last sentence copied before it: a probe"
    )
    plain: bool = setting(False, "the plain path, without kernels and graphs (cuda)")
    out: str | None = setting(None, "file for the predictions, as JSON lines")
    html: str | None = setting(
        None, "file for a page of thoughts: wrong and right rows in turn, with their golds"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All flags of the command."""
    add_flags(parser, EvalFlags)
    add_flags(parser, GenerationConfig, omit=OWN)
    add_options(parser, TASKS, "task")


def hook_maker(flags: EvalFlags, method: Method) -> HookMaker:
    """What --states asks for. Raises ValueError where it cannot be."""
    gold = flags.states == "gold"
    if flags.states != "normal" and not (method.thinks if gold else method.has_states):
        what = "thoughts" if gold else "states"
        raise ValueError(f"--states {flags.states}: {method.name} has no {what}; leave it out.")
    if flags.states == "shuffled" and flags.prefill != "sequential":
        raise ValueError("--states shuffled needs --prefill sequential: drafts are no thoughts.")
    if gold and flags.question_first:
        raise ValueError(
            "--states gold: nobody knows where the steps of a row stand that has its question "
            "first; leave --question-first out."
        )
    return STATES[flags.states]


def check_states(flags: EvalFlags, rows: Pairs, limit: int) -> None:
    """Raises ValueError where a row would have no other to read, or a gold thought be cut."""
    n, size = len(rows), flags.batch_size
    if flags.states == "shuffled" and 1 in (size, n % size):
        raise ValueError(
            f"--states shuffled: of {n} samples in batches of {size} a row is alone in its batch, "
            "so there are no states of another row. Choose other --samples, or --batch-size."
        )
    longest = max((len(ids) - 1 for _, row in rows for ids in row.thoughts), default=0)
    if flags.states == "gold" and longest > limit:
        raise ValueError(
            f"--states gold: gold thoughts have up to {longest} tokens, and --max-thought-tokens "
            f"{limit} would cut them. Raise it, or leave it out."
        )


def wrong_and_right(lines: Sequence[Record]) -> list[list[int]]:
    """The numbers of the rows that are wrong, and of those that are right."""
    return [
        [line["index"] for line in lines if line["correct"] is correct]
        for correct in (False, True)
    ]


class Pass(NamedTuple):
    """One evaluation of all rows."""

    title: str  # what stands before a row's name
    rows: Pairs
    lines: list[Record]
    results: list[GenerationResult]

    def card(self, i: int, opened: Opened, config: GenerationConfig) -> Card:
        """Row i on a page."""
        example, row = self.rows[i]
        return Card(
            title=self.title + (example.name or f"row {i}"),
            prompt=row.ids[: row.prompt_length],
            result=with_texts(self.results[i], opened.tokenizer),
            tokenizer=opened.tokenizer,
            chunk_size=opened.engine.config.chunk_size,
            config=config,
            right=self.lines[i]["correct"],
            expected=example.answer,
            golds=row.thoughts if example.steps else (),
        )


def cards_of(passes: Sequence[Pass], opened: Opened, config: GenerationConfig) -> list[list[Card]]:
    """Of the rows that a page shows, a card of each pass: a wrong row and a right one in turn."""
    pairs = zip_longest(*wrong_and_right(passes[0].lines))  # as long as there are both
    shown = [i for pair in pairs for i in pair if i is not None][:MOST_ROWS]
    return [[each.card(i, opened, config) for each in passes] for i in shown]


def became(lines: Sequence[Record], second: Sequence[Record]) -> Record:
    """How the rows of a first evaluation fared in a second one."""
    wrong, right = ([second[i]["correct"] for i in rows] for rows in wrong_and_right(lines))
    return {
        "accuracy": fmean(wrong + right),
        "rows_wrong_before": len(wrong),
        "of_them_right": fmean(wrong) if wrong else None,
        "of_the_others_right": fmean(right) if right else None,
    }


def describe_probe(probe: Record) -> str:
    """The figures of the probe in words."""
    lines = [f"question first: accuracy {probe['accuracy']:.2%}"]
    if probe["of_them_right"] is not None:
        wrong = f"of {probe['rows_wrong_before']} rows that were wrong"
        lines.append(f"  {wrong} {probe['of_them_right']:.2%} become right")
    if probe["of_the_others_right"] is not None:
        lines.append(f"  of the others {probe['of_the_others_right']:.2%} stay right")
    return "\n".join(lines)


def changed(flags: EvalFlags, task: Task) -> Record:
    """What the record says of an evaluation that is not as the run was trained."""
    now = vars(flags) | vars(task)
    return {name: now[name] for name, usual in AS_TRAINED.items() if now.get(name, usual) != usual}


def evaluated(flags: EvalFlags, given: Given, opened: Opened) -> tuple[Task, str]:
    """(task, split) to evaluate. Raises ValueError for options that do not fit it."""
    check_options(opened.task.name, given)
    task, split = opened.task.evaluated(given)
    check_settings(task, flag).check()
    check_overlap(task)
    if flags.question_first and not isinstance(task, Rows):
        raise ValueError(f"--question-first: {task.name} has no questions; leave it out.")
    return task, split


def run(given: Given) -> tuple[Record, int]:
    """Free-running accuracy of a run on fresh examples."""
    asked = dict(given)
    flags = take(given, EvalFlags)
    given["prefill"] = flags.prefill  # here the default is another one
    config = take(given, GenerationConfig)
    if flags.task is not None:
        check_options(flags.task, given)
    check_new_file(flags.out)
    check_new_file(flags.html, name="--html")
    if flags.html and flags.out and Path(flags.html).resolve() == Path(flags.out).resolve():
        raise ValueError(f"--out and --html are both {flags.out}; name two files.")
    opened = engine, tokenizer, about, folder, _, method = open_model(flags)
    task, split = evaluated(flags, given, opened)
    idle = [name for name in OF_THOUGHTS if name in asked]
    if idle and not method.thinks:
        raise ValueError(f"{flag(idle[0])}: {method.name} does not think; leave it out.")
    config = replace(config, think_while_decoding=not flags.prompt_thoughts)
    seed, make_hook = flags.seed, hook_maker(flags, method)
    rows = draw_rows(task, method, split, tokenizer, engine.config, seed=seed, n=flags.samples)
    if flags.prompt_thoughts:  # a thought that was not asked for is not wrong
        for _, row in rows:
            del row.thoughts[row.prompt_length // engine.config.chunk_size :]
    config = with_room(engine, rows, config)
    check_states(flags, rows, config.max_thought_tokens or engine.config.max_thought_tokens)
    note(f"model {folder}: {describe_model(about)}")
    say_limit(about, config.max_thought_tokens)
    if about.get("task") not in (None, task.name):
        note(f"it was trained on {about['task']}; evaluating it on {task.name} all the same.")

    def evaluate(title: str, rows: Pairs, predictions: Path | None = None) -> Pass:
        found = predict(
            engine, tokenizer, task, method, rows, config,
            batch_size=flags.batch_size, predictions=predictions, make_hook=make_hook,
        )
        return Pass(title, rows, *found)

    passes = [evaluate("", rows, flags.out and Path(flags.out))]
    report = summarise(passes[0].lines, task)
    words = describe(report, task.unit)
    print(words)
    figures = measured_on(opened) | report | data_files(task) | changed(flags, task)
    if flags.question_first:
        moved = [question_first(example, task.suffix) for example, _ in rows]
        again = [(one, method.encode(one, tokenizer, engine.config)) for one in moved]
        passes.append(evaluate("question first: ", again))
        probe = became(*(each.lines for each in passes))
        print(describe_probe(probe))
        figures["question_first"] = probe
    if flags.html:
        top = head(opened, flags, asked, f"{seed} (of the examples)")
        top["result"] = words.splitlines()[0]
        write_page(flags.html, top, cards_of(passes, opened, config), len(rows))
    return record(figures, device=str(engine.device), seed=seed), 0
