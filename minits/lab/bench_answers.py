"""How long a whole answer takes, one prompt at a time: a thinking model beside others.

All ways of reading take turns at every prompt, so a slow moment of the machine hits all of them.
"""
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from statistics import fmean
from typing import NamedTuple

from minits.generation import GenerationConfig, GenerationResult
from minits.lab.bench import Line, summary, time_interleaved, ways_of_reading
from minits.methods import Method
from minits.thinking import Engine

WAYS = ways_of_reading(None, 1, 2)


class Side(NamedTuple):
    """A trained model, and how it answers."""

    run: str
    engine: Engine
    method: Method
    prompts: Sequence[Sequence[int]]  # the same questions on all sides
    config: GenerationConfig


def bench_answers(thinking: Side, others: Sequence[Side], repeats: int) -> Iterator[Line]:
    """A line for each of `others`, then one for each way in which the thinking model may read.

    ms: mean over prompts of the median of `repeats` passes. speed_up: over the first of `others`.
    Ctrl-C comes out after the lines of the prompts that were whole before it.
    """
    ways = [replace(thinking.config, **way) for way in WAYS]
    sides = [*others, *(thinking._replace(config=way) for way in ways)]
    taken: list[list[float]] = [[] for _ in sides]
    results: list[dict[int, GenerationResult]] = [{} for _ in sides]
    stopped: KeyboardInterrupt | None = None

    def answer(side: Side, found: dict[int, GenerationResult], number: int) -> None:
        (found[number],) = side.method.answer(side.engine, [side.prompts[number]], side.config)

    for number in range(len(thinking.prompts)):
        calls = [partial(answer, side, found, number) for side, found in zip(sides, results)]
        try:
            of_prompt = time_interleaved(calls, repeats)
        except KeyboardInterrupt as error:
            if number == 0:
                raise
            stopped = error
            break
        for times, mine in zip(taken, of_prompt):
            times.append(summary(mine)["ms"])
    for side, times, found in zip(sides, taken, results):
        how = ("prefill", "draft", "lookahead") if side.method.thinks else ()
        of_each = [found[number] for number in range(len(times))]
        yield {
            "what": "answers, one at a time",
            "run": side.run,
            "method": side.method.name,
            "options": asdict(side.method),
            **{name: getattr(side.config, name) for name in how},
            "prompts": len(times),
            "ms": fmean(times),
            "speed_up": fmean(taken[0]) / fmean(times),
            "rounds": fmean(result.rounds for result in of_each),
            "entered_and_one": fmean(result.nontrivial + 1 for result in of_each),
            "chunk_passes": fmean(result.chunk_passes for result in of_each),
            "tokens": fmean(len(result.ids) for result in of_each),
            "thought_tokens": fmean(
                sum(len(ids) - 1 for ids in result.thought_ids) for result in of_each
            ),
        }
    if stopped:
        raise stopped
