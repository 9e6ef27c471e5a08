"""Reading a prompt (paper, section 3.3 and appendix A.2): sequential and speculative prefill.

`prefill_sequential` is the definition. `prefill_speculative` must give the same thoughts, cache and logits, faster.
Both take a batch of prompts of any lengths and return a `Reading`, from which generation.py decodes the answers.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minits.cache import KVCache
from minits.thinking import Thought, ThinkingStates, on_device, pad

DRAFTS = ("trivial", "carry", "both")  # what a round expects of the thoughts it has not seen yet


@dataclass
class Reading:
    """B rows read so far: what decoding needs to go on, and how the prefill went."""

    cache: KVCache
    lengths: list[int]  # [B] tokens read by the backbone
    out: Tensor  # [B, E] final normed vector of each row's last read token
    state: Tensor  # [B, c, E] S of the chunk that each row's next token belongs to
    open_h: Tensor  # [B, c, E] H of that chunk's tokens read so far; the rest is undefined
    thoughts: list[list[Thought]]  # one for each complete chunk
    rounds: list[int]  # passes over the prompt; sequential: K
    chunk_passes: list[int]  # chunks run through the middle layers, all rounds together
    accepted: list[list[int]]  # chunks that became final, round by round


def start_reading(model: ThinkingStates, prompts: Sequence[Sequence[int]], slots: int) -> Reading:
    """An empty Reading for `prompts`, whose cache holds `slots` tokens a row."""
    B, c, E = len(prompts), model.config.chunk_size, model.backbone.config.hidden_size
    zeros = model.backbone.model.embed_tokens.weight.new_zeros
    return Reading(model.new_cache(B, slots), [len(p) for p in prompts], zeros(B, E), zeros(B, c, E),
                   zeros(B, c, E), [[] for _ in prompts], [0] * B, [0] * B, [[] for _ in prompts])


def positions_from(reading: Reading, starts: Sequence[int], width: int, ends: Sequence[int] | None = None) -> Tensor:
    """Positions [B, width]: row b's tokens from starts[b] on, before ends[b] and the end of its prompt.

    The other places are padding and go to waste.
    """
    device = reading.state.device
    stops = [min(pair) for pair in zip(reading.lengths, ends or reading.lengths)]
    edges = on_device([starts, stops], device)  # [2, B]
    positions = edges[0][:, None] + torch.arange(width, device=device)
    return torch.where(positions < edges[1][:, None], positions, reading.cache.waste)


@torch.no_grad()
def prefill_sequential(model: ThinkingStates, prompts: Sequence[Sequence[int]], slots: int,
                       max_thought_tokens: int, *, think: bool = True) -> Reading:
    """Reads chunk after chunk, each with the state of the thought before it (eqs. 1-4): the definition of prefill.

    prompts: B rows of at least one id; slots: cache size, at least the longest row's tokens.
    think=False: every thought is taken to be trivial, which makes it plain Qwen2.5.
    """
    c, reading = model.config.chunk_size, start_reading(model, prompts, slots)
    chunks = [-(-length // c) for length in reading.lengths]  # K of each row
    reading.rounds, reading.chunk_passes, reading.accepted = chunks, list(chunks), [[1] * K for K in chunks]
    ids = pad(prompts, model.config.pad_id, max(chunks) * c, model.device)
    for k in range(max(chunks)):
        frame = model.frame(positions_from(reading, [k * c] * len(prompts), c), reading.cache, span=(k + 1) * c)
        h = model.middle(model.lower(ids[:, k * c:(k + 1) * c], frame) + reading.state, frame)  # [B, c, E]
        out = model.upper(h, frame)
        for b, length in enumerate(reading.lengths):
            if k == chunks[b] - 1:
                reading.open_h[b] = h[b]
                reading.out[b] = out[b, length - 1 - k * c]
        complete = [b for b, length in enumerate(reading.lengths) if (k + 1) * c <= length]
        if complete and think and model.thinks:
            opened = model.begin_thoughts(h[on_device(complete, h.device)], max_thought_tokens)
            take_in(model, reading, complete, model.finish_thoughts(opened))
    return reading


def take_in(model: ThinkingStates, reading: Reading, rows: list[int], thoughts: Sequence[Thought]) -> None:
    """Each of `rows` has had its thought: its next chunk reads the state that follows."""
    reading.state[on_device(rows, model.device)] = model.states([thought.ids for thought in thoughts])
    for b, thought in zip(rows, thoughts):
        reading.thoughts[b].append(thought)


@dataclass
class Front:
    """How far speculation has come in one row of the batch: the chunks before `start` (t) are final."""

    chunks: int  # K
    width: int  # most chunks to run in the next round
    drafts: list[Thought]  # the thoughts expected to enter chunks start+1 … K-1
    carries: bool  # whether the next drafts are what this round gave, or trivial
    start: int = 0
    final: list[Thought] = field(default_factory=list)  # the thoughts that stand

    @property
    def run(self) -> int:
        """Chunks that the next round runs; 0 when all are final."""
        return min(self.width, self.chunks - self.start)

    def advance(self, accepted: int, thoughts: list[Thought], found: list[Thought], trivial: Thought,
                grow: bool) -> None:
        """Moves on by `accepted` chunks, whose thoughts are `thoughts`; `found` is what this row itself gave."""
        if grow:  # a window: wider after a full success that ends in quiet, narrower after a miss
            if accepted < self.run:
                self.width = max(1, self.width // 2)
            elif len(thoughts) == accepted and thoughts[-1].trivial:
                self.width *= 2
        self.start += accepted
        self.final += thoughts
        left = max(self.chunks - self.start - 1, 0)
        expected = found[accepted:] if self.carries else []
        self.drafts = (expected + [trivial] * left)[:left]


@torch.no_grad()
def prefill_speculative(model: ThinkingStates, prompts: Sequence[Sequence[int]], slots: int, max_thought_tokens: int,
                        draft: str = "trivial", window: int | None = None, *, think: bool = True) -> Reading:
    """Reads many chunks at once under drafted thoughts, keeps what was right and repeats (Algorithm 1, generalised).

    A round runs each row from t, its first chunk that is not final. Chunk t's state is known, so chunk t comes out
    right. Chunk t+1 is right too if the thought drafted for it is the one that chunk t gave, and so on up to the first
    mismatch, where the true thought replaces the draft. What is drafted for the thoughts not seen yet:

    - "trivial": EOS alone. Exactly |R| + 1 rounds: the paper's algorithm.
    - "carry": what the round before gave. Exact too, far fewer rounds where thoughts depend on the text more than on
      one another, but not bounded: a draft made under a wrong state can be worse than none.
    - "both": the two side by side as two rows of the batch; the one that got further gives its slots to the other.
      At most |R| + 1 rounds.

    `window`: speculate at most so many chunks ahead, adapted as it goes (`Front.advance`), so that a text that thinks
    in every chunk costs about what sequential reading costs; None: always to the end.

    Only the middle layers take part in rounds. The lower ones read no state, and the upper ones are not needed before
    all is final, so each runs once.
    """
    c, copies = model.config.chunk_size, 2 if draft == "both" else 1
    rows = [prompt for prompt in prompts for _ in range(copies)]
    reading = start_reading(model, rows, slots)
    trivial = Thought([model.config.thought_end])
    fronts = []
    for b, length in enumerate(reading.lengths):
        K = -(-length // c)
        fronts.append(Front(K, window or K, [trivial] * (K - 1), draft == "carry" or b % copies == 1))
    T = max(front.chunks for front in fronts) * c
    whole = model.frame(positions_from(reading, [0] * len(rows), T), reading.cache, span=T)
    x = model.lower(pad(rows, model.config.pad_id, T, model.device), whole)  # [B, T, E]
    h = x.new_zeros(len(rows), T + 1, x.shape[-1])  # the last place takes padding

    while any(front.run for front in fronts):
        found = speculate(model, reading, fronts, x, h, max_thought_tokens if think and model.thinks else None)
        for first in range(0, len(rows), copies):
            group = range(first, first + copies)
            accepted = {b: min(1 + matches(fronts[b].drafts, found[b]), fronts[b].run) for b in group}
            best = max(group, key=accepted.__getitem__)
            if not fronts[best].run:
                continue
            reading.rounds[first] += 1
            reading.chunk_passes[first] += sum(fronts[b].run for b in group)
            reading.accepted[first].append(accepted[best])
            start = fronts[best].start
            thoughts = found[best][:accepted[best]]
            for b in group:
                if b != best:
                    copy_span(reading, h, best, b, range(start * c, (start + accepted[best]) * c))
                fronts[b].advance(accepted[best], thoughts, found[b], trivial, window is not None)

    out = model.upper(h[:, :T], whole)
    for b, (front, length) in enumerate(zip(fronts, reading.lengths)):
        reading.out[b] = out[b, length - 1]
        reading.open_h[b] = h[b, (front.chunks - 1) * c:front.chunks * c]
        reading.thoughts[b] = front.final if think and model.thinks else []
    reading.state = model.states([(front.final[-1] if front.final else trivial).ids for front in fronts])
    return reading if copies == 1 else every_second(model, reading)


def speculate(model: ThinkingStates, reading: Reading, fronts: list[Front], x: Tensor, h: Tensor,
              max_thought_tokens: int | None) -> list[list[Thought]]:
    """One round: runs every row's next chunks under its drafts, writes their H into `h`; the thoughts that came out.

    x: [B, T, E] after the lower layers; h: [B, T + 1, E], the last place for padding. max_thought_tokens None: no
    thinking, every draft holds.
    """
    c, B, T = model.config.chunk_size, len(fronts), x.shape[1]
    wide = max(front.run for front in fronts)
    trivial = Thought([model.config.thought_end])
    entering = [[*(front.final[-1:] or [trivial]), *front.drafts, *[trivial] * wide][:wide] for front in fronts]
    states = model.states([thought.ids for row in entering for thought in row]).view(B, wide * c, -1)
    ends = [(front.start + front.run) * c for front in fronts]
    positions = positions_from(reading, [front.start * c for front in fronts], wide * c, ends)  # [B, wide * c]
    rows = torch.arange(B, device=x.device)[:, None]
    round_h = model.middle(x[rows, positions.clamp(max=T - 1)] + states,
                           model.frame(positions, reading.cache, span=max(ends)))
    h[rows, positions.clamp(max=T)] = round_h  # chunks that were wrong are run, and written, again
    if max_thought_tokens is None:
        return [front.drafts[:front.run] for front in fronts]
    complete = [min(length // c - front.start, front.run) for front, length in zip(fronts, reading.lengths)]
    return think_ahead(model, round_h.unflatten(1, (wide, c)), complete, max_thought_tokens,
                       first_only=[not front.carries for front in fronts])


def copy_span(reading: Reading, h: Tensor, source: int, target: int, span: range) -> None:
    """Gives row `target` what row `source` has at the positions in `span`: keys, values and H."""
    at = slice(span.start, min(span.stop, reading.lengths[source]))
    for tensor in (reading.cache.k, reading.cache.v):
        tensor[:, target, :, at] = tensor[:, source, :, at]
    h[target, at] = h[source, at]


def every_second(model: ThinkingStates, reading: Reading) -> Reading:
    """The rows 0, 2, 4, … of a Reading, in a cache of the model's own making."""
    lengths = reading.lengths[::2]
    cache = model.new_cache(len(lengths), reading.cache.slots)
    cache.k.copy_(reading.cache.k[:, ::2])
    cache.v.copy_(reading.cache.v[:, ::2])
    return Reading(cache, lengths, reading.out[::2], reading.state[::2].clone(), reading.open_h[::2].clone(),
                   reading.thoughts[::2], reading.rounds[::2], reading.chunk_passes[::2], reading.accepted[::2])


def matches(drafts: Sequence[Thought], found: Sequence[Thought]) -> int:
    """How many thoughts came out as drafted before the first that did not."""
    for i, (expected, thought) in enumerate(zip(drafts, found)):
        if expected.ids != thought.ids:
            return i
    return min(len(drafts), len(found))


def think_ahead(model: ThinkingStates, h: Tensor, complete: Sequence[int], max_thought_tokens: int, *,
                first_only: Sequence[bool]) -> list[list[Thought]]:
    """The thoughts of each row's first complete[b] chunks in h [B, wide, c, E], all chunks as one batch.

    One pass of T tells which thoughts are trivial; only the others are decoded. Of a row with first_only[b], only the
    first non-trivial one is decoded and the list ends there, for trivial drafts make all later ones void.
    """
    trivial = Thought([model.config.thought_end])
    places = [(b, k) for b, n in enumerate(complete) for k in range(n)]
    if not places:
        return [[] for _ in complete]
    b_index, k_index = on_device(places, h.device).T
    opened = model.begin_thoughts(h[b_index, k_index], max_thought_tokens)
    found = [[trivial] * n for n in complete]
    wanted: list[int] = []  # places of thoughts to decode
    for place, ((b, k), token) in enumerate(zip(places, opened.newest())):
        if token != model.config.thought_end and k < len(found[b]):
            wanted.append(place)
            if first_only[b]:
                del found[b][k + 1:]
    if wanted:
        decoded = model.finish_thoughts(model.gather_thoughts([(opened, wanted)]))
        for place, thought in zip(wanted, decoded):
            b, k = places[place]
            found[b][k] = thought
    return found
