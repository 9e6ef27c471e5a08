"""New numbers for a problem: the question's are drawn anew, steps and answer are computed again.

    Tom has 3 bags of 6 pens, Ann three.   3*6=18   a problem
    Tom has a bags of b pens, Ann three.   a*b      its template
    Tom has 5 bags of 4 pens, Ann three.   5*4=20   a draw

A problem is a template if each operand of its steps has exactly one source: a number of the
question, an earlier result, or a constant (a half, 60 minutes an hour, …). What the question says
in digits and otherwise too ("2 cats … twice") stays as it is, and is a constant. Numbers in words
stay as well: "the three of them" counts what the story lists.
"""
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from functools import cache
from itertools import chain
from typing import NamedTuple

from minits.tasks.align.arithmetic import OPERAND, evaluate
from minits.tasks.align.mentions import FREE, Mention, forms, mentions
from minits.tasks.align.problems import Problem, result

TRIES = 100  # draws until one fits: division without rest, results above zero, …
DECIMALS = 4  # that an operand may have: "4.5%" as 0.045
ROUND = (1000, 500, 100, 50, 10, 5)  # what is at least four times one of these stays a multiple
DIGITS = re.compile(r"[\d,.]*\d", re.ASCII)
NO_AMOUNT = re.compile("[^\\W_]|[:/#]")  # what stands beside the digits of "5pm", "7:30", "#2"
SOURCE = re.compile(r"<(\d+)>")


class Variable(NamedTuple):
    """A number that is drawn; all mentions of the same number follow it."""

    kind: str  # percent or digits
    number: Fraction  # as it was
    decimals: int


@dataclass(frozen=True)
class Template:
    """A problem whose numbers can be drawn anew.

    The sources are the variables, in all their forms, and then the results, one after the other.
    """

    problem: Problem
    variables: tuple[Variable, ...]
    places: tuple[tuple[Mention, int], ...]  # mentions that follow a variable, and which
    steps: tuple[tuple[str, int], ...]  # "<0>*<3>", numbers of sources; decimals of the result

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
        sources: list[Fraction] = []
        for variable, number in zip(self.variables, numbers):
            sources += forms(variable.kind, number)
        steps = []
        for pattern, decimals in self.steps:
            left = SOURCE.sub(lambda found: spelled(sources[int(found[1])], DECIMALS), pattern)
            sources.append(evaluate(left))
            answer = spelled(sources[-1], decimals)
            steps.append(f"{left}={answer}")
        old, new, end = self.problem.question, "", 0
        for mention, variable in self.places:
            said = old[mention.start : mention.end]
            number = fixed(numbers[variable], decimals_of(said), "," if "," in said else "")
            new += old[end : mention.start] + DIGITS.sub(number, said, count=1)
            end = mention.end
        return replace(self.problem, question=new + old[end:], steps=tuple(steps), answer=answer)


@cache  # each is wanted in every epoch
def template(problem: Problem) -> Template | None:
    """The template of a problem; None if it has none."""
    lefts = [step.rpartition("=")[0] for step in problem.steps]
    operands = [[Fraction(number) for number in OPERAND.findall(left)] for left in lefts]
    variables, places, constants = variables_of(problem.question, set(chain(*operands)))
    sources = list(chain(*(forms(kind, number) for kind, number, _ in variables)))
    first_result = len(sources)
    uses: Counter[Fraction] = Counter()  # of operands, from the step at hand on

    def source(match: re.Match[str]) -> str:
        """An operand as "<3>", a constant as it is. Raises ValueError if it is not clear which."""
        number = Fraction(match[0])
        found = [index for index, value in enumerate(sources) if value == number]
        results = [index for index in found if index >= first_result]
        if len(results) == uses[number] == 1:
            found = results  # or else nothing would follow from that result
        elif len(found) + (number in constants) != 1:
            raise ValueError(f"{number} has no source, or two")
        return f"<{found[0]}>" if found else match[0]

    steps = []
    try:
        for index, left in enumerate(lefts):
            uses = Counter(chain(*operands[index:]))
            pattern = OPERAND.sub(source, left)
            value = evaluate(left)
            steps.append((pattern, decimals_of(spelled(value, DECIMALS))))
            sources.append(value)
        exact = sources[first_result:] == list(map(result, problem.steps))
    except ValueError:
        return None
    if not (variables and exact and problem.complete):
        return None
    return Template(problem, tuple(variables), tuple(places), tuple(steps))


def variables_of(
    question: str, operands: set[Fraction]
) -> tuple[list[Variable], list[tuple[Mention, int]], set[Fraction]]:
    """(numbers that can be drawn, their places with their indices, all other numbers)."""
    amounts: dict[tuple[str, Fraction], list[Mention]] = {}
    constants = set(FREE)
    for mention in mentions(question):
        beside = question[: mention.start][-1:] + question[mention.end :][:1]
        if mention.kind in ("digits", "percent") and not NO_AMOUNT.search(beside):
            amounts.setdefault((mention.kind, mention.values[0]), []).append(mention)
        else:
            constants.update(mention.values)
    claims = Counter(constants)
    for key in amounts:
        claims.update(forms(*key))
    variables, places = [], []
    for key, found in amounts.items():
        followed = operands.intersection(forms(*key))
        if not followed or any(claims[value] > 1 for value in followed):
            constants.update(forms(*key))
            continue
        texts = [question[mention.start : mention.end] for mention in found]
        places += [(mention, len(variables)) for mention in found]
        variables.append(Variable(*key, min(map(decimals_of, texts))))
    return variables, sorted(places), constants


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


def decimals_of(text: str) -> int:
    """How many decimals the number in a text has."""
    return len(DIGITS.search(text)[0].partition(".")[2])


def fixed(number: Fraction, decimals: int, comma: str = "") -> str:
    """The number with so many decimals: "2.50". Raises ValueError if it has more, or is not > 0."""
    scaled = number * 10**decimals
    if scaled.denominator > 1 or number <= 0:
        raise ValueError(f"{number} has more than {decimals} decimals, or is not above zero")
    return f"{Decimal(f'{scaled.numerator}e-{decimals}'):{comma}f}"


def spelled(number: Fraction, decimals: int) -> str:
    """`fixed` without zeros at its end: "2.5"."""
    text = fixed(number, decimals)
    return text.rstrip("0").rstrip(".") if decimals else text
