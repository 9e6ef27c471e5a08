"""Where a question speaks of numbers: in digits, in words, by fractions, by units."""
import re
from fractions import Fraction
from typing import NamedTuple

NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
TOKEN = re.compile(rf"({NUMBER})(\s?%|\s?percent\b)?|[a-z]+", re.ASCII | re.IGNORECASE)
JOINTS = ("-", " ", " and ", " and a ")
FREE = (Fraction(0), Fraction(1), Fraction(100), Fraction(1, 100))  # need no mention


class Mention(NamedTuple):
    """A place in a text that names one or more numbers."""

    start: int
    end: int
    kind: str  # digits, percent, word (zero … twenty), fixed (half, 3/4, …) or unit (hour, …)
    values: tuple[Fraction, ...]  # the number itself first


WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen twenty"
).split()
FIXED = {
    1: "single",
    2: "twice double doubled couple pair both twin",
    3: "thrice triple tripled threefold triplet",
    4: "quadruple quadrupled",
    12: "dozen",
    30: "thirty",
    40: "forty",
    50: "fifty",
    60: "sixty",
    70: "seventy",
    80: "eighty",
    90: "ninety",
    100: "hundred",
    1000: "thousand",
    1000000: "million",
    1000000000: "billion",
}
PARTS = {
    2: "half halve halved",
    3: "third",
    4: "quarter fourth",
    5: "fifth",
    6: "sixth",
    7: "seventh",
    8: "eighth",
    9: "ninth",
    10: "tenth",
}
UNITS = {
    "second": (60, 3600, 2),
    "minute": (60,),
    "hour": (60, 24, 3600),
    "day": (24, 7, 365),
    "week": (7, 5, 52),
    "weekday": (5,),
    "weekend": (2,),
    "month": (30, 12, 4, 31),
    "year": (12, 365, 52),
    "decade": (10,),
    "century": (100,),
    "inch": (12,),
    "foot": (12, 3),
    "feet": (12, 3),
    "yard": (3, 36),
    "pound": (16,),
    "ounce": (16,),
    "gallon": (4, 16),
    "quart": (4,),
    "pint": (2,),
    "cent": (100,),
    "penny": (100,),
    "dollar": (100,),
    "dime": (10,),
    "nickel": (5,),
    "meter": (100, 1000),
    "kilometer": (1000,),
    "km": (1000,),
    "gram": (1000,),
    "kilogram": (1000,),
    "kg": (1000,),
    "liter": (1000,),
    "ml": (1000,),
}


# word -> kind, values
NAMES: dict[str, tuple[str, tuple[Fraction, ...]]] = {
    **{word: ("unit", tuple(map(Fraction, values))) for word, values in UNITS.items()},
    **{word: ("word", (Fraction(value),)) for value, word in enumerate(WORDS)},
    **{
        word: ("fixed", (Fraction(value),))
        for value, words in FIXED.items()
        for word in words.split()
    },
    **{
        word: ("fixed", (Fraction(1, n), Fraction(n), Fraction(n - 1, n)))
        for n, words in PARTS.items()
        for word in words.split()
    },
}


def forms(kind: str, number: Fraction) -> tuple[Fraction, ...]:
    """What a number may enter a calculation as.

    "30%": 30, 0.3, what is left of the whole (0.7, 70), and the whole with it (1.3, 130).
    """
    if kind != "percent":
        return (number,)
    part = number / 100
    return number, part, 1 - part, 100 - number, 1 + part, 100 + number


def mentions(text: str) -> list[Mention]:
    """All of them, in the order of the text."""
    found: list[Mention] = []
    for match in TOKEN.finditer(text):
        digits, percent = match.groups()
        word = match[0].lower()
        if digits:
            kind = "percent" if percent else "digits"
            values = forms(kind, Fraction(digits.replace(",", "")))
        elif named := NAMES.get(word) or NAMES.get(word.removesuffix("s")):
            kind, values = named
        else:
            continue
        start, end = match.span()
        together = joined(found[-1], text[found[-1].end : start], kind, values[0]) if found else ()
        if together:
            found[-1] = found[-1]._replace(kind="fixed")
            kind, values = "fixed", values + together
        found.append(Mention(start, end, kind, values))
    return found


def joined(before: Mention, gap: str, kind: str, number: Fraction) -> tuple[Fraction, ...]:
    """What two neighbours say together: "3/4", "two thirds", "twenty-five", "2 and a half"."""
    if gap == "/" and number:
        return (before.values[0] / number,)
    if gap not in JOINTS or before.kind == "unit" or kind not in ("word", "fixed"):
        return ()
    # "two hundred fifty": what the first two say together takes part, but no longer chain, as
    # the number of values would double with every word.
    return tuple(made for one in before.values[:3] for made in (one * number, one + number))
