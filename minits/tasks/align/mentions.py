"""Where a question speaks of numbers: in digits, in words, by fractions, by units."""
import re
from fractions import Fraction
from typing import NamedTuple

# So many digits at most: Python makes no number of thousands of them.
DIGITS = r"(?:\d{1,3}(?:,\d{3}){1,30}(?!\d)|\d{1,90})(?:\.\d{1,90})?|\.\d{1,90}"
TOKEN = re.compile(rf"({DIGITS})(\s?%|\s?percent\b)?|[a-z]+|[½⅓¼⅛]", re.ASCII | re.IGNORECASE)
JOINTS = ("", "-", " ", " and ", " and a ")
FREE = (Fraction(0), Fraction(1), Fraction(100), Fraction(1, 100))  # need no mention


class Mention(NamedTuple):
    """A place in a text that names one or more numbers."""

    start: int
    end: int
    kind: str  # digits, percent, word (half, dozen, 3/4, …) or unit (hour, …)
    values: tuple[Fraction, ...]  # what it may enter a calculation as, the plainest first


def table(text: str) -> dict[str, tuple[Fraction, ...]]:
    """The numbers of each word, from a text of numbers, each with its words behind it."""
    found = {}
    for item in text.split():
        if item.isdigit():
            number = Fraction(item)
        else:
            found[item] = (*found.get(item, ()), number)
    return found


WORDS = table("""
    0 zero  1 one single  2 two twice double doubled couple pair both twin
    3 three thrice triple tripled threefold triplet  4 four quadruple quadrupled
    5 five  6 six  7 seven  8 eight  9 nine  10 ten  11 eleven  12 twelve dozen
    13 thirteen  14 fourteen  15 fifteen  16 sixteen  17 seventeen  18 eighteen  19 nineteen
    20 twenty  30 thirty  40 forty  50 fifty  60 sixty  70 seventy  80 eighty  90 ninety
    100 hundred  1000 thousand  1000000 million  1000000000 billion
""")
PARTS = table("""
    2 half halve halved ½  3 third ⅓  4 quarter fourth ¼  5 fifth  6 sixth  7 seventh
    8 eighth ⅛  9 ninth  10 tenth
""")
UNITS = table("""
    2 second weekend pint  3 foot feet yard  4 month gallon quart  5 weekday week nickel
    7 day week  10 decade dime  12 month year inch foot feet  16 pound ounce gallon
    24 hour day  30 month  36 yard  52 week year  60 second minute hour
    100 century cent penny dollar meter  365 day year
    1000 meter kilometer km gram kilogram kg liter ml  3600 second hour
""")
NAMES = (
    {word: ("unit", values) for word, values in UNITS.items()}
    | {word: ("word", values) for word, values in WORDS.items()}
    | {word: ("word", (1 / n, n, 1 - 1 / n)) for word, (n,) in PARTS.items()}
)


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
    found = []
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
            found[-1] = found[-1]._replace(kind="word")
            kind, values = "word", values + together
        found.append(Mention(start, end, kind, values))
    return found


def joined(before: Mention, gap: str, kind: str, number: Fraction) -> tuple[Fraction, ...]:
    """What two neighbours say together: "3/4", "two thirds", "twenty-five", "2 and a half"."""
    if gap == "/" and before.kind == kind == "digits" and number:
        return (before.values[0] / number,)
    if gap not in JOINTS or before.kind == "unit" or kind != "word":
        return ()
    # "two hundred fifty": what the first two say together takes part, but no longer chain, as
    # the number of values would double with every word.
    return tuple(made for one in before.values[:3] for made in (one * number, one + number))
