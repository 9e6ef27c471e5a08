"""What a base model knows: the two-hop rows whose two facts it knows, and does not just guess.

It is asked in plain text, greedily. A fact is known if in at least one of three phrasings the first
line of the reply holds a name of its object, as whole words.
"""
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from statistics import fmean

from tqdm import tqdm

from minits.checkpoint.files import Json
from minits.checkpoint.tokenizer import Tokenizer
from minits.generation import generate
from minits.tasks.answers import names_one_of
from minits.tasks.hops import TwoHopExample
from minits.tasks.rows import content_of
from minits.thinking import Engine

PHRASINGS = ("{}", "Here is a fact. {}", "Fill in the blank: {} ____.\nAnswer:")
GUESSES = ("{}", "Question: {}\nAnswer:")  # of the question without its subject
FILTERS = ("first_hop", "second_hop", "not_guessed", "kept")
NEW_TOKENS, BATCH = 16, 128


def ask_model(
    splits: Mapping[str, Sequence[TwoHopExample]],
    reply: Callable[[Sequence[str]], dict[str, str]],  # to each prompt
) -> Json:
    """The questions that are `kept`, and of each split the share that passes each filter."""
    asked = {row.question: list(probes(row)) for rows in splits.values() for row in rows}
    prompts = {text for each in asked.values() for texts, _ in each for text in texts}
    replies = reply(sorted(prompts))
    passed = {}  # of each question, which of FILTERS
    for question, each in asked.items():
        first, second, guessed = (
            any(names_one_of(replies[text], names) for text in texts) for texts, names in each
        )
        marks = first, second, not guessed
        passed[question] = *marks, all(marks)
    shares = {}
    for split, rows in splits.items():
        by_filter = zip(*(passed[row.question] for row in rows))
        shares[split] = {"rows": len(rows)} | dict(zip(FILTERS, map(fmean, by_filter)))
    return {
        "shares": shares,
        "phrasings": PHRASINGS,
        "guesses": GUESSES,
        "new_tokens": NEW_TOKENS,
        "kept": [question for question, (*_, kept) in passed.items() if kept],
    }


def probes(row: TwoHopExample) -> Iterator[tuple[list[str], tuple[str, ...]]]:
    """(prompts, right names) of the first hop, of the second, and of a guess at the answer."""
    for hop in row.hops:
        yield [each.replace("{}", hop.prompt) for each in PHRASINGS], hop.names
    blank = " ".join(row.question.replace(row.subject, " ").split())
    yield [each.replace("{}", blank) for each in GUESSES], row.hops[1].names


def replies_of(engine: Engine, tokenizer: Tokenizer, prompts: Sequence[str]) -> dict[str, str]:
    """The first line of what a model says after each prompt, without thoughts."""
    found = {}
    order = sorted(prompts, key=len)  # batches are alike in length
    for start in tqdm(range(0, len(order), BATCH), desc="ask", unit="batch", disable=None):
        batch = order[start : start + BATCH]
        results = generate(engine, tokenizer, batch, think=False, max_new_tokens=NEW_TOKENS)
        for text, result in zip(batch, results):
            found[text] = result.text.strip().partition("\n")[0]
    return found


def read_known(path: Path) -> Json:
    """What a file of `ask_model` holds, with its SHA-256, and those of the `files` it was asked of.

    Raises FileNotFoundError with what is there instead, or ValueError for another file.
    """
    content = content_of("known", str(path))
    try:
        found = json.loads(content)
        return {
            "model": str(found["model"]),
            "kept": set(found["kept"]),
            "files": {each["sha256"] for each in found["data"].values()},
            "sha256": sha256(content).hexdigest(),
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"--known {path} is no JSON object with model, data, kept: make it with data two-hop "
            f"--ask-model ({error!r})."
        ) from error
