"""Answers from prompts: `generate` takes text, `generate_ids` takes ids, `stream_ids` yields events as they come.

    prompts -> prefill.py -> Reading -> decode -> (row, token | Thought) events -> GenerationResult

Decoding is greedy. It goes on thinking: a chunk that generated tokens complete gives a thought and a state too.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec

import torch
from torch import Tensor

from minits.prefill import DRAFTS, Reading, prefill_sequential, prefill_speculative, take_in
from minits.qwen import pack
from minits.thinking import Thought, ThinkingStates, on_device

PREFILLS = ("speculative", "sequential")


@dataclass(frozen=True)
class GenerationConfig:
    """How to generate. Token counts are per row or per thought."""

    max_new_tokens: int = 64
    prefill: str = "speculative"
    draft: str = "trivial"
    window: int | None = None  # chunks to speculate ahead at first; None: to the end of the prompt
    eos_ids: Sequence[int] | None = None  # ids that end an answer; None: the model's own
    max_thought_tokens: int = 64  # a longer thought is closed there and marked as cut
    think: bool = True  # False: plain Qwen2.5, no thought anywhere
    think_while_decoding: bool = True  # False: thoughts in the prompt only, for comparison

    def stops(self, model: ThinkingStates) -> set[int]:
        """The ids that end an answer."""
        return set(model.config.eos_ids if self.eos_ids is None else self.eos_ids)

    def check(self, model: ThinkingStates, prompts: Sequence[Sequence[int]]) -> int:
        """Cache slots a row needs; raises ValueError naming the value or the prompt that does not fit."""
        for name, value, allowed in (("prefill", self.prefill, PREFILLS), ("draft", self.draft, DRAFTS)):
            if value not in allowed:
                raise ValueError(f"{name} {value!r} is not known; use one of {', '.join(allowed)}.")
        limit, vocabulary = model.backbone.config.max_position_embeddings, model.backbone.config.vocab_size
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; at least 1 token must be generated.")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is {self.window}; speculate at least 1 chunk ahead, or leave it out.")
        if not 1 <= self.max_thought_tokens <= limit - model.config.chunk_size:
            raise ValueError(f"max_thought_tokens is {self.max_thought_tokens}; with chunks of "
                             f"{model.config.chunk_size} it must lie in 1 … {limit - model.config.chunk_size}.")
        for number, ids in enumerate(prompts):
            if not ids:
                raise ValueError(f"prompt {number} is empty: it has 0 tokens, and there is no start token in Qwen2.5 "
                                 "to stand for it. Give at least one character of text.")
            if wrong := [i for i in ids if not 0 <= i < vocabulary]:
                raise ValueError(f"prompt {number}: id {wrong[0]} is outside the vocabulary (0 … {vocabulary - 1}).")
            # The last generated token is never read, so it needs no position.
            if len(ids) + self.max_new_tokens - 1 > limit:
                raise ValueError(
                    f"prompt {number} has {len(ids)} tokens; with up to {self.max_new_tokens} new ones it needs "
                    f"{len(ids) + self.max_new_tokens - 1} positions, but the model has {limit} "
                    f"(max_position_embeddings). Shorten it" +
                    (f" or lower max_new_tokens to {limit - len(ids) + 1}." if len(ids) <= limit else "."))
        return max((len(ids) for ids in prompts), default=0) + self.max_new_tokens - 1


@dataclass(frozen=True)
class GenerationResult:
    """What one prompt gave. `generate_ids` leaves the two texts empty; `generate` fills them."""

    ids: list[int]  # the answer, closing EOS included where there is one
    thought_ids: list[list[int]]  # one list for each complete chunk, closing EOS included
    rounds: int  # passes over the prompt
    nontrivial: int  # |R|: non-trivial thoughts that entered a chunk of the prompt
    stop_reason: str  # "eos" or "length"
    cut_thoughts: list[int]  # chunks whose thought was closed by max_thought_tokens
    chunk_passes: int  # chunks run through the middle layers during prefill, all rounds together
    accepted: list[int]  # chunks that became final, round by round
    text: str = ""
    thoughts: list[str] = field(default_factory=list)


def prefill(model: ThinkingStates, prompts: Sequence[Sequence[int]], config: GenerationConfig) -> Reading:
    """Reads the prompts in the way `config` says."""
    slots = config.check(model, prompts)
    if config.prefill == "sequential":
        return prefill_sequential(model, prompts, slots, config.max_thought_tokens, think=config.think)
    return prefill_speculative(model, prompts, slots, config.max_thought_tokens, config.draft, config.window,
                               think=config.think)


@torch.no_grad()
def decode(model: ThinkingStates, reading: Reading, config: GenerationConfig) -> Iterator[tuple[int, int | Thought]]:
    """Continues each row of `reading` greedily; yields (row, token id) and (row, Thought) in the order they arise.

    A token counts as read once it passed the backbone. The last one of a row (EOS, or at the length limit) is not
    read, so it completes no chunk. While a row thinks the others wait.
    """
    c, device, waste = model.config.chunk_size, model.device, reading.cache.waste
    stops, thinks = config.stops(model), config.think and config.think_while_decoding and model.thinks
    tokens = model.pick(model.backbone.lm_head(reading.out)).tolist()  # [B] picked, not yet read
    left = [config.max_new_tokens] * len(tokens)
    reading_on = list(range(len(tokens)))
    while True:
        for b in reading_on:
            yield b, tokens[b]
            left[b] -= 1
        reading_on = [b for b in reading_on if tokens[b] not in stops and left[b]]
        if not reading_on:
            return
        # Until some row completes a chunk nothing needs the host, so that many steps run before it looks at the
        # tokens. A row that meets its end in between reads on for nothing; rows that do not read go to waste.
        steps = min(min(left[b], c - reading.lengths[b] % c) for b in reading_on)
        at = [reading.lengths[b] if b in reading_on else waste for b in range(len(tokens))]
        picked = model.read_tokens(
            on_device(tokens, device), on_device(at, device), reading.state, reading.open_h, reading.cache,
            steps=steps, span=max(at[b] for b in reading_on) + steps).tolist()  # [steps, B]
        for row in picked[:-1]:
            for b in reading_on:
                yield b, row[b]
                left[b] -= 1
            reading_on = [b for b in reading_on if row[b] not in stops]
        for b in reading_on:
            tokens[b] = picked[-1][b]
            reading.lengths[b] += steps
        complete = [b for b in reading_on if reading.lengths[b] % c == 0]
        if complete and thinks:
            h = reading.open_h[on_device(complete, device)]
            thoughts = model.finish_thoughts(model.begin_thoughts(h, config.max_thought_tokens))
            take_in(model, reading, complete, thoughts)
            yield from zip(complete, thoughts)
        else:
            reading.state[on_device(complete, device)] = 0.0


def read_on(model: ThinkingStates, reading: Reading, config: GenerationConfig) -> Iterator[tuple[int, int | Thought]]:
    """All events of a batch as (row, token or Thought): the thoughts of the prompts first, then `decode`."""
    for b, thoughts in enumerate(reading.thoughts):
        for thought in thoughts:
            yield b, thought
    yield from decode(model, reading, config)


def stream_ids(model: ThinkingStates, prompt: Sequence[int], **options) -> Iterator[int | Thought]:
    """Events of one prompt as they come: the prompt's thoughts, then answer tokens and the thoughts between them."""
    config = GenerationConfig(**options)
    for _, event in read_on(model, prefill(model, [prompt], config), config):
        yield event


def generate_ids(model: ThinkingStates, prompts: Sequence[Sequence[int]], *,
                 listen: Callable[[int, int | Thought], None] | None = None, **options) -> list[GenerationResult]:
    """Answers for `prompts` (lists of ids), all in one batch; each row's result is that of the row alone.

    options: the fields of `GenerationConfig`. `listen` is told each event as it comes, as (row, token or Thought): the
    thoughts of the prompts first. Raises ValueError for a value or prompt that does not fit.
    """
    config = GenerationConfig(**options)
    if not prompts:
        return []
    reading = prefill(model, prompts, config)
    answers: list[list[int]] = [[] for _ in prompts]
    for b, event in read_on(model, reading, config):
        if listen:
            listen(b, event)
        if isinstance(event, int):
            answers[b].append(event)
    stops = config.stops(model)
    results = []
    for b, (prompt, answer, thoughts) in enumerate(zip(prompts, answers, reading.thoughts)):
        entering = thoughts[:-(-len(prompt) // model.config.chunk_size) - 1]  # those read by a chunk of the prompt
        results.append(GenerationResult(
            ids=answer, thought_ids=[z.ids for z in thoughts], rounds=reading.rounds[b],
            nontrivial=sum(not z.trivial for z in entering), stop_reason="eos" if answer[-1] in stops else "length",
            cut_thoughts=[k for k, z in enumerate(thoughts) if z.cut], chunk_passes=reading.chunk_passes[b],
            accepted=reading.accepted[b]))
    return results


def accelerate(model: ThinkingStates) -> ThinkingStates:
    """The model as fast as it gets where it is, for inference only: its own weights, repacked, so use the result alone.

    CUDA: graphs of fused kernels (fast.py); raises ValueError without triton. CPU: packed products, which decode 1.08
    times as fast. Same answers up to rounding.
    """
    if model.device.type == "cuda":
        if not find_spec("triton"):
            raise ValueError("the fast path on CUDA needs triton, which this build of torch came without: pip install "
                             "triton, or use the plain path (--plain).")
        from minits.fast.engine import FastThinkingStates
        return FastThinkingStates(model.eval())
    for layer in model.decoder_layers:
        pack(layer)
    return model.eval()


def generate(model: ThinkingStates, tokenizer, prompts: Sequence[str], max_new_tokens: int = 64,
             prefill: str = "speculative", **options) -> list[GenerationResult]:
    """Answers for `prompts` (texts), with texts of answer and thoughts filled in; further options as `generate_ids`."""
    encoded = [tokenizer.encode(prompt) for prompt in prompts]
    results = generate_ids(model, encoded, max_new_tokens=max_new_tokens, prefill=prefill, **options)
    return [with_texts(result, tokenizer) for result in results]


def with_texts(result: GenerationResult, tokenizer) -> GenerationResult:
    """`result` with the texts of its answer and thoughts."""
    return replace(result, text=tokenizer.decode(tokenizer.without_eos(result.ids)),
                   thoughts=[tokenizer.decode(ids[:-1]) for ids in result.thought_ids])
