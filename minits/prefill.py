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
from minits.thinking import Thought, ThinkingStates, pad

DRAFTS = ("trivial", "carry")  # what a round expects of the thoughts it has not seen yet


@dataclass
class Reading:
    """B rows read so far: what decoding needs to go on, and how the prefill went."""

    cache: KVCache
    lengths: list[int]  # [B] tokens read by the backbone
    out: Tensor  # [B, E] final normed vector of each row's last read token
    state: Tensor  # [B, c, E] S of the chunk that each row's next token belongs to
    open_h: Tensor  # [B, c, E] H of that chunk's tokens read so far; the rest is undefined
    thoughts: list[list[Thought]]  # one for each complete chunk
    rounds: list[int] = field(default_factory=list)  # passes over the prompt; sequential: K
    chunk_passes: list[int] = field(default_factory=list)  # chunks run through the middle layers, all rounds together
    accepted: list[list[int]] = field(default_factory=list)  # chunks that became final, round by round


def start_reading(model: ThinkingStates, prompts: Sequence[Sequence[int]], slots: int) -> Reading:
    """An empty Reading for `prompts`, whose cache holds `slots` tokens a row."""
    B, c, E = len(prompts), model.config.chunk_size, model.backbone.config.hidden_size
    zeros = model.backbone.model.embed_tokens.weight.new_zeros
    return Reading(model.backbone.new_cache(B, slots), [len(p) for p in prompts], zeros(B, E), zeros(B, c, E),
                   zeros(B, c, E), [[] for _ in prompts], [0] * B, [0] * B, [[] for _ in prompts])


def window(reading: Reading, starts: Sequence[int], width: int) -> Tensor:
    """Positions [B, width]: row b's tokens from starts[b] on; what lies past its prompt is padding and goes to waste."""
    device = reading.state.device
    positions = torch.tensor(starts, device=device)[:, None] + torch.arange(width, device=device)
    ends = torch.tensor(reading.lengths, device=device)[:, None]
    return torch.where(positions < ends, positions, reading.cache.waste)


@torch.no_grad()
def prefill_sequential(model: ThinkingStates, prompts: Sequence[Sequence[int]], slots: int,
                       max_thought_tokens: int, *, think: bool = True) -> Reading:
    """Reads chunk after chunk, each with the state of the thought before it (eqs. 1-4): the definition of prefill.

    prompts: B rows of at least one id; slots: cache size, at least the longest row's tokens.
    think=False: every thought is taken to be trivial, which makes it plain Qwen2.5.
    """
    c, reading = model.config.chunk_size, start_reading(model, prompts, slots)
    chunks = [-(-length // c) for length in reading.lengths]  # K of each row
    ids = pad(prompts, model.config.pad_id, max(chunks) * c, model.device)
    for k in range(max(chunks)):
        frame = model.backbone.frame(window(reading, [k * c] * len(prompts), c), reading.cache, span=(k + 1) * c)
        h = model.middle(model.lower(ids[:, k * c:(k + 1) * c], frame) + reading.state, frame)  # [B, c, E]
        out = model.upper(h, frame)
        running = [b for b in range(len(prompts)) if k < chunks[b]]
        for b in running:
            reading.rounds[b] += 1
            reading.chunk_passes[b] += 1
            reading.accepted[b].append(1)
            if k == chunks[b] - 1:
                reading.open_h[b] = h[b]
                reading.out[b] = out[b, reading.lengths[b] - 1 - k * c]
        if think:
            complete = [b for b in running if (k + 1) * c <= reading.lengths[b]]
            complete_chunks(model, reading, complete, h, max_thought_tokens)
    return reading


def complete_chunks(model: ThinkingStates, reading: Reading, rows: list[int], h: Tensor,
                    max_thought_tokens: int) -> list[Thought]:
    """Thinks for the rows that have just completed a chunk, its H being h[row] [c, E]; sets their next state."""
    if not rows or not model.thinks:
        return []
    index = torch.tensor(rows, device=h.device)
    thoughts = model.finish_thoughts(*model.begin_thoughts(h[index], max_thought_tokens), max_thought_tokens)
    reading.state[index] = model.states([thought.ids for thought in thoughts])
    for b, thought in zip(rows, thoughts):
        reading.thoughts[b].append(thought)
    return thoughts


@torch.no_grad()
def prefill_speculative(model: ThinkingStates, prompts: Sequence[Sequence[int]], slots: int,
                        max_thought_tokens: int, draft: str = "trivial", *, think: bool = True) -> Reading:
    """Reads all chunks at once under drafted thoughts, keeps what was right and repeats (Algorithm 1, generalised).

    A round runs each row from t, its first chunk that is not final. Chunk t's state is known, so chunk t comes out
    right. Chunk t+1 is right too if the thought drafted for it is the one that chunk t gave, and so on up to the first
    mismatch, where the true thought replaces the draft. `draft="trivial"` expects every later thought to be EOS alone:
    exactly |R| + 1 rounds. `draft="carry"` expects what the round before gave: exact too, far fewer rounds where
    thoughts depend on the text more than on one another, but without that bound.

    Only the middle layers take part in rounds. The lower ones read no state, and the upper ones are not needed before
    all is final, so each runs once.
    """
    c, reading, B = model.config.chunk_size, start_reading(model, prompts, slots), len(prompts)
    chunks = [-(-length // c) for length in reading.lengths]  # K of each row
    T = max(chunks) * c
    whole = model.backbone.frame(window(reading, [0] * B, T), reading.cache, span=T)
    x = model.lower(pad(prompts, model.config.pad_id, T, model.device), whole)  # [B, T, E]
    h = x.new_zeros(B, T + 1, x.shape[-1])  # the last place takes padding
    rows = torch.arange(B, device=x.device)[:, None]
    trivial = Thought([model.config.thought_end])
    final: list[list[Thought]] = [[] for _ in prompts]  # thoughts that stand
    drafts = [[trivial] * (K - 1) for K in chunks]  # thoughts expected to enter chunks t+1 … K-1

    starts = [0] * B  # t of each row
    while running := [b for b in range(B) if starts[b] < chunks[b]]:
        wide = max(chunks[b] - starts[b] for b in running)
        positions = window(reading, [t * c for t in starts], wide * c)  # [B, wide * c]
        entering = [(final[b][-1:] or [trivial]) + drafts[b] for b in range(B)]
        states = model.states([z.ids for row in entering for z in [*row, *[trivial] * (wide - len(row))][:wide]])
        round_h = model.middle(x[rows, positions.clamp(max=T - 1)] + states.view(B, wide * c, -1),
                               model.backbone.frame(positions, reading.cache, span=T))
        h[rows, positions.clamp(max=T)] = round_h  # the chunks that were wrong are run, and written, again
        complete = [reading.lengths[b] // c - starts[b] for b in range(B)]
        if think and model.thinks:
            found = think_ahead(model, round_h.unflatten(1, (wide, c)), complete, max_thought_tokens,
                                first_only=draft == "trivial")
        else:
            found = drafts
        for b in running:
            accepted = 1 + matches(drafts[b], found[b])
            final[b] += found[b][:accepted]
            left = chunks[b] - starts[b] - accepted
            drafts[b] = found[b][accepted:][:max(left - 1, 0)] if draft == "carry" else [trivial] * max(left - 1, 0)
            reading.rounds[b] += 1
            reading.chunk_passes[b] += chunks[b] - starts[b]
            reading.accepted[b].append(accepted)
            starts[b] += accepted

    out = model.upper(h[:, :T], whole)
    reading.state = model.states([(row[-1] if row else trivial).ids for row in final])
    for b, K in enumerate(chunks):
        reading.out[b] = out[b, reading.lengths[b] - 1]
        reading.open_h[b] = h[b, (K - 1) * c:K * c]
        reading.thoughts[b] = final[b] if think and model.thinks else []
    return reading


def matches(drafts: Sequence[Thought], found: Sequence[Thought]) -> int:
    """How many thoughts came out as drafted before the first that did not."""
    for i, (expected, thought) in enumerate(zip(drafts, found)):
        if expected.ids != thought.ids:
            return i
    return min(len(drafts), len(found))


def think_ahead(model: ThinkingStates, h: Tensor, complete: Sequence[int], max_thought_tokens: int, *,
                first_only: bool) -> list[list[Thought]]:
    """The thoughts of each row's first complete[b] chunks in h [B, wide, c, E], all chunks as one batch.

    One pass of T tells which thoughts are trivial; only the others are decoded. `first_only`: of each row, only the
    first non-trivial one is decoded and the list ends there, for trivial drafts make all later ones void.
    """
    trivial = Thought([model.config.thought_end])
    places = [(b, k) for b, n in enumerate(complete) for k in range(n)]
    if not places:
        return [[] for _ in complete]
    b_index, k_index = torch.tensor(places, device=h.device).T
    cache, first = model.begin_thoughts(h[b_index, k_index], max_thought_tokens)
    found: list[list[Thought]] = [[] for _ in complete]
    wanted: list[tuple[int, int, int]] = []  # (place, row, index in the row's list) of thoughts to decode
    ended: set[int] = set()
    for place, ((b, _), token) in enumerate(zip(places, first.tolist())):
        if b in ended:
            continue
        if token != model.config.thought_end:
            wanted.append((place, b, len(found[b])))
            if first_only:
                ended.add(b)
        found[b].append(trivial)
    if wanted:
        chosen = torch.tensor([place for place, _, _ in wanted], device=h.device)
        decoded = model.finish_thoughts(cache.select(chosen), first[chosen], max_thought_tokens)
        for (_, b, i), thought in zip(wanted, decoded):
            found[b][i] = thought
    return found
