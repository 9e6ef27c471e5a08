"""What `run.py infer` is asked: prompts, and the ways in which they are to be answered."""
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from minits.checkpoint.files import around, listing
from minits.cli.models import Opened
from minits.generation import GenerationConfig
from minits.lab.interventions import Scripted
from minits.supervision import Example, encode_rest
from minits.tasks.rows import question_first


class Prompt(NamedTuple):
    """What is asked."""

    line: int | None  # of --file, from 1 on
    prompt: str


class Way(NamedTuple):
    """How all prompts are answered: as they are, or in one of the other ways that flags ask for."""

    name: str  # "" for the usual way
    ids: list[list[int]]  # of the prompts
    config: GenerationConfig
    given: dict[int, list[int]] = {}  # what T is made to say, by chunk


def ways_of(
    flags: Any, texts: Sequence[Prompt], opened: Opened, config: GenerationConfig
) -> list[Way]:
    """The usual way first, then those of --thought and --question-first.

    Raises ValueError for a prompt or a thought that cannot be.
    """
    ids = encode(texts, opened, config, flags.file)
    found = [Way("", ids, config)]
    if flags.thought:
        given = scripted_thoughts(flags.thought, opened, config)
        scripted = replace(config, hook=Scripted([given] * len(ids)))
        name = " ".join(f"--thought {each}" for each in flags.thought)
        found.append(Way(name, ids, scripted, given))
    if flags.question_first:
        suffix = opened.task.asked("").strip()
        moved = [
            Prompt(line, question_first(Example(prompt, (), ""), suffix).prompt)
            for line, prompt in texts
        ]
        try:
            ids = encode(moved, opened, config, flags.file)
        except ValueError as error:
            raise ValueError(f"--question-first: {error}") from error
        found.append(Way("question first", ids, config))
    return found


def scripted_thoughts(
    asked: Sequence[str], opened: Opened, config: GenerationConfig
) -> dict[int, list[int]]:
    """What T is made to say by chunk, from K=TEXT. Raises ValueError naming what cannot be."""
    engine, tokenizer, *_ = opened
    limit = config.max_thought_tokens or engine.config.max_thought_tokens
    found = {}
    for each in asked:
        chunk, _, text = each.partition("=")
        try:
            if not chunk.isdecimal() or "=" not in each:
                raise ValueError("give K=TEXT, where K is the number of a chunk: 0, 1, 2, …")
            if int(chunk) in found:
                raise ValueError(f"chunk {int(chunk)} has a thought already; give it one.")
            ids = encode_rest(tokenizer, text.strip()) if text.strip() else []
            if len(ids) > limit:
                raise ValueError(
                    f"the thought has {len(ids)} tokens, more than max_thought_tokens = {limit}. "
                    "Shorten it, or raise that."
                )
        except ValueError as error:
            raise ValueError(f"--thought {each}: {error}") from error
        found[int(chunk)] = [*ids, engine.config.thought_end]
    return found


def encode(
    prompts: Sequence[Prompt], opened: Opened, config: GenerationConfig, file: str | None
) -> list[list[int]]:
    """The ids of all prompts; raises ValueError naming the line of `file` that does not fit."""
    config.check(opened.engine)
    found = []
    for line, text in prompts:
        try:
            found.append(opened.method.prompt(text, opened.tokenizer))
            config.check_prompt(opened.engine, found[-1], "the prompt")
        except ValueError as error:
            place = f"--file {file}, line {line}: " if file else ""
            raise ValueError(f"{place}{error}") from error
    return found


def read_prompts(flags: Any) -> list[Prompt] | None:
    """The prompts that were given, None for none. Blank lines of a file are passed over."""
    if flags.prompt is not None and flags.file is not None:
        raise ValueError("a PROMPT and --file were both given; use one of them.")
    if flags.prompt is not None:
        return [Prompt(None, flags.prompt)]
    if flags.file is None:
        return None
    # Other ends of a line that Unicode knows belong to the prompt.
    lines = enumerate(re.split("\r\n|\n|\r", read_text(flags.file)), 1)
    prompts = [Prompt(line, text) for line, text in lines if text.strip()]
    if not prompts:
        raise ValueError(f"--file {flags.file} holds no prompt; write one a line.")
    return prompts


def read_text(name: str) -> str:
    """The text that --file names, without the byte-order mark that some editors put before it."""
    path = Path(name)
    if name == "-":
        if sys.stdin is None:
            raise ValueError("--file -: standard input is closed; name a file, or pipe one in.")
        content = sys.stdin.buffer.read()
    elif path.is_dir():
        raise ValueError(f"--file {path} is a folder (it holds {listing(path)}); name a file.")
    elif not path.exists():
        raise FileNotFoundError(f"--file {path}: no such file ({around(path)}). Name another.")
    else:
        content = path.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"--file {path} is not UTF-8 text: {error}. Convert it first.") from error
