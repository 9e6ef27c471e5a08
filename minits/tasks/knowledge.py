"""What a base model knows: which two-hop rows it has both facts of, and does not just guess.

It is asked in plain text, greedily. A fact is known if in at least one of three phrasings the first
line of the reply holds a name of its object, as whole words.
"""
import json
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import Any

from tqdm import tqdm

from minits.checkpoint.files import read_json
from minits.checkpoint.tokenizer import Tokenizer
from minits.generation import generate
from minits.tasks.answers import names_one_of
from minits.tasks.hops import TwoHopExample
from minits.thinking import Engine

PHRASINGS = ("{}", "Here is a fact. {}", "Fill in the blank: {} ____.\nAnswer:")
GUESSES = ("{}", "Question: {}\nAnswer:")  # of the question without its subject
NEW_TOKENS = 16
BATCH = 128
KEYS = ("model", "data", "kept")
Reply = Callable[[Sequence[str]], dict[str, str]]  # of each prompt


def ask_model(rows: Sequence[TwoHopExample], reply: Reply) -> dict[str, Any]:
    """ids of the rows that are `kept`, and the share of rows that passes each filter."""
    asked = [list(questions(row)) for row in rows]
    replies = reply(sorted({text for row in asked for texts, _ in row for text in texts}))
    verdicts = [
        [any(names_one_of(replies[text], names) for text in texts) for texts, names in row]
        for row in asked
    ]
    passed = {
        "first_hop": [first for first, _, _ in verdicts],
        "second_hop": [second for _, second, _ in verdicts],
        "not_guessed": [not guessed for *_, guessed in verdicts],
    }
    passed["kept"] = [all(marks) for marks in zip(*passed.values())]
    shares = {name: fmean(marks) for name, marks in passed.items()}
    kept = [row.id for row, keep in zip(rows, passed["kept"]) if keep]
    texts = {"phrasings": PHRASINGS, "guesses": GUESSES, "new_tokens": NEW_TOKENS}
    return {"rows": len(rows), "shares": shares} | texts | {"kept": kept}


def questions(row: TwoHopExample) -> Iterator[tuple[list[str], tuple[str, ...]]]:
    """(prompts, right names) of the first hop, of the second, and of a guess at the answer."""
    for hop in row.hops:
        yield [each.replace("{}", hop.prompt) for each in PHRASINGS], hop.names
    blank = " ".join(row.prompt.replace(row.subject, " ").split())
    yield [each.replace("{}", blank) for each in GUESSES], row.hops[1].names


def replies_of(engine: Engine, tokenizer: Tokenizer, prompts: Sequence[str]) -> dict[str, str]:
    """The first line of what a model says after each prompt, without thoughts."""
    found = {}
    order = sorted(prompts, key=len)  # batches are alike in length
    for start in tqdm(range(0, len(order), BATCH), desc="ask", unit="batch", disable=None):
        batch = order[start : start + BATCH]
        results = generate(engine, tokenizer, batch, think=False, max_new_tokens=NEW_TOKENS)
        found |= {text: result.text.strip() for text, result in zip(batch, results)}
    return {text: (said.splitlines() or [""])[0] for text, said in found.items()}


def read_known(path: Path) -> dict[str, Any]:
    """What a file of `ask_model` holds, with its SHA-256.

    Raises FileNotFoundError with what is there instead, or ValueError for another file.
    """
    found = read_json(path)
    if not set(KEYS) <= set(found):
        raise ValueError(
            f"--known {path} has no {', '.join(KEYS)}: make it with data two-hop --ask-model."
        )
    return found | {"sha256": sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()}
