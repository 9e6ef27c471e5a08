"""`run.py bench`: how fast inference is, beside the limits of the machine it runs on.

Every time is the median of repeats, warm-up and graph capture apart. A share says how much of the limit is reached:
weight bytes over the measured copy bandwidth for decoding, operations over the measured matrix rate for prefill.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Container
from statistics import median

import torch

from minits.generation import GenerationConfig, decode, generate_ids, prefill
from minits.thinking import OpenThoughts, Thought, ThinkingStates, on_device


def timed(function: Callable[[], object], repeats: int) -> dict:
    """Milliseconds: median, least and most of `repeats` calls, and the first call (compilation, capture, caches)."""
    def once() -> float:
        synchronise()
        start = time.perf_counter()
        function()
        synchronise()
        return (time.perf_counter() - start) * 1e3

    first = once()
    once()
    times = [once() for _ in range(repeats)]
    return {"ms": median(times), "least": min(times), "most": max(times), "first": first}


def synchronise() -> None:
    """Waits for the card, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def machine_limits(device: torch.device, dtype: torch.dtype) -> dict:
    """Measured copy bandwidth (bytes/s, read and written) and matrix rate (operations/s) in `dtype`."""
    size, n = (1 << 30, 8192) if device.type == "cuda" else (1 << 26, 1024)
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a = torch.randn(n, n, device=device).to(dtype)
    copy = timed(lambda: target.copy_(source), 10)["ms"]
    product = timed(lambda: a @ a, 10)["ms"]
    return {"bandwidth": 2 * size / copy * 1e3, "matmul": 2 * n ** 3 / product * 1e3}


class Forced(torch.nn.Module):
    """A model whose thoughts are laid down: chunk k thinks `length` tokens if it is in `where`, else nothing.

    T runs in full, as many steps as such a thought takes, and only its result is overridden, so that the time is that
    of a model which thinks so. For one row of whole chunks; sequential reading asks chunk by chunk (set `next` to 0
    before each), speculation with trivial drafts asks for all chunks from some one to the last.
    """

    def __init__(self, model: ThinkingStates, chunks: int, where: Container[int], length: int, *,
                 sequential: bool) -> None:
        super().__init__()
        self.model, self.chunks, self.where, self.length = model, chunks, where, length
        self.sequential, self.next, self.steps = sequential, 0, 0
        self.end = model.config.thought_end
        self.word = (self.end + 1) % 1000  # what all thoughts consist of

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.model, name)

    def begin_thoughts(self, h: torch.Tensor, max_thought_tokens: int) -> OpenThoughts:
        """The real pass of T; which chunks think is then read from the plan."""
        thoughts = self.model.begin_thoughts(h, max_thought_tokens)
        start = self.next if self.sequential else self.chunks - len(h)
        self.next, self.steps = self.next + 1, 0
        plan = [self.word if start + i in self.where else self.end for i in range(len(h))]
        thoughts.tokens[:len(h)] = on_device(plan, h.device)
        return thoughts

    def think_step(self, thoughts: OpenThoughts) -> None:
        """The real step of T; its token is then the plan's."""
        self.model.think_step(thoughts)
        self.steps += 1
        thoughts.tokens.fill_(self.word if self.steps < self.length else self.end)

    def finish_thoughts(self, thoughts: OpenThoughts) -> list[Thought]:
        """As the model does it, step by step."""
        return ThinkingStates.finish_thoughts(self, thoughts)


def spread(count: int, places: int) -> set[int]:
    """`count` of the numbers 0 … places - 1, evenly apart."""
    return {int((i + 0.5) * places / count) for i in range(count)}


def weights_bytes(model: ThinkingStates) -> int:
    """Bytes of weights that one plain decoding step reads: layers, norm and unembedding."""
    backbone = model.backbone
    parts = [*backbone.model.layers.parameters(), backbone.model.norm.weight, backbone.lm_head.weight]
    return sum(p.numel() * p.element_size() for p in parts)


def prompt_of(tokens: int) -> list[int]:
    """Some ids."""
    return [5 + 37 * i % 990 for i in range(tokens)]


def bench_decode(model: ThinkingStates, limits: dict, *, batches: tuple[int, ...], repeats: int) -> list[dict]:
    """Tokens/s of decoding after a prompt of 128 tokens, beside the bandwidth limit of plain decoding.

    Plain for each of `batches`; then, for one row, with thoughts of 1 and of 8 tokens laid down after every chunk.
    """
    lines, new, c = [], 64, model.config.chunk_size

    def line(what: str, batch: int, run: Callable[[int], None]) -> dict:
        one, many = timed(lambda: run(1), repeats), timed(lambda: run(new + 1), repeats)
        rate, limit = batch * new / (many["ms"] - one["ms"]) * 1e3, batch * limits["bandwidth"] / weights_bytes(model)
        return {"what": what, "batch": batch, "tokens_per_s": rate, "limit": limit, "share": rate / limit,
                "prefill_128": one, "with_64_more": many}

    for batch in batches:
        lines.append(line("decode, plain", batch, lambda tokens, batch=batch: generate_ids(
            model, [prompt_of(128)] * batch, max_new_tokens=tokens, think=False, eos_ids=[])))
    for length in (1, 8):
        forced = Forced(model, 0, range(128 // c, 128), length, sequential=True)

        def run(tokens: int, forced=forced) -> None:
            forced.next = 0
            generate_ids(forced, [prompt_of(128 // c * c)], max_new_tokens=tokens, prefill="sequential", eos_ids=[],
                         max_thought_tokens=32)
        lines.append({"thought_tokens": length} | line("decode, thinking after every chunk", 1, run))
    return lines


def bench_prefill(model: ThinkingStates, limits: dict, *, chunks: int, where: list[int], lengths: tuple[int, ...],
                  repeats: int) -> list[dict]:
    """Prefill of `chunks` whole chunks: plain, then sequential against `trivial` with R thoughts laid down.

    `passes_ratio` is K passes over R + 1: what to expect if a pass costs the same at any width (it does not: a wide one
    costs more; but the lower and upper layers run once instead of K times, so it is no strict bound).
    """
    c, lines = model.config.chunk_size, []
    ids = prompt_of(chunks * c)
    parameters = sum(p.numel() for p in model.backbone.model.layers.parameters())
    plain = timed(lambda: prefill(model, [ids], GenerationConfig(max_new_tokens=1, think=False)), repeats)
    lines.append({"what": "prefill, plain", "tokens": len(ids)} | plain |
                 {"share": 2 * parameters * len(ids) / limits["matmul"] / plain["ms"] * 1e3})
    for count in where:
        laid_down = spread(count, chunks - 1)  # in every chunk that another one follows, for count = chunks - 1
        for length in lengths if count else lengths[:1]:
            times = {}
            for how in ("sequential", "speculative"):
                forced = Forced(model, chunks, laid_down, length, sequential=how == "sequential")
                config = GenerationConfig(max_new_tokens=1, prefill=how, max_thought_tokens=32)
                reading = prefill(forced, [ids], config)
                entered = sum(not z.trivial for z in reading.thoughts[0][:-1])
                if entered != count:
                    raise RuntimeError(f"bench: {entered} thoughts entered where {count} were laid down")

                def run(forced=forced, config=config) -> None:
                    forced.next = 0
                    prefill(forced, [ids], config)
                times[how] = timed(run, repeats)
            ratio = times["sequential"]["ms"] / times["speculative"]["ms"]
            lines.append({"what": "prefill, trivial over sequential", "chunks": chunks, "R": count,
                          "thought_tokens": length, "sequential": times["sequential"], "trivial": times["speculative"],
                          "ratio": ratio, "passes_ratio": chunks / (count + 1)})
    return lines


def bench_end_to_end(model: ThinkingStates, *, chunks: int, steps: int, length: int, answer: int,
                     repeats: int) -> dict:
    """Thinking States (steps laid down while reading) against CoT (the same steps decoded), to the same answer."""
    ids = prompt_of(chunks * model.config.chunk_size)
    where = spread(steps, chunks - 1)
    forced = Forced(model, chunks, where, length, sequential=False)
    config = GenerationConfig(max_new_tokens=answer, eos_ids=[], think_while_decoding=False, max_thought_tokens=32)

    def thinking() -> None:
        list(decode(forced, prefill(forced, [ids], config), config))

    def chain() -> None:
        generate_ids(model, [ids], max_new_tokens=answer + steps * length, think=False, eos_ids=[])
    ours, theirs = timed(thinking, repeats), timed(chain, repeats)

    # The bound: the same passes, each at the speed it has alone. A round costs what a plain prefill of its chunks does
    # (less the layers that run once); a thought its T steps, measured as one long thought; an answer token its step.
    def plain_prefill(width: int) -> float:
        config = GenerationConfig(max_new_tokens=1, think=False)
        return timed(lambda: prefill(model, [ids[:width * model.config.chunk_size]], config), repeats)["ms"]
    starts = [0, *(k + 1 for k in sorted(where))]
    rounds = sum(plain_prefill(chunks - start) for start in starts)
    h = torch.zeros(1, model.config.chunk_size, model.backbone.config.hidden_size, device=model.device,
                    dtype=model.backbone.lm_head.weight.dtype)

    def think(tokens: int) -> None:
        thoughts = model.begin_thoughts(h, 32)
        for _ in range(tokens):
            model.think_step(thoughts)
            thoughts.newest()
    token = (timed(lambda: think(25), repeats)["ms"] - timed(lambda: think(9), repeats)["ms"]) / 16
    step = (theirs["ms"] - plain_prefill(chunks)) / (answer + steps * length - 1)
    bound = theirs["ms"] / (rounds + steps * (length + 1) * token + (answer - 1) * step)
    ratio = theirs["ms"] / ours["ms"]
    return {"what": "end to end, CoT over Thinking States", "chunks": chunks, "steps": steps, "step_tokens": length,
            "answer_tokens": answer, "cot": theirs, "thinking": ours, "ratio": ratio, "bound": bound,
            "share": ratio / bound, "rounds_ms": rounds, "thought_token_ms": token, "answer_token_ms": step}


def bench_drafts(model: ThinkingStates, prompts: list[list[int]], repeats: int) -> list[dict]:
    """Prefill of real prompts by a trained model, one at a time, with its own thoughts: every way beside sequential.

    `carry` and `both` are measured only so, for laid-down thoughts would flatter them.
    """
    lines = []
    ways = [("sequential", "trivial", None), *(("speculative", draft, window) for window in (None, 1, 2, 4)
                                               for draft in ("trivial", "carry", "both"))]
    for how, draft, window in ways:
        config = GenerationConfig(max_new_tokens=1, prefill=how, draft=draft, window=window)
        rounds: list[int] = []

        def run(config=config, rounds=rounds) -> None:
            rounds[:] = [prefill(model, [ids], config).rounds[0] for ids in prompts]
        time_taken = timed(run, repeats)
        lines.append({"what": "prefill by a trained model", "prompts": len(prompts), "prefill": how, "draft": draft,
                      "window": window, "rounds": sum(rounds) / len(rounds), "time": time_taken,
                      "over_sequential": time_taken["ms"] / (lines[0]["time"]["ms"] if lines else time_taken["ms"])})
    return lines


def bench_transformers(folder: str, device: torch.device, dtype: torch.dtype, repeats: int) -> list[dict]:
    """The same plain prefill and decoding in transformers, where it is installed; else nothing.

    Eager, and on CUDA also with its static cache, for which `generate` compiles the decoding step (CUDA graphs).
    """
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        return []
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    ids, lines = torch.tensor([prompt_of(128)], device=device), []
    ways = {"eager": {}, "static cache and compile": {"cache_implementation": "static"}}
    for way, options in ways.items() if device.type == "cuda" else [("eager", {})]:
        def run(tokens: int, options=options) -> None:
            model.generate(ids, min_new_tokens=tokens, max_new_tokens=tokens, do_sample=False, pad_token_id=0, **options)
        one, many = timed(lambda: run(1), repeats), timed(lambda: run(65), repeats)
        lines.append({"what": f"transformers {way}, decode", "batch": 1, "prefill_128": one, "with_64_more": many,
                      "tokens_per_s": 64 / (many["ms"] - one["ms"]) * 1e3})
    return lines


def bench(model: ThinkingStates, folder: str, *, parts: str, repeats: int) -> list[dict]:
    """All measurements of `parts` ("prefill", "decode", "end-to-end" or "all") on `model`, one dict a line."""
    device, dtype = model.device, model.backbone.lm_head.weight.dtype
    limits = machine_limits(device, dtype)
    lines = [{"what": "limits", "copy_TB_per_s": limits["bandwidth"] / 1e12, "matmul_TFLOP_per_s": limits["matmul"] / 1e12,
              "weights_GB": weights_bytes(model) / 1e9}]
    cuda = device.type == "cuda"
    if parts in ("decode", "all"):
        lines += bench_decode(model, limits, batches=(1, 64) if cuda else (1,), repeats=repeats)
    if parts in ("prefill", "all"):
        for chunks in (8, 16, 32, 64, 128) if cuda else (16,):
            lines += bench_prefill(model, limits, chunks=chunks, where=[0, 2, 5, chunks - 1], lengths=(1, 8),
                                   repeats=repeats)
    if parts in ("end-to-end", "all"):
        lines.append(bench_end_to_end(model, chunks=16, steps=3, length=8, answer=8, repeats=repeats))
    if parts in ("decode", "all"):
        lines += bench_transformers(folder, device, dtype, repeats)
    return lines
