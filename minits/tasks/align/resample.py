"""New numbers for a problem: the question's are drawn anew, steps and answer are computed again.

    Tom has 3 bags of 6 pens, Ann three.   3*6=18   a problem
    Tom has a bags of b pens, Ann three.   a*b      its template
    Tom has 5 bags of 4 pens, Ann three.   5*4=20   a draw

A problem is a template if each operand of its steps has exactly one source: a number of the
question, an earlier result, or a constant (a half, 60 minutes an hour, …). Where one number has
two sources, nobody knows which of them it must follow. Numbers in words stay as they are: "the
three of them" counts what the story lists.
"""
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple

from minits.tasks.align.arithmetic import evaluate, spelled, tokens_of
from minits.tasks.align.mentions import FREE, Mention, forms, mentions
from minits.tasks.align.problems import Problem

TRIES = 100  # draws until one fits: division without rest, results above zero, …
DECIMALS = 4  # that a number of the text may have where it enters a step: "4.5%" as 0.045
ROUND = (1000, 500, 100, 50, 10, 5)  # what is at least four times one of these stays a multiple
DIGITS = re.compile(r"[\d,.]*\d", re.ASCII)
NO_AMOUNT = re.compile("[^\\W_]|[:/#]")  # what stands beside the digits of "5pm", "7:30", "#2"


class Variable(NamedTuple):
    """A number that is drawn; all mentions of the same number follow it."""

    kind: str  # percent or digits
    number: Fraction  # as it was
    decimals: int


class Operand(NamedTuple):
    """A number of a step that follows a source, and in which of the source's forms."""

    source: int  # first come the variables, then the results
    form: int


@dataclass(frozen=True)
class Template:
    """A problem whose numbers can be drawn anew."""

    problem: Problem
    variables: tuple[Variable, ...]
    places: tuple[tuple[Mention, int], ...]  # mentions that follow a variable, and which
    steps: tuple[tuple[tuple[str | Operand, ...], int], ...]  # left side, decimals of the result

    def draw(self, rng: random.Random) -> Problem | None:
        """The problem with other numbers of like size; None if none were found that fit.

        What was a whole number stays one, and all numbers are above zero.
        """
        for attempt in range(TRIES):
            # The longer it takes, the more numbers stay as they are.
            keep = attempt / TRIES
            numbers = [
                variable.number if rng.random() < keep else nearby(variable, rng)
                for variable in self.variables
            ]
            try:
                drawn = self.fill(numbers)
            except ValueError:
                continue
            if drawn.question != self.problem.question:
                return drawn
        return None

    def fill(self, numbers: Sequence[Fraction]) -> Problem:
        """The problem with these numbers. Raises ValueError where one comes out that cannot be."""
        sources = [forms(old.kind, new) for old, new in zip(self.variables, numbers)]
        steps = []
        for left, decimals in self.steps:
            written = ""
            for token in left:
                if isinstance(token, Operand):
                    token = positive(sources[token.source][token.form], DECIMALS)
                written += token
            value = evaluate(written)
            answer = positive(value, decimals)
            steps.append(f"{written}={answer}")
            sources.append((value,))
        old, new, end = self.problem.question, "", 0
        for mention, variable in self.places:
            new += old[end : mention.start]
            new += rewritten(old[mention.start : mention.end], numbers[variable])
            end = mention.end
        return Problem(new + old[end:], tuple(steps), answer, self.problem.name)


def template(problem: Problem) -> Template | None:
    """The template of a problem; None if it has none."""
    variables: dict[tuple[str, Fraction], Variable] = {}
    places: list[tuple[Mention, tuple[str, Fraction]]] = []
    words: set[Fraction] = set()
    units = set(FREE)
    for mention in mentions(problem.question):
        if is_amount(mention, problem.question):
            key = mention.kind, mention.values[0]
            decimals = decimals_of(problem.question[mention.start : mention.end])
            if key in variables:
                decimals = min(decimals, variables[key].decimals)
            variables[key] = Variable(*key, decimals)
            places.append((mention, key))
        else:
            (units if mention.kind == "unit" else words).update(mention.values)
        if mention.kind == "percent":
            words.update((Fraction(1), Fraction(100)))  # of the whole
    sources = [forms(*key) for key in variables]
    steps = []
    try:
        for step in problem.steps:
            left, _, right = step.rpartition("=")
            value = evaluate(right)
            if evaluate(left) != value or not problem.complete:
                return None
            tokens = tuple(traced_back(token, sources, words, units) for token in tokens_of(left))
            steps.append((tokens, decimals_of(spelled(value, DECIMALS))))
            sources.append((value,))
    except ValueError:
        return None
    order = list(variables)
    used = {token.source for left, _ in steps for token in left if isinstance(token, Operand)}
    kept = tuple((m, order.index(key)) for m, key in places if order.index(key) in used)
    return Template(problem, tuple(variables.values()), kept, tuple(steps)) if kept else None


def is_amount(mention: Mention, question: str) -> bool:
    """Whether another number could stand there."""
    beside = question[: mention.start][-1:] + question[mention.end :][:1]
    if mention.kind not in ("digits", "percent") or NO_AMOUNT.search(beside):
        return False
    return mention.values[0] > 0


def traced_back(
    token: str,
    sources: Sequence[tuple[Fraction, ...]],
    words: set[Fraction],
    units: set[Fraction],  # of which only those numbers are meant that are not known otherwise
) -> str | Operand:
    """What a token of a step follows. Raises ValueError if nothing is known, or more than one."""
    if not token[-1].isdigit():
        return token  # an operator
    number = Fraction(token)
    found = [
        Operand(source, form)
        for source, values in enumerate(sources)
        for form, value in enumerate(values)
        if value == number
    ]
    if len(found) + (number in words) > 1:
        raise ValueError(f"{token} may stand for two things")
    if not found and number not in words | units:
        raise ValueError(f"{token} comes from nowhere")
    return found[0] if found else token


def nearby(old: Variable, rng: random.Random) -> Fraction:
    """A number from half to twice the old one, as round, with as many decimals."""
    scale = 10**old.decimals
    amount = int(old.number * scale)
    unit = next((unit for unit in ROUND if amount % unit == 0 and amount >= 4 * unit), 1)
    least, most = amount // unit // 2, amount // unit * 2
    if old.kind == "percent" and old.number < 100:
        most = min(most, (100 * scale - 1) // unit)
    least = max(least, 2 if unit == scale else 1)  # "1 apples" is no English
    return Fraction(rng.randint(least, most) * unit, scale)


def rewritten(old: str, number: Fraction) -> str:
    """`old` with another number in the same form. Raises ValueError if that has more decimals."""
    comma = "," if "," in old else ""
    new = f"{Decimal(spelled(number, decimals_of(old), zeros=True)):{comma}f}"
    return DIGITS.sub(new, old, count=1)


def decimals_of(text: str) -> int:
    """How many decimals the number in a text has."""
    return len(DIGITS.search(text)[0].partition(".")[2])


def positive(value: Fraction, decimals: int) -> str:
    """`spelled`. Raises ValueError if the number is not above zero."""
    if value <= 0:
        raise ValueError(f"{value} is not above zero")
    return spelled(value, decimals)
