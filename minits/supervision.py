"""Chunk-level supervision (paper, sections 3.4 and A.3): steps at characters -> tokens -> chunks -> thought targets.

    Example (text, steps at characters, answer) -> encode_example -> Row (ids, one thought per complete chunk) -> collate

Markers never pass through the tokenizer: a step is tied to a character of the plain text, and the token offsets of the
plain text say which token that is. So the ids are those of the plain text, always.
"""
from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from minits.fast.cross_entropy import IGNORED
from minits.thinking import Batch, ThinkingConfig, pad
from minits.checkpoint.tokenizer import Tokenizer

METHODS = ("thinking", "no-cot", "cot")
LAYOUTS = ("rows", "pack", "long_rows")  # how samples are laid into the rows of a batch; see `collate`
MARKER = "<T>"
OVERFLOW_SEPARATOR = ";"  # between steps that were left over at the end of the prompt


@dataclass(frozen=True)
class Step:
    """One reasoning step: it can be inferred from the prompt's first `position` characters."""

    position: int
    text: str


@dataclass(frozen=True)
class Example:
    """One task instance. The answer follows the prompt after one space."""

    prompt: str
    steps: tuple[Step, ...]
    answer: str
    values: tuple[tuple[int, int], ...] = ()  # of the answer: the character where one starts, and which step gives it
    size: int = 0  # operations, for buckets in evaluation; `draw_example` fills it in


@dataclass(frozen=True)
class Row:
    """An encoded example, ready for training."""

    ids: list[int]  # prompt + answer + EOS
    prompt_length: int  # tokens
    thoughts: list[list[int]]  # one for each chunk that is complete once all but the last token are read; incl. EOS
    without_target: int = 0  # steps in a chunk that never completes: they cannot be trained
    late: bool | None = None  # a value of the answer begins before a state can hold all of its step; None: no `values`
    name: str = ""


def parse_marked(text: str, steps: Sequence[str]) -> tuple[str, tuple[Step, ...]]:
    """(plain text, steps) from text that holds `MARKER` once for each of `steps`.

    Raises ValueError where the numbers differ.
    """
    parts = text.split(MARKER)
    if len(parts) - 1 != len(steps):
        raise ValueError(f"the text holds {len(parts) - 1} markers {MARKER!r} for {len(steps)} steps; "
                         "there must be one marker for each step.")
    positions, length = [], 0
    for part in parts[:-1]:
        length += len(part)
        positions.append(length)
    return "".join(parts), tuple(Step(at, step) for at, step in zip(positions, steps))


def render_marked(prompt: str, steps: Sequence[Step]) -> str:
    """`prompt` with a marker at each step's character: the inverse of `parse_marked`."""
    for step in reversed(steps):
        prompt = prompt[:step.position] + MARKER + prompt[step.position:]
    return prompt


def steps_to_tokens(offsets: Sequence[tuple[int, int]], steps: Sequence[Step]) -> list[tuple[int, str]]:
    """For each step the token it belongs to and its text with a leading space, given the tokens' (start, end) characters.

    A step belongs to the token that holds the character before its marker (a marker at character 0: to token 0).
    Steps at one place go to consecutive tokens from there; those past the last token are joined there with a
    separator. Raises ValueError if the steps are not in the order of the text, or if there is no token.
    """
    if not offsets:
        raise ValueError("the prompt has no tokens, so its steps have no place; give a prompt with text.")
    starts = [start for start, _ in offsets]
    homes: list[tuple[int, str]] = []
    previous, spill = -1, 0
    for step in steps:
        if step.position < max(previous, 0):
            raise ValueError(f"step {step.text!r} stands at character {step.position}, before its predecessor at "
                             f"{previous}; steps must follow the order of the text.")
        if step.position > offsets[-1][1] + 1:
            raise ValueError(f"step {step.text!r} stands at character {step.position}, past the end of the prompt; "
                             "a step belongs to a character of the prompt.")
        spill = spill + 1 if step.position == previous else 0
        previous = step.position
        # The last token that starts before the marker; where several share the character (parts of one multi-byte
        # character), that is the one after which it is wholly read.
        home = max(bisect_left(starts, step.position) - 1, 0) + spill
        if home < len(offsets):
            homes.append((home, " " + step.text))
        else:
            homes.append((len(offsets) - 1, OVERFLOW_SEPARATOR + " " + step.text))
    return homes


def known_from(chunk: int, place: int, length: int, c: int) -> int:
    """The first position that can know token number `place` (from 0) of a thought after chunk number `chunk`.

    `length`: of the thought, EOS included. C is causal and the state is its last c outputs, so no vector of it holds
    tokens that come after its own.
    """
    return (chunk + 1) * c + max(place - max(length - c, 0), 0)


def encode_example(example: Example, tokenizer: Tokenizer, config: ThinkingConfig, *, max_thought_tokens: int = 64,
                   method: str = "thinking", name: str = "") -> Row:
    """Ids and thought targets of `example` for one of the `METHODS`.

    Raises ValueError, naming the row, for a gold thought longer than `max_thought_tokens` or a value without its step.
    """
    prompt, offsets = tokenizer.encode_with_offsets(example.prompt)
    answer, answer_offsets = tokenizer.encode_with_offsets(" " + example.answer)
    if method == "cot":
        answer = [i for step in example.steps for i in tokenizer.encode(" " + step.text)] + answer
    ids = [*prompt, *answer, tokenizer.eos_id]
    if method != "thinking":
        return Row(ids, len(prompt), [], name=name)
    c = config.chunk_size
    complete = (len(ids) - 1) // c  # the last token is never read
    thoughts: list[list[int]] = [[] for _ in range(-(-len(ids) // c))]
    ends = {}  # of each step: its chunk, and the place of its last token in that chunk's thought
    for step, (t, text) in sorted(enumerate(steps_to_tokens(offsets, example.steps)), key=lambda item: item[1][0]):
        thoughts[t // c] += tokenizer.encode(text)
        ends[step] = t // c, len(thoughts[t // c]) - 1
    for k, thought in enumerate(thoughts):
        if len(thought) > max_thought_tokens:
            raise ValueError(f"{name or 'row'}: the gold thought of chunk {k} has {len(thought)} tokens, more than "
                             f"max_thought_tokens = {max_thought_tokens}. Raise it, or use smaller chunks.")
    thoughts = [[*thought, config.thought_end] for thought in thoughts]
    late = False if example.values else None
    for character, step in example.values:
        if step not in ends:
            raise ValueError(f"{name or 'row'}: a value of the answer names step {step}; there are {len(ends)}, from 0 on.")
        chunk, place = ends[step]
        # A space stands before the answer, and the token before a value predicts it.
        predicted_at = len(prompt) + next(t for t, (_, end) in enumerate(answer_offsets) if end > character + 1) - 1
        late |= known_from(chunk, place, len(thoughts[chunk]), c) > predicted_at
    without_target = sum(chunk >= complete for chunk, _ in ends.values())
    return Row(ids, len(prompt), thoughts[:complete], without_target, late, name)


class Exact:
    """Sizes of a batch as they are, or `least` where that is more.

    Training T and C uses 1: a batch without thoughts would leave them out, and other processes wait for their gradients.
    """

    def __init__(self, least: int = 0) -> None:
        self.least = least

    def width(self, tokens: int, chunk_size: int) -> int:
        """Tokens a row, at least `tokens` (a multiple of `chunk_size`)."""
        return tokens

    def room(self, tokens: int) -> int:
        """Tokens of a row for several samples, at least `tokens`."""
        return tokens

    def size(self, width: int, name: str, needed: int, step: int = 16) -> int:
        """Entries of what is called `name` in batches of that width, at least `needed`; `step`: its granularity."""
        return max(needed, self.least)


class Roomy(Exact):
    """Sizes with some room that only grow, so that after a few batches all of one width have one shape."""

    def __init__(self, least: int = 0) -> None:
        super().__init__(least)
        self.known: dict[tuple[int, str], int] = {}
        self.most_room = 0

    def width(self, tokens: int, chunk_size: int) -> int:
        """A multiple of about 32, nearly always the next one: rows of few different widths.

        Never 64 past a multiple of 128: there cuDNN's attention under a mask, torch's choice on an H100 since 2.11, has
        gradients that may not be finite (PyTorch's issue 196678; seen here at 320).
        """
        step = round_up(32, chunk_size)
        width = round_up(tokens, step)
        return width + step if width % 128 == 64 else width

    def room(self, tokens: int) -> int:
        """The largest so far, so that widths only grow: a row of another width takes the graph's place (`make_room`)."""
        self.most_room = max(self.most_room, tokens)
        return self.most_room

    def size(self, width: int, name: str, needed: int, step: int = 16) -> int:
        """The largest size so far, or a twentieth more than `needed`."""
        if needed > self.known.get((width, name), -1):
            self.known[width, name] = round_up(max(int(needed * 1.05), self.least), step)
        return self.known[width, name]


def round_up(number: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-number // step) * step


def first_fit(spans: Sequence[int], width: int) -> list[tuple[int, int]]:
    """(row, start) of samples of `spans` tokens: each in the first row of `width` tokens that has room left."""
    used, places = [], []
    for span in spans:
        row = next((r for r, tokens in enumerate(used) if tokens + span <= width), len(used))
        if row == len(used):
            used.append(0)
        places.append((row, used[row]))
        used[row] += span
    return places


def lay_out(spans: Sequence[int], layout: str, row_tokens: int, c: int,
            sizes: Exact) -> tuple[int, int, list[tuple[int, int]]]:
    """(tokens a row, rows, (row, start) of each sample) for samples of `spans` tokens in that layout; see `collate`."""
    if layout == "rows":
        return sizes.width(max(spans), c), len(spans), [(b, 0) for b in range(len(spans))]
    own = max(*spans, round_up(row_tokens, c))
    room = sizes.room(own)
    # What shares a long row is what is trained: a function of these samples alone, not of those before.
    T, places = sizes.width(room, c), first_fit(spans, room if layout == "pack" else own)
    return T, sizes.size(T, "rows", max(b for b, _ in places) + 1, step=1), places


def collate(rows: Sequence[Row], config: ThinkingConfig, *, layout: str = "rows", row_tokens: int = 0,
            sizes: Exact = Exact()) -> Batch:
    """Samples -> one Batch, each on chunk borders. layout, one of `LAYOUTS`:

    - "rows": one sample a row.
    - "pack": as many samples as fit into a row of `row_tokens` tokens, blind to one another, each at positions from 0:
      the same losses with less padding.
    - "long_rows": the same, but attention and positions run on over all samples of a row: another training.

    A sample longer than `row_tokens` makes all rows as wide as itself. Raises ValueError for another layout.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r} is not known; use one of {', '.join(LAYOUTS)}.")
    c = config.chunk_size
    if layout == "pack":  # longest first leaves the least room unused; among long rows the order is that of the draw
        rows = sorted(rows, key=lambda row: -len(row.ids))
    spans = [round_up(len(row.ids) - 1, c) for row in rows]
    T, B, places = lay_out(spans, layout, row_tokens, c, sizes)
    ids, positions = torch.full((B, T), config.pad_id), torch.arange(T)[None]
    segments = torch.empty(0, dtype=torch.long)
    if layout == "pack":
        positions, segments = positions.repeat(B, 1), torch.full((B, T), -1)
    lm_at, lm_labels, trivial_at, thought_at, thoughts, state_of, state_at = [], [], [], [], [], [], []
    for number, (row, span, (b, start)) in enumerate(zip(rows, spans, places)):
        read, at, chunk = len(row.ids) - 1, b * T + start, (b * T + start) // c
        ids[b, start:start + read] = torch.tensor(row.ids[:-1])
        if layout == "pack":
            positions[b, start:start + span] = torch.arange(span)
            segments[b, start:start + span] = number
        for t in range(row.prompt_length - 1, read):
            lm_at.append(at + t)
            lm_labels.append(row.ids[t + 1])
        for k, thought in enumerate(row.thoughts, chunk):
            if len(thought) == 1:
                trivial_at.append(k)
                continue
            if (k - chunk + 1) * c < read:  # some token reads the state
                state_of.append(len(thoughts))
                state_at.append(k + 1)
            thought_at.append(k)
            thoughts.append(thought)
    n = sizes.size(T, "thought width", max([c, *map(len, thoughts)]), step=4)
    R = sizes.size(T, "thoughts", len(thoughts))
    tokens_at = [r * n + i for r, thought in enumerate(thoughts) for i in range(len(thought))]
    labels = [token for thought in thoughts for token in thought]

    def filled(name: str, values: list[int], filling: int = 0) -> torch.Tensor:
        return torch.tensor(values + [filling] * (sizes.size(T, name, len(values)) - len(values)), dtype=torch.long)

    return Batch(
        ids=ids, positions=positions, segments=segments,
        lm_at=filled("answer", lm_at), lm_labels=filled("answer", lm_labels, IGNORED),
        trivial_at=filled("trivial", trivial_at),
        trivial_labels=filled("trivial", [config.thought_end] * len(trivial_at), IGNORED),
        thought_at=filled("thoughts", thought_at),
        thoughts=pad(thoughts + [[]] * (R - len(thoughts)), config.pad_id, n, "cpu"),
        lengths=filled("thoughts", [len(thought) for thought in thoughts], 1),
        thought_tokens_at=filled("thought tokens", tokens_at), thought_labels=filled("thought tokens", labels, IGNORED),
        state_of=filled("states", state_of), state_at=filled("states", state_at, -1))
