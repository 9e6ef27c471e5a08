"""Steps placed by rules: each where the question has said all that its calculation needs.

    Tom has 3 bags of 6 pens,<T> and he gives half of them away.<T> What is left after 2 more?<T>
                              3*6=18                             18/2=9                   9-2=7

An operand is looked for among the numbers of the question and the results of earlier steps. A step
stands at the end of the clause that holds the last of its operands, never before an earlier step;
the last one stands at the end of the question.
"""
import re
from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from fractions import Fraction

from minits.supervision import Step
from minits.tasks.align.arithmetic import OPERAND
from minits.tasks.align.mentions import FREE, mentions
from minits.tasks.align.problems import Problem, result

CLAUSE_END = re.compile(
    r"[,.;:?!](?=\s|$)|(?=\s(?:and|but|while|then|so|because|if|when|after|before|which|who)\s)"
)


def sources(question: str) -> dict[Fraction, list[int]]:
    """Of each number that the question knows: the characters after which it does, in order."""
    known, units = {}, {value: [0] for value in FREE}
    for mention in mentions(question):
        for value in mention.values:
            (units if mention.kind == "unit" else known).setdefault(value, []).append(mention.end)
    return units | known  # the 60 of "hour" only where no 60 is written


def place(problem: Problem) -> list[tuple[int, list[int | None]]]:
    """Of each step: its place, and of each operand the character after which it is known.

    None: the operand comes from nowhere that we know; the step stands where the others say.
    """
    question = problem.question
    ends = [match.end() for match in CLAUSE_END.finditer(question)] + [len(question)]
    known = sources(question)
    placed, at = [], 0
    for step in problem.steps:
        operands = []
        for number in OPERAND.findall(step.rpartition("=")[0]):
            places = known.get(Fraction(number), [None])
            # Each mention is meant once, as long as there are others of the same number.
            operands.append(places.pop(0) if len(places) > 1 else places[0])
        # Where nothing of a step is found, nothing speaks for a place before the end.
        last = max((operand or 0 for operand in operands), default=0) or len(question)
        at = max(at, ends[bisect_left(ends, last)])
        placed.append((at, operands))
        with suppress(ValueError):  # of a result that is no number
            # A result that was not used yet is meant before any mention in the text.
            known.setdefault(result(step), []).insert(0, at)
    return placed


def by_rules(problem: Problem) -> tuple[Step, ...]:
    """The steps at the ends of clauses."""
    places = [at for at, _ in place(problem)][:-1] + [len(problem.question)]
    return tuple(map(Step, places, problem.steps))


def at_end(problem: Problem) -> tuple[Step, ...]:
    """All steps at the end of the question: the lower bound."""
    return tuple(Step(len(problem.question), step) for step in problem.steps)


def traced(problem: Problem) -> list[tuple[int, int]]:
    """Of each step: the number of its operands that were found, and of all."""
    return [
        (sum(operand is not None for operand in operands), len(operands))
        for _, operands in place(problem)
    ]


ALIGNERS: dict[str, Callable[[Problem], tuple[Step, ...]]] = {"rules": by_rules, "end": at_end}
