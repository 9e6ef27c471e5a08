"""How fast inference is, beside the limits of the machine that it runs on.

Every time is the median of repeats; warm-up and capture of graphs are apart. A share says how much
of the limit is reached: weight bytes over the measured copy bandwidth for decoding, operations over
the measured matrix rate for prefill.
"""
import time
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from functools import partial
from statistics import mean, median
from typing import Any

import torch

from minits.generation import GenerationConfig, generate_ids, prefill
from minits.prefill import DRAFTS, Intervention
from minits.thinking import Engine

Line = dict[str, Any]
WARM_UP = 2  # calls before those that count: the second, too, may be slow


def timed(function: Callable[[], object], repeats: int) -> Line:
    """Milliseconds: median, least, most of `repeats` calls, and the first (compiling, capture)."""
    return summary(*time_interleaved([function], repeats))


def time_interleaved(functions: Sequence[Callable[[], object]], repeats: int) -> list[list[float]]:
    """Milliseconds of every call of each function: WARM_UP, then `repeats`.

    The functions take turns: a slow moment hits all of them.
    """
    times = [[] for _ in functions]
    for _ in range(WARM_UP + repeats):
        for function, mine in zip(functions, times):
            synchronise()
            start = time.perf_counter()
            function()
            synchronise()
            mine.append((time.perf_counter() - start) * 1e3)
    return times


def summary(times: Sequence[float]) -> Line:
    """What `timed` says of these calls."""
    rest = times[WARM_UP:]
    return {"ms": median(rest), "least": min(rest), "most": max(rest), "first": times[0]}


def ratio(over: Sequence[float], under: Sequence[float]) -> Line:
    """How many times longer one of two that took turns took: median over median.

    Beside it median, least and most of the rounds' own ratios.
    """
    over, under = over[WARM_UP:], under[WARM_UP:]
    found = [one / other for one, other in zip(over, under)]
    return {
        "ratio": median(over) / median(under),
        "ratio_by_round": {"median": median(found), "least": min(found), "most": max(found)},
    }


def synchronise() -> None:
    """Waits for the card, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def machine_limits(device: str | torch.device, dtype: torch.dtype) -> Line:
    """Measured copy bandwidth (TB/s, read and written) and matrix rate (TFLOP/s)."""
    size, n = (1 << 30, 8192) if torch.device(device).type == "cuda" else (1 << 26, 1024)
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a = torch.randn(n, n, device=device).to(dtype)
    copy = timed(lambda: target.copy_(source), 10)["ms"]
    product = timed(lambda: a @ a, 10)["ms"]
    return {
        "what": "limits",
        "copy_TB_per_s": 2 * size / copy / 1e9,
        "matmul_TFLOP_per_s": 2 * n**3 / product / 1e9,
    }


class LaidDown(Intervention):
    """Every chunk in `where` thinks `length` tokens, the others nothing.

    T runs in full, as many steps as such a thought takes, so the time is that of a model which
    thinks so.
    """

    def __init__(self, engine: Engine, where: Container[int], length: int) -> None:
        end = engine.config.thought_end
        self.where, self.trivial = where, [end]
        self.full = [(end + 1) % 1000] * length + [end]  # any token but EOS

    def thought(self, row: int, chunk: int) -> list[int]:
        """As laid down."""
        return self.full if chunk in self.where else self.trivial


def spread(count: int, places: int) -> set[int]:
    """`count` of the numbers 0 … places - 1, evenly apart."""
    return {int((i + 0.5) * places / count) for i in range(count)}


def weights_bytes(engine: Engine) -> int:
    """Bytes of weights that a plain decoding step reads: layers, norm and unembedding."""
    model, head = engine.backbone.model, engine.backbone.lm_head
    parts = [*model.layers.parameters(), model.norm.weight, head.weight]
    return sum(part.nbytes for part in parts)


def prompt_of(tokens: int) -> list[int]:
    """A made-up prompt, of ids that every vocabulary of 1000 has."""
    return [5 + 37 * i % 990 for i in range(tokens)]


def bench_decode(
    engine: Engine, limits: Line, batches: Sequence[int], repeats: int
) -> Iterator[Line]:
    """Tokens/s of decoding after a prompt of 128 tokens, beside the limit of plain decoding.

    Plain for each of `batches`; then, for one row, with thoughts of 1 and of 8 tokens laid down
    after every chunk.
    """
    new, c = 64, engine.config.chunk_size

    def line(what: str, batch: int, config: GenerationConfig) -> Line:
        prompts = [prompt_of(128 // c * c)] * batch
        sides = [
            partial(generate_ids, engine, prompts, **vars(replace(config, max_new_tokens=tokens)))
            for tokens in (1, new + 1)
        ]
        one, many = map(summary, time_interleaved(sides, repeats))
        rate = batch * new / (many["ms"] - one["ms"]) * 1e3
        limit = batch * limits["copy_TB_per_s"] * 1e12 / weights_bytes(engine)
        return {
            "what": what,
            "batch": batch,
            "tokens_per_s": rate,
            "limit": limit,
            "share": rate / limit,
            "prefill_128": one,
            "with_64_more": many,
        }

    for batch in batches:
        yield line("decode, plain", batch, GenerationConfig(think=False, eos_ids=[]))
    for length in (1, 8):
        hook = LaidDown(engine, range(128 // c, 128), length)  # the chunks after the prompt
        config = GenerationConfig(eos_ids=[], max_thought_tokens=32, hook=hook)
        found = line("decode, thinking after every chunk", 1, config)
        yield {"thought_tokens": length} | found


def bench_prefill(
    engine: Engine, limits: Line, chunks: int, counts: Sequence[int], repeats: int
) -> Iterator[Line]:
    """Prefill of `chunks` (K) whole chunks: plain, then sequential against `trivial`.

    counts: of thoughts that are laid down (R), of 1 and of 8 tokens.

    passes_ratio: K passes over R + 1. That is what to expect if a pass costs the same at any width.
    It does not, a wide one costs more; but the lower and upper layers run once instead of K times,
    so it is no strict bound.
    """
    ids = prompt_of(chunks * engine.config.chunk_size)
    parameters = sum(p.numel() for p in engine.backbone.model.layers.parameters())
    operations = 2 * parameters * len(ids) / 1e9
    nothing = GenerationConfig(max_new_tokens=1, think=False)
    plain = timed(lambda: prefill(engine, [ids], nothing), repeats)
    yield {
        "what": "prefill, plain",
        "tokens": len(ids),
        **plain,
        "share": operations / limits["matmul_TFLOP_per_s"] / plain["ms"],
    }
    for count in counts:
        laid_down = spread(count, chunks - 1)  # in chunks that another one follows
        for length in (1, 8) if count else (1,):
            hook = LaidDown(engine, laid_down, length)
            config = GenerationConfig(max_new_tokens=1, max_thought_tokens=32, hook=hook)
            ways = [replace(config, prefill="sequential"), config]
            sides = [partial(prefill, engine, [ids], way) for way in ways]
            sequential, trivial = time_interleaved(sides, repeats)
            yield {
                "what": "prefill, trivial over sequential",
                "chunks": chunks,
                "R": count,
                "thought_tokens": length,
                "sequential": summary(sequential),
                "trivial": summary(trivial),
                **ratio(sequential, trivial),
                "passes_ratio": chunks / (count + 1),
            }


def ways_of_reading(*aheads: int | None) -> list[Line]:
    """Sequential, then speculative with each draft under each lookahead."""
    return [{"prefill": "sequential", "draft": "trivial", "lookahead": None}] + [
        {"prefill": "speculative", "draft": draft, "lookahead": ahead}
        for ahead in aheads
        for draft in DRAFTS
    ]


def bench_drafts(engine: Engine, prompts: list[list[int]], repeats: int) -> Iterator[Line]:
    """Prefill of real prompts, one at a time, with a model's own thoughts: every way of reading.

    Each takes turns with sequential reading, which comes first, alone. `carry` is measured only
    so: laid-down thoughts would flatter it.
    """
    ways = ways_of_reading(None, 1, 2, 4)
    sequential = ways[0]

    def read(way: Line) -> list[int]:
        config = GenerationConfig(max_new_tokens=1, **way)
        return [prefill(engine, [ids], config).rounds[0] for ids in prompts]

    for way in ways:
        sides = [way] if way is sequential else [way, sequential]
        times = time_interleaved([partial(read, side) for side in sides], repeats)
        taken, beside = times[0], times[-1]
        compared = ratio(taken, beside)
        yield {
            "what": "prefill by a trained model",
            "prompts": len(prompts),
            **way,
            "rounds": mean(read(way)),
            "time": summary(taken),
            "sequential": summary(beside),
            "over_sequential": compared["ratio"],
            "ratio_by_round": compared["ratio_by_round"],
        }


def bench(engine: Engine, part: str, repeats: int) -> Iterator[Line]:
    """The measurements of `part`: "prefill", "decode" or "all", one dict a line."""
    limits = machine_limits(engine.device, engine.backbone.lm_head.weight.dtype)
    yield limits | {"weights_GB": weights_bytes(engine) / 1e9}
    cuda = engine.device.type == "cuda"
    if part in ("decode", "all"):
        yield from bench_decode(engine, limits, (1, 64) if cuda else (1,), repeats)
    if part in ("prefill", "all"):
        for chunks in (8, 16, 32, 64, 128) if cuda else (16,):
            yield from bench_prefill(engine, limits, chunks, [0, 2, 5, chunks - 1], repeats)
