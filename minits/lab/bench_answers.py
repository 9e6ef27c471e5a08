"""How long a whole answer takes, one prompt at a time: a thinking model beside another one.

All ways of reading take turns at every prompt, so a slow moment of the machine hits all of them.
"""
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from statistics import fmean, median
from typing import NamedTuple

from minits.generation import GenerationConfig, GenerationResult
from minits.lab.bench import Line, synchronise
from minits.methods import Method
from minits.prefill import DRAFTS
from minits.thinking import Engine

WAYS = [{"prefill": "sequential"}]
WAYS += [{"draft": draft, "lookahead": n} for n in (None, 1, 2) for draft in DRAFTS]


class Side(NamedTuple):
    """A trained model, and how it answers."""

    run: str
    engine: Engine
    method: Method
    prompts: Sequence[Sequence[int]]  # the same questions on both sides
    config: GenerationConfig

    def answer(self, number: int) -> tuple[float, GenerationResult]:
        """(milliseconds, result) of prompt `number`."""
        synchronise()
        start = time.perf_counter()
        (result,) = self.method.answer(self.engine, [self.prompts[number]], self.config)
        synchronise()
        return (time.perf_counter() - start) * 1e3, result


def bench_answers(thinking: Side, other: Side, repeats: int) -> Iterator[Line]:
    """A line for `other`, then one for each way in which the thinking model may read.

    ms: mean over prompts of the median of `repeats` passes, after one of warm-up. speed_up: over
    `other`.
    """
    ways = [thinking._replace(config=replace(thinking.config, **way)) for way in WAYS]
    sides = [other, *ways]
    numbers = range(len(other.prompts))
    taken: list[list[list[float]]] = [[[] for _ in numbers] for _ in sides]
    results: list[list[GenerationResult]] = [[] for _ in sides]
    for repeat in range(repeats + 1):
        for number in numbers:
            for side, times, found in zip(sides, taken, results):
                ms, result = side.answer(number)
                if repeat:
                    times[number].append(ms)
                else:
                    found.append(result)
    means = [fmean(map(median, times)) for times in taken]
    for side, ms, found in zip(sides, means, results):
        how = ("prefill", "draft", "lookahead") if side.method.thinks else ()
        line = {"what": "answers, one at a time", "run": side.run, "method": side.method.name}
        line |= {"options": asdict(side.method)}
        line |= {name: getattr(side.config, name) for name in how}
        line |= {"prompts": len(found), "ms": ms, "speed_up": means[0] / ms}
        yield line | {
            "rounds": fmean(result.rounds for result in found),
            "entered_and_one": fmean(result.nontrivial + 1 for result in found),
            "chunk_passes": fmean(result.chunk_passes for result in found),
            "tokens": fmean(len(result.ids) for result in found),
            "thought_tokens": fmean(
                sum(len(ids) - 1 for ids in result.thought_ids) for result in found
            ),
        }
