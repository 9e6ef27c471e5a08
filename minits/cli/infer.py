"""`run.py infer`: answers prompts and shows every thought where it arose."""
import argparse
import json
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from minits.checkpoint.files import printable
from minits.checkpoint.weights import CHOICES
from minits.cli.flags import Given, Weights, add_flags, check_new_file, note, take
from minits.cli.models import Opened, describe_model, open_model, say_limit
from minits.cli.page import MOST_ROWS, head, write_page
from minits.cli.prompts import Prompt, Way, read_prompts, ways_of
from minits.cli.show import Card, InlineText, chunk_table, counters
from minits.generation import GenerationConfig, GenerationResult, decode, results, with_texts
from minits.lab.provenance import Record
from minits.settings import flag, setting
from minits.supervision import MARKER, Example
from minits.training.recipe import Machine

DESCRIPTION = "answer prompts and show every thought where it arose"


@dataclass(frozen=True)
class InferFlags(Machine, Weights):
    """What `run.py infer` takes beside the settings of generation."""

    json: bool = setting(False, "print JSON lines, one an answer, and nothing else")
    prompt: str | None = setting(None, "text; default: a built-in example", positional=True)
    file: str | None = setting(None, "UTF-8 text, one prompt a line; - for standard input")
    batch_size: int | None = setting(
        None,
        "prompts of --file answered together; the answers do not depend on it; default: 16",
        least=1,
    )
    stop: list | None = setting(
        None, "a text that ends an answer, which is cut before it; may be given several times"
    )
    run: str | None = setting(None, "run folder; default: the newest in runs/, else what ships")
    chunk_size: int | None = setting(None, "c, where T and C are untrained; default: 8", least=1)
    inject_after: int | None = setting(None, "L_in there; default: 1", least=0)
    extract_after: int | None = setting(None, "L_out there; default: all but the last", least=0)
    think: str = setting(
        "auto", "whether to think; auto: where T and C are trained", choices=("auto", "on", "off")
    )
    stream: bool = setting(False, "print answer and thoughts as they come")
    plain: bool = setting(False, "the plain path, without kernels and graphs (cuda)")
    table: bool = setting(False, "show each chunk with its thought and the norm of its state")
    thought: list | None = setting(
        None,
        "K=TEXT: answer a second time, T being made to think TEXT (nothing, if empty) after chunk "
        "K, counted as in --table; may be given several times",
    )
    question_first: bool = setting(
        False, "answer a second time with the prompt's last sentence copied before it"
    )
    html: str | None = setting(None, "file for a page of thoughts, in all ways of answering")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All flags of the command."""
    add_flags(parser, InferFlags)
    add_flags(parser, GenerationConfig)
    parser.add_argument("--window", type=int, help=argparse.SUPPRESS)  # of older versions


# Flags that do nothing without thoughts.
OF_THOUGHTS = ("thought", "table", "draft", "lookahead", *CHOICES)
# What --json prints of a result.
JSON_KEYS = "text thoughts rounds nontrivial stop_reason cut_thoughts chunk_passes accepted".split()


class Answer(NamedTuple):
    """What came of a prompt."""

    result: GenerationResult
    inline: InlineText
    seconds: float  # that its batch took
    batch: int  # prompts in it


def run(given: Given) -> tuple[Record, int]:
    """Answers prompts and shows the thoughts."""
    if "window" in given:
        if "lookahead" in given:
            raise ValueError("--window is the old name of --lookahead; give one of them.")
        note("--window is called --lookahead now; this name will go.")
        given["lookahead"] = given.pop("window")
    asked = dict(given)
    flags, config = take(given, InferFlags), take(given, GenerationConfig)
    if flags.run and flags.model:
        raise ValueError("--run and --model were both given; name one of them.")
    check_new_file(flags.html, name="--html")
    prompts, example = read_prompts(flags), None
    opened = open_model(flags)
    about, task = opened.about, opened.task
    config = replace(config, think=whether_to_think(flags, opened, asked))
    if prompts is None:
        example = task.demo()
        prompts = texts = [Prompt(None, example.prompt)]
    else:
        texts = [prompt._replace(prompt=task.asked(prompt.prompt)) for prompt in prompts]
    ways = ways_of(flags, texts, opened, config)
    quiet = "" if config.think else "; plain decoding, no thoughts"
    note(f"model {flags.model or opened.folder}: {describe_model(about)}{quiet}")
    say_limit(about, config.max_thought_tokens if config.think else None)
    if config.think and not about:
        note("T and C are untrained copies of layers: their thoughts mean nothing yet.")
    if texts != prompts:
        note(f"put after every prompt, as in training: {task.suffix!r}")
    if any(MARKER in prompt.prompt for prompt in prompts):
        note(f"{MARKER} is read as it stands: it marks steps in files of rows alone.")
    if example is not None:
        note("no prompt given: a built-in example")
    cards = answer_all(opened, prompts, ways, flags, example)
    if flags.html:
        top = head(opened, flags, asked, "none: decoding is greedy")
        write_page(flags.html, top, cards, len(prompts))
    return {}, 0


def whether_to_think(flags: InferFlags, opened: Opened, given: Collection[str]) -> bool:
    """From --think and the weights. Raises ValueError for given flags that do not go with it."""
    engine, about, folder = opened.engine, opened.about, opened.folder
    if flags.think == "on" and not engine.thinks:
        raise ValueError(
            f"--think on: {folder} was trained with the method {about['method']} and has no T and "
            "C; leave --think out, or name a run of the method thinking."
        )
    wanted = bool(about) if flags.think == "auto" else flags.think == "on"
    thinks = engine.thinks and wanted
    idle = [name for name in OF_THOUGHTS if name in given]
    if idle and not thinks:
        other = "give --think on" if engine.thinks else "name a run of the method thinking"
        raise ValueError(
            f"{flag(idle[0])} does nothing without thoughts, and {folder} answers without them "
            f"here. Leave it out, or {other}."
        )
    return thinks


def answer_all(
    opened: Opened,
    prompts: Sequence[Prompt],
    ways: Sequence[Way],
    flags: InferFlags,
    example: Example | None,  # that the prompt is taken from, where its right answer is known
) -> list[list[Card]]:
    """Answers the prompts in all ways and prints what came of them; the first ones' cards."""
    engine, tokenizer = opened.engine, opened.tokenizer
    golds = opened.method.encode(example, tokenizer, engine.config).thoughts if example else ()
    answers = [answer_in_order(opened, way, flags) for way in ways]
    rows = []
    for number, prompt in enumerate(prompts):
        place = f"line {prompt.line}" if prompt.line else "prompt"
        cards = []
        for way, coming in zip(ways, answers):
            if way.name and not flags.json:
                print(f"{printable(way.name)}:")
            found, ids = next(coming), way.ids[number]
            check_given(way.given, len(found.result.thought_ids), place)
            card = Card(
                title=f"{place}, {way.name}" if way.name else place,
                prompt=ids,
                result=found.result,
                tokenizer=tokenizer,
                chunk_size=engine.config.chunk_size,
                config=way.config,
                right=opened.task.score(found.result.text, example)["right"] if example else None,
                expected=example.answer if example else None,
                golds=golds if ids == ways[0].ids[number] else (),
                given=way.given,
            )
            cards.append(card)
            if flags.json:
                line = prompt._asdict() | {key: getattr(found.result, key) for key in JSON_KEYS}
                if len(ways) > 1:
                    line["way"] = way.name
                line |= {"seconds": found.seconds, "batch": found.batch}
                print(json.dumps(line))
            else:
                show(found, card, chunk_table(engine, card) if flags.table else None)
        if len(rows) < MOST_ROWS:
            rows.append(cards)
    return rows


def check_given(given: Collection[int], count: int, place: str) -> None:
    """Raises ValueError where a thought was given after a chunk that has none."""
    if beyond := [k for k in given if k >= count]:
        raise ValueError(
            f"--thought {beyond[0]}=…: {place} and its answer have {count} chunks with a thought, "
            "counted from 0 (those that are read to their end). Name one of them, or give a longer "
            "prompt or a larger --max-new-tokens."
        )


def answer_in_order(opened: Opened, way: Way, flags: InferFlags) -> Iterator[Answer]:
    """Answers in the order of the prompts, each as soon as those before it are there.

    Within the next four batches the prompts are sorted by length, so that those of a batch are
    alike, which is faster. With --stream they are read one by one, in their own order.
    """
    size = 1 if flags.stream else flags.batch_size or 16
    ahead = 1 if flags.stream else 4 * size
    for start in range(0, len(way.ids), ahead):
        near = range(start, min(start + ahead, len(way.ids)))
        rows = sorted(near, key=lambda row: len(way.ids[row]))
        found: dict[int, Answer] = {}
        due = start  # the row whose answer is the next to give
        for first in range(0, len(rows), size):
            chosen = rows[first : first + size]
            batch = [way.ids[row] for row in chosen]
            found |= zip(chosen, answer_batch(opened, batch, way.config, flags))
            while due in found:
                yield found.pop(due)
                due += 1


def answer_batch(
    opened: Opened, prompts: Sequence[list[int]], config: GenerationConfig, flags: InferFlags
) -> list[Answer]:
    """Answers prompts together; nothing is read on once all of them have ended."""
    engine, tokenizer, *_ = opened
    started = time.perf_counter()
    reading = opened.method.read(engine, prompts, config)
    c, how = engine.config.chunk_size, {"at_once": flags.stream, "stops": flags.stop or ()}
    rows = [InlineText(tokenizer, ids, c, **how) for ids in prompts]
    for number, event in decode(engine, reading, config):
        rows[number].take(event)
        if all(row.ended for row in rows):
            break
    reading.thoughts = [row.thoughts for row in rows]  # none from after a stop
    found = results(engine, reading, config, [row.ids for row in rows])
    seconds, answers = time.perf_counter() - started, []
    for row, result in zip(rows, found):
        result = with_texts(result, tokenizer)
        if row.stopped:
            result = replace(result, text=row.said, stop_reason="stop")
        answers.append(Answer(result, row, seconds, len(rows)))
    return answers


def show(found: Answer, card: Card, table: str | None) -> None:
    """Prints what was thought and answered."""
    found.inline.end()
    if table is not None:
        print(table)
    expected = "" if card.expected is None else f"   (expected: {card.expected})"
    print(f"answer: {found.result.text.strip()}{expected}")
    together = f" for {found.batch} prompts together" if found.batch > 1 else ""
    print(f"{counters(card, found.seconds)}{together}")
