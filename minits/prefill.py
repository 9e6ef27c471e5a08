"""Reading a prompt (paper, section 3.3 and appendix A.2).

`prefill_sequential` is the definition: chunk after chunk, each with the state that the thought
before it gives. `prefill_speculative` (Algorithm 1) must give the same thoughts, cache and last
vectors, faster. Both take prompts of any lengths and return a `Reading`, from which generation.py
goes on.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minits.cache import KVCache
from minits.tensors import PASS, in_order, on_device, pad
from minits.thinking import Engine, Thought


class Intervention:
    """The one hook of inference: what T is made to say, and what is read in place of a state.

    For measuring, for ablations, for "what if". This one changes nothing; derive from it. A place
    is (row, chunk): the thought after that chunk, and the state that follows from it. Speculation
    asks about drafts, too, and more than once about a place: the last call counts. It alone asks
    about chunk -1 (the zero state of the first chunk) and about padding: change neither.
    """

    def thought(self, row: int, chunk: int) -> Sequence[int] | None:
        """Ids that T is made to say, EOS included, or None for its own."""
        return None

    def states(self, places: Sequence[tuple[int, int]], states: Tensor) -> Tensor:
        """What is read in place of states [N, c, E], those after the thoughts at `places`."""
        return states


NOTHING = Intervention()


@dataclass
class Reading:
    """B rows read so far: what decoding needs to go on, and how the prefill went."""

    cache: KVCache
    lengths: list[int]  # [B] tokens that the backbone has read
    out: Tensor  # [B, E] final normed vector of each row's last token
    state: Tensor  # [B, c, E] S of the chunk that each row's next token belongs to
    open_h: Tensor  # [B, c, E] H of that chunk's tokens so far; the rest is undefined
    thoughts: list[list[Thought]]  # one for each complete chunk
    rounds: list[int]  # passes over the prompt; sequential: K
    chunk_passes: list[int]  # chunks run through the middle layers, all rounds together
    accepted: list[list[int]]  # chunks that became final, round by round

    @classmethod
    def begin(cls, engine: Engine, prompts: Sequence[Sequence[int]], slots: int) -> Reading:
        """Nothing read yet, in a cache of `slots` tokens a row."""
        B, c, E = len(prompts), engine.config.chunk_size, engine.backbone.config.hidden_size
        zeros = engine.backbone.model.embed_tokens.weight.new_zeros
        return cls(
            cache=engine.new_cache(B, slots),
            lengths=[len(prompt) for prompt in prompts],
            out=zeros(B, E),
            state=zeros(B, c, E),
            open_h=zeros(B, c, E),
            thoughts=[[] for _ in prompts],
            rounds=[0] * B,
            chunk_passes=[0] * B,
            accepted=[[] for _ in prompts],
        )

    def positions(self, width: int) -> Tensor:
        """[B, width]: 0, 1, … up to the end of each prompt; what lies past it is padding."""
        positions = in_order(len(self.lengths), width, self.state.device)
        ends = on_device(self.lengths, self.state.device)[:, None]
        return positions.where(positions < ends, self.cache.trash)

    def add_thoughts(
        self, engine: Engine, rows: list[int], thoughts: Sequence[Thought], hook: Intervention
    ) -> None:
        """Adds a thought to each of `rows`; the row's next chunk reads the state after it."""
        places = [(row, len(self.thoughts[row])) for row in rows]
        states = hook.states(places, engine.states([thought.ids for thought in thoughts]))
        self.state[on_device(rows, self.state.device)] = states
        for row, thought in zip(rows, thoughts):
            self.thoughts[row].append(thought)


def thoughts_after(
    engine: Engine,
    h: Tensor,  # [N, c, E]
    places: Sequence[tuple[int, int]],
    limit: int | None,  # None: as the model was trained
    hook: Intervention,
) -> list[Thought]:
    """The thoughts after the chunks at `places`, from their H, at most PASS tokens at once."""
    limit, most = limit or engine.config.max_thought_tokens, max(PASS // h.shape[1], 1)
    thoughts = []
    for start in range(0, len(h), most):
        part = slice(start, start + most)
        scripts = [hook.thought(row, chunk) for row, chunk in places[part]]
        thoughts += engine.think(h[part], limit, scripts)
    return thoughts


@torch.no_grad()
def prefill_sequential(
    engine: Engine,
    prompts: Sequence[Sequence[int]],  # B rows of at least one id
    slots: int,  # of the cache: at least the longest row's tokens
    *,
    limit: int | None = None,  # tokens of the longest thought; None: as the model was trained
    thinks: bool = True,  # False: every thought is taken to be trivial, which is plain Qwen2.5
    hook: Intervention = NOTHING,
) -> Reading:
    """Reads chunk after chunk (equations 1 to 4)."""
    reading = Reading.begin(engine, prompts, slots)
    c = engine.config.chunk_size
    chunks = [-(-length // c) for length in reading.lengths]  # K of each row
    reading.rounds, reading.chunk_passes = chunks, list(chunks)
    reading.accepted = [[1] * K for K in chunks]
    ids = pad(prompts, engine.config.pad_id, max(chunks) * c, engine.device)
    positions = reading.positions(max(chunks) * c)

    for k in range(max(chunks)):
        chunk = slice(k * c, (k + 1) * c)
        frame = engine.frame(positions[:, chunk], reading.cache)
        X = engine.lower(ids[:, chunk], frame)  # [B, c, E]
        H = engine.middle(X + reading.state, frame)
        out = engine.upper(H, frame)
        for row, length in enumerate(reading.lengths):
            if k == chunks[row] - 1:
                reading.open_h[row] = H[row]
                reading.out[row] = out[row, length - 1 - k * c]
        # A thought arises when its chunk is complete, never for a partial one.
        complete = [row for row, length in enumerate(reading.lengths) if (k + 1) * c <= length]
        if complete and thinks and engine.thinks:
            h = H[on_device(complete, H.device)]
            places = [(row, k) for row in complete]
            thoughts = thoughts_after(engine, h, places, limit, hook)
            reading.add_thoughts(engine, complete, thoughts, hook)
    return reading


# -- speculation -----------------------------------------------------------------------------------

# What the next round drafts for the thoughts that are not final.
# - trivial: all are trivial. The paper's algorithm: exactly |R| + 1 rounds without a lookahead.
# - carry: what this round found after the first mismatch, a fixed-point iteration. Exact too, and
#   fewer rounds where thoughts depend on the text more than on one another; but not bounded, for a
#   draft made under a wrong state can be worse than none.
DRAFTS = ("trivial", "carry")


@dataclass
class Speculation:
    """How far one row has come: the chunks before `t` are final."""

    chunks: int  # K
    lookahead: int  # most chunks that the next round runs
    drafts: list[Thought]  # the thoughts guessed to enter the chunks t + 1 … K - 1
    t: int = 0

    @property
    def width(self) -> int:
        """Chunks that the next round runs; 0 when all are final."""
        return min(self.lookahead, self.chunks - self.t)

    def accept(self, thoughts: Sequence[Thought]) -> int:
        """How many chunks of the round were right, given the `thoughts` after them.

        Chunk t ran under its true state, so it is right. Chunk t + 1 is right too if the thought
        drafted for it is the one that chunk t gave, and so on up to the first mismatch.
        """
        right = 1
        for draft, thought in zip(self.drafts, thoughts):
            if draft.ids != thought.ids:
                break
            right += 1
        return min(right, self.width)


@torch.no_grad()
def prefill_speculative(
    engine: Engine,
    prompts: Sequence[Sequence[int]],  # as for prefill_sequential
    slots: int,
    *,
    limit: int | None = None,
    draft: str = "trivial",  # one of DRAFTS
    lookahead: int | None = None,  # chunks to speculate ahead at first; None: to the end
    thinks: bool = True,
    hook: Intervention = NOTHING,
) -> Reading:
    """Runs all chunks at once under guessed thoughts, keeps what was right, repeats (Algorithm 1).

    Only the middle layers take part in rounds: the lower ones read no state, and the upper ones are
    not needed before all is final, so each of them runs once.
    """
    reading = Reading.begin(engine, prompts, slots)
    c, trivial = engine.config.chunk_size, engine.config.trivial_thought
    thinks = thinks and engine.thinks
    specs = []
    for length in reading.lengths:
        K = -(-length // c)
        specs.append(Speculation(K, lookahead or K, [trivial] * (K - 1)))
    L = max(spec.chunks for spec in specs) * c
    frame = engine.frame(reading.positions(L), reading.cache)
    ids = pad(prompts, engine.config.pad_id, L, engine.device)
    X = engine.lower(ids, frame)  # [B, L, E]
    H = X.new_zeros(len(specs), L + 1, X.shape[-1])  # the last place takes padding

    while any(spec.width for spec in specs):
        # 1. One parallel pass over the chunks that are not final, under drafted thoughts.
        h = run_round(engine, reading, specs, X, H, hook)
        # 2. T after every chunk. Without T all drafts come true: they are trivial.
        found = [spec.drafts for spec in specs]
        if thinks:
            found = think_ahead(engine, reading, specs, h, limit, draft, hook)
        for row, (spec, thoughts) in enumerate(zip(specs, found)):
            if not spec.width:
                continue
            # 3. The earliest chunk whose thought is not the drafted one; all before it is right.
            right = spec.accept(thoughts)
            reading.rounds[row] += 1
            reading.chunk_passes[row] += spec.width
            reading.accepted[row].append(right)
            # 4. Go on behind it, from the thought that it truly gave.
            if lookahead is not None:
                spec.lookahead = next_lookahead(spec, right, thoughts)
            spec.t += right
            if thinks:
                reading.thoughts[row] += thoughts[:right]
            left = max(spec.chunks - spec.t - 1, 0)
            # Only "carry" finds thoughts after the first mismatch.
            spec.drafts = [*thoughts[right:], *[trivial] * left][:left]

    out = engine.upper(H[:, :L], frame)
    for row, (spec, length) in enumerate(zip(specs, reading.lengths)):
        reading.out[row] = out[row, length - 1]
        reading.open_h[row] = H[row, (spec.chunks - 1) * c : spec.chunks * c]
    thinking = [row for row, thoughts in enumerate(reading.thoughts) if thoughts]
    if thinking:  # the next tokens read the state after the last thought
        last = [reading.thoughts[row].pop() for row in thinking]
        reading.add_thoughts(engine, thinking, last, hook)
    return reading


def run_round(
    engine: Engine,
    reading: Reading,
    specs: Sequence[Speculation],
    X: Tensor,  # [B, L, E] after the lower layers
    H: Tensor,  # [B, L + 1, E], filled in here
    hook: Intervention,
) -> Tensor:
    """One parallel pass over every row's next chunks, under drafts: their H [B, width, c, E]."""
    c, trivial, L = engine.config.chunk_size, engine.config.trivial_thought, X.shape[1]
    width = max(spec.width for spec in specs)
    entering, places, edges = [], [], []
    for row, (spec, length) in enumerate(zip(specs, reading.lengths)):
        known = reading.thoughts[row][-1:] or [trivial]
        entering += [*known, *spec.drafts, *[trivial] * width][:width]
        places += [(row, spec.t - 1 + i) for i in range(width)]
        end = (spec.t + spec.width) * c
        edges.append((spec.t * c, min(end, length)))
    states = hook.states(places, engine.states([thought.ids for thought in entering]))
    starts, ends = on_device(edges, X.device).T[:, :, None]  # [B, 1] each
    positions = starts + torch.arange(width * c, device=X.device)  # [B, width * c]
    real = positions < ends
    rows = torch.arange(len(specs), device=X.device)[:, None]
    x = X[rows, positions.clamp(max=L - 1)]  # [B, width * c, E]
    S = states.view_as(x)
    frame = engine.frame(positions.where(real, reading.cache.trash), reading.cache)
    h = engine.middle(x + S, frame)
    # Chunks that prove wrong are run and written again.
    H[rows, positions.where(real, L)] = h
    return h.unflatten(1, (width, c))


def think_ahead(
    engine: Engine,
    reading: Reading,
    specs: Sequence[Speculation],
    h: Tensor,  # [B, width, c, E]
    limit: int | None,
    draft: str,
    hook: Intervention,
) -> list[list[Thought]]:
    """The thoughts of each row's complete chunks in this round, all of them as one batch.

    One token of T tells which thoughts are trivial, so only the others are decoded. With trivial
    drafts a row's list ends with its first other one: the chunks behind it read a wrong state.
    """
    c = engine.config.chunk_size

    def think(pairs: Sequence[tuple[int, int]], limit: int | None) -> list[Thought]:
        if not pairs:
            return []
        rows, columns = on_device(pairs, h.device).T
        places = [(row, specs[row].t + i) for row, i in pairs]
        return thoughts_after(engine, h[rows, columns], places, limit, hook)

    pairs = [  # (row, number within the round) of each complete chunk
        (row, i)
        for row, (spec, length) in enumerate(zip(specs, reading.lengths))
        for i in range(min(length // c - spec.t, spec.width))
    ]
    found: list[list[Thought]] = [[] for _ in specs]
    wanted: list[tuple[int, int]] = []
    for (row, i), thought in zip(pairs, think(pairs, 1)):
        thoughts = found[row]
        if draft == "trivial" and thoughts and not thoughts[-1].trivial:
            continue
        thoughts.append(thought)
        if not thought.trivial:
            wanted.append((row, i))
    for (row, i), thought in zip(wanted, think(wanted, limit)):
        found[row][i] = thought
    return found


def next_lookahead(spec: Speculation, right: int, thoughts: Sequence[Thought]) -> int:
    """How far ahead to speculate next, after a round with these thoughts (not in the paper).

    Twice as far after a round that was all right and ended in a trivial thought, half as far after
    a miss: so a text whose chunks nearly all think costs about what sequential reading costs.
    """
    if right < spec.width:
        return max(1, spec.lookahead // 2)
    quiet = len(thoughts) == right and thoughts[-1].trivial
    return spec.lookahead * 2 if quiet else spec.lookahead
