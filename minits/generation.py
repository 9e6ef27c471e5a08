"""Answers from prompts: `generate` takes texts, `generate_ids` ids; `stream_ids` yields events.

    prompts -> prefill.py -> Reading -> decode -> (row, token | Thought) events -> GenerationResult

Decoding is greedy. It goes on thinking: a chunk that generated tokens complete gives a thought and
a state too. So does the paper for the prompt's last chunk (footnote in section 3), but it leaves
thoughts within the answer to future work; `think_while_decoding=False` has neither.
"""
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from minits.prefill import (
    DRAFTS,
    NOTHING,
    Intervention,
    Reading,
    prefill_sequential,
    prefill_speculative,
    thoughts_after,
)
from minits.settings import check_settings, setting
from minits.supervision import encode_prompt
from minits.tensors import on_device
from minits.thinking import Engine, Thought

PREFILLS = ("speculative", "sequential")
Event = int | Thought  # what a row gives: a token of its answer, or a thought
Listener = Callable[[int, Event], None]  # told (row, event) as they come


@dataclass(frozen=True)
class GenerationConfig:
    """How to generate. Token counts are per row or per thought."""

    max_new_tokens: int = setting(64, "longest answer, in tokens", least=1)
    max_thought_tokens: int | None = setting(
        None, "longest thought, in tokens; it is cut there; default: as in training", least=1
    )
    prefill: str = setting(
        "speculative",
        "how prompts are read: the same result either way",
        choices=PREFILLS,
    )
    draft: str = setting(
        "trivial", "what speculation expects of thoughts not yet known", choices=DRAFTS
    )
    lookahead: int | None = setting(
        None, "chunks to speculate ahead at first; default: to the end of the prompt", least=1
    )
    eos_ids: Sequence[int] | None = None  # ids that end an answer; None: the model's own
    think: bool = True  # False: plain Qwen2.5, no thought anywhere
    think_while_decoding: bool = True  # False: no thought after chunks with generated tokens
    hook: Intervention = NOTHING  # what T is made to say, what is read for a state

    def stops(self, engine: Engine) -> set[int]:
        """The ids that end an answer."""
        return set(engine.config.eos_ids if self.eos_ids is None else self.eos_ids)

    def check(self, engine: Engine) -> None:
        """Raises ValueError naming a value that cannot be, or that does not fit the model."""
        check_settings(self)
        if self.max_thought_tokens:
            asked = replace(engine.config, max_thought_tokens=self.max_thought_tokens)
            asked.check(engine.backbone.config)

    def check_prompt(self, engine: Engine, ids: Sequence[int], name: str) -> None:
        """Raises ValueError, calling it `name`, for a prompt that does not fit the model."""
        qwen = engine.backbone.config
        limit, vocabulary = qwen.max_position_embeddings, qwen.vocab_size
        if not ids:
            raise ValueError(
                f"{name} is empty: it has 0 tokens, and there is no start token in Qwen2.5 to "
                "stand for it. Give at least one character of text."
            )
        if wrong := [i for i in ids if not 0 <= i < vocabulary]:
            raise ValueError(
                f"{name}: id {wrong[0]} is outside the vocabulary (0 … {vocabulary - 1})."
            )
        # The last generated token is never read, so it needs no position.
        room = limit - len(ids) + 1
        if self.max_new_tokens > room:
            shorter = f" or lower max_new_tokens to {room}" if room > 0 else ""
            raise ValueError(
                f"{name} has {len(ids)} tokens; with up to {self.max_new_tokens} new ones it needs "
                f"{len(ids) + self.max_new_tokens - 1} positions, but the model has {limit} "
                f"(max_position_embeddings). Shorten it{shorter}."
            )


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


def prefill(
    engine: Engine, prompts: Sequence[Sequence[int]], config: GenerationConfig
) -> Reading:
    """Reads the prompts in the way that `config` says. Raises ValueError for what does not fit."""
    config.check(engine)
    for number, ids in enumerate(prompts):
        config.check_prompt(engine, ids, f"prompt {number}")
    slots = max(map(len, prompts)) + config.max_new_tokens - 1
    how = {"limit": config.max_thought_tokens, "thinks": config.think, "hook": config.hook}
    if config.prefill == "sequential":
        return prefill_sequential(engine, prompts, slots, **how)
    how |= {"draft": config.draft, "lookahead": config.lookahead}
    return prefill_speculative(engine, prompts, slots, **how)


@torch.no_grad()
def decode(
    engine: Engine, reading: Reading, config: GenerationConfig
) -> Iterator[tuple[int, Event]]:
    """Continues each row greedily; yields (row, token or thought) in the order they arise.

    The thoughts of the prompts come first. A token counts as read once it passed the backbone. The
    last one of a row (EOS, or at the length limit) is not read, so it completes no chunk.
    """
    c, device, cache = engine.config.chunk_size, engine.device, reading.cache
    stops = config.stops(engine)
    for row, thoughts in enumerate(reading.thoughts):
        for thought in thoughts:
            yield row, thought
    thinks = config.think and config.think_while_decoding and engine.thinks
    tokens = engine.next_ids(reading.out).tolist()  # [B] picked, not yet read
    left = [config.max_new_tokens] * len(tokens)  # that each row may still give
    active = list(range(len(tokens)))

    def tell(rows: list[int], newest: list[int]) -> Generator[tuple[int, Event], None, list[int]]:
        """Yields the newest token of each of `rows`; returns those that go on."""
        for row in rows:
            left[row] -= 1
            yield row, newest[row]
        return [row for row in rows if newest[row] not in stops and left[row] > 0]

    while active:
        active = yield from tell(active, tokens)
        if not active:
            return
        # No row thinks before one completes its chunk, so that many tokens are read before the host
        # looks at them. A row that ends earlier reads on in vain.
        steps = min(min(c - reading.lengths[row] % c, left[row]) for row in active)
        starts = [cache.trash] * len(tokens)
        for row in active:
            starts[row] = reading.lengths[row]
        *between, tokens = engine.read_tokens(
            on_device(tokens, device),
            on_device(starts, device),
            reading.state,
            reading.open_h,
            cache,
            steps,
        ).tolist()  # [steps, B]
        for picked in between:
            active = yield from tell(active, picked)
        for row in active:
            reading.lengths[row] += steps
        complete = [row for row in active if reading.lengths[row] % c == 0]
        if complete and thinks:
            places = [(row, len(reading.thoughts[row])) for row in complete]
            h = reading.open_h[on_device(complete, device)]
            thoughts = thoughts_after(engine, h, places, config.max_thought_tokens, config.hook)
            reading.add_thoughts(engine, complete, thoughts, config.hook)
            yield from zip(complete, thoughts)
        elif complete:
            reading.state[on_device(complete, device)] = 0.0


def stream_ids(engine: Engine, prompt: Sequence[int], **options) -> Iterator[Event]:
    """Events of one prompt as they come: its thoughts, then answer tokens and thoughts between.

    options: the fields of `GenerationConfig`.
    """
    config = GenerationConfig(**options)
    for _, event in decode(engine, prefill(engine, [prompt], config), config):
        yield event


def generate_ids(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    listen: Listener | None = None,
    **options,
) -> list[GenerationResult]:
    """Answers for `prompts` (lists of ids) as one batch; each is that of its prompt alone.

    options: the fields of `GenerationConfig`. listen: told each event as it comes, the thoughts of
    the prompts first. Raises ValueError for what does not fit.
    """
    if not prompts:
        return []
    config = GenerationConfig(**options)
    return decode_all(engine, prefill(engine, prompts, config), config, listen)


def decode_all(
    engine: Engine,
    reading: Reading,
    config: GenerationConfig,
    listen: Listener | None = None,
) -> list[GenerationResult]:
    """Continues each row to its end; listen: as for `generate_ids`."""
    answers = [[] for _ in reading.lengths]
    for row, event in decode(engine, reading, config):
        if listen:
            listen(row, event)
        if isinstance(event, int):
            answers[row].append(event)
    return results(engine, reading, config, answers)


def results(
    engine: Engine,
    reading: Reading,
    config: GenerationConfig,
    answers: Sequence[list[int]],
) -> list[GenerationResult]:
    """What each row gave, from all that was thought and said."""
    found, stops = [], config.stops(engine)
    for row, thoughts in enumerate(reading.thoughts):
        K = sum(reading.accepted[row])  # every chunk of the prompt became final once
        entering = thoughts[: K - 1]  # those that a chunk of the prompt has read
        found.append(
            GenerationResult(
                ids=answers[row],
                thought_ids=[thought.ids for thought in thoughts],
                rounds=reading.rounds[row],
                nontrivial=sum(not thought.trivial for thought in entering),
                stop_reason="eos" if answers[row][-1] in stops else "length",
                cut_thoughts=[k for k, thought in enumerate(thoughts) if thought.cut],
                chunk_passes=reading.chunk_passes[row],
                accepted=reading.accepted[row],
            )
        )
    return found


def generate(
    engine: Engine,
    tokenizer,
    prompts: Sequence[str],
    **options,
) -> list[GenerationResult]:
    """Answers for `prompts` (texts), with the texts of answer and thoughts filled in.

    tokenizer: that of `load`. options: the fields of `GenerationConfig`, max_new_tokens, prefill
    and hook (an `Intervention`) among them, and `listen` of `generate_ids`, whose errors it raises.
    """
    if isinstance(prompts, str):
        raise ValueError(f"prompts is one text; give a list of texts: [{prompts[:40]!r}].")
    ids = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    return [with_texts(result, tokenizer) for result in generate_ids(engine, ids, **options)]


def with_texts(result: GenerationResult, tokenizer) -> GenerationResult:
    """`result` with the texts of its answer and thoughts."""
    thoughts = [tokenizer.decode(ids[:-1]) for ids in result.thought_ids]
    text = tokenizer.decode(tokenizer.without_eos(result.ids))
    return replace(result, text=text, thoughts=thoughts)
