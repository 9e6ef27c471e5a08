"""Chunk-level supervision (paper, sections 3.4 and A.3): steps at characters -> tokens -> chunks.

    Example (text, steps at characters, answer) -> encode_example -> Row (ids, a thought a chunk)

Markers never pass through the tokenizer. A step is tied to a character of the plain text, and the
plain text's own token offsets say which token that is, so the ids are always those of the plain
text. Example, c = 4, a token a word:

    The coin is heads.<T> Alice flips it.<T> Bob waits.<T>      steps: heads, tails, tails
    [The coin is heads.]   [Alice flips it. Bob]   [waits.]
     thought: heads EOS     thought: tails EOS      tails EOS, if the answer completes the chunk;
                                                    else the step has no target
"""
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

from minits.thinking import ThinkingConfig

MARKER = "<T>"
OVERFLOW_SEPARATOR = ";"  # before steps that are left over at the prompt's end; our choice


class Tokenizer(Protocol):
    """What encoding needs of a tokenizer."""

    eos_id: int  # closes answers

    def encode_with_offsets(
        self, text: str, start: bool = False
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids, and of each the (start, end) characters of `text`.

        start: with the token that begins a prompt, at (0, 0), if the tokenizer has one.
        """


@dataclass(frozen=True)
class Step:
    """A reasoning step. It can be inferred from the prompt's first `position` characters."""

    position: int
    text: str


@dataclass(frozen=True)
class Example:
    """One task instance. The answer follows the prompt after one space."""

    prompt: str
    steps: tuple[Step, ...]
    answer: str
    # Values of the answer: (the character where one starts, the index of the step that gives it).
    values: tuple[tuple[int, int], ...] = ()
    size: int = 0  # how much work it is, in the task's own unit; batches are balanced by it
    name: str = ""  # where it was read, for errors; "": it is known by its number
    taught: bool = True  # whether T learns its thoughts; else they have no loss, all states are 0


@dataclass(frozen=True)
class Row:
    """An encoded example, ready for training."""

    ids: list[int]  # prompt + answer + EOS
    prompt_length: int  # tokens
    # One for each chunk that is complete once all but the last token are read; EOS included.
    thoughts: list[list[int]]
    # Of each step: its chunk, and the place of its last token in that chunk's thought. Empty for
    # methods without thoughts.
    ends: tuple[tuple[int, int], ...] = ()
    name: str = ""

    @property
    def without_target(self) -> int:
        """Steps whose chunk never completes: they cannot be trained."""
        return sum(chunk >= len(self.thoughts) for chunk, _ in self.ends)


def parse_marked(text: str, steps: Sequence[str]) -> tuple[str, tuple[Step, ...]]:
    """(plain text, steps) from text that holds `MARKER` once for each of `steps`.

    Raises ValueError where the numbers differ.
    """
    parts = text.split(MARKER)
    if len(parts) - 1 != len(steps):
        raise ValueError(
            f"the text holds {len(parts) - 1} markers {MARKER!r} for {len(steps)} steps; there "
            "must be one marker for each step."
        )
    positions = accumulate(map(len, parts))
    return "".join(parts), tuple(map(Step, positions, steps))


def render_marked(prompt: str, steps: Sequence[Step]) -> str:
    """`prompt` with a marker at each step's character: the inverse of `parse_marked`."""
    cuts = [0, *(step.position for step in steps), len(prompt)]
    return MARKER.join(prompt[start:end] for start, end in pairwise(cuts))


def steps_to_tokens(
    offsets: Sequence[tuple[int, int]], steps: Sequence[Step]
) -> list[tuple[int, str]]:
    """(token, text with a leading space) of each step, given the tokens' (start, end) characters.

    A step belongs to the token that holds the character before its marker (a marker at character
    0: to token 0). Steps at one place go to consecutive tokens from there, and no step goes before
    its predecessor's token. Steps past the last token are joined there with a separator.

    Raises ValueError if the steps are not in the order of the text, or if there is no token.
    """
    if not offsets:
        raise ValueError(
            "the prompt has no tokens, so its steps have no place; give a prompt with text."
        )
    starts = [start for start, _ in offsets]
    last, end = len(offsets) - 1, offsets[-1][1]
    placed: list[tuple[int, str]] = []
    previous, token = -1, 0
    for step in steps:
        if step.position < max(previous, 0):
            raise ValueError(
                f"step {step.text!r} stands at character {step.position}, before its predecessor "
                f"at {previous}; steps must follow the order of the text."
            )
        if step.position > end + 1:
            raise ValueError(
                f"step {step.text!r} stands at character {step.position}, past the end of the "
                "prompt; a step belongs to a character of the prompt."
            )
        # The last token that starts before the marker. Where several tokens share the character
        # (the parts of a multi-byte one), that is the token after which it is wholly read.
        own = bisect_left(starts, step.position) - 1
        token = token + 1 if step.position == previous else max(own, min(token, last))
        previous = step.position
        separator = "" if token <= last else OVERFLOW_SEPARATOR
        placed.append((min(token, last), f"{separator} {step.text}"))
    return placed


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """The one way in which a prompt becomes ids, in training and in inference: by itself."""
    return tokenizer.encode_with_offsets(text, start=True)[0]


def encode_rest(tokenizer: Tokenizer, text: str) -> list[int]:
    """The one way in which what follows a prompt becomes ids: by itself, after one space."""
    return tokenizer.encode_with_offsets(" " + text)[0]


def encode_example(
    example: Example,
    tokenizer: Tokenizer,
    config: ThinkingConfig,
    name: str = "row",  # in errors
) -> Row:
    """Ids and thought targets of `example`.

    Raises ValueError, naming the row, for a gold thought longer than `max_thought_tokens`.
    """
    prompt, offsets = tokenizer.encode_with_offsets(example.prompt, start=True)
    ids = [*prompt, *encode_rest(tokenizer, example.answer), tokenizer.eos_id]
    c = config.chunk_size
    # The last token is never read.
    complete = (len(ids) - 1) // c if example.taught else 0
    thoughts: list[list[int]] = [[] for _ in range(0, len(ids), c)]
    ends = []  # see Row
    for token, text in steps_to_tokens(offsets, example.steps):
        chunk = token // c
        thoughts[chunk] += tokenizer.encode_with_offsets(text)[0]
        ends.append((chunk, len(thoughts[chunk]) - 1))
    for chunk, thought in enumerate(thoughts):
        if len(thought) > config.max_thought_tokens:
            raise ValueError(
                f"{name}: the gold thought of chunk {chunk} has {len(thought)} tokens, more than "
                f"max_thought_tokens = {config.max_thought_tokens}. "
                "Raise it, or use smaller chunks."
            )
        thought.append(config.thought_end)
    return Row(ids, len(prompt), thoughts[:complete], tuple(ends), name)
