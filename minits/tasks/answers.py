"""How answers are found in a text and compared: by one way for what is right and what was said.

    text -> answer_part (from the opening on) -> normalised, or number_in -> compared with the gold
"""
import re
import unicodedata
from collections.abc import Callable, Iterable
from fractions import Fraction

from minits.checkpoint.files import Json

# A number: a sign, unless it joins two things ("3-5"), perhaps with a currency beside it; digits,
# perhaps with commas between thousands; decimals; perhaps a denominator. What stands around it
# (percent signs, units, a full stop) is no part of it.
NUMBER = re.compile(
    r"(?P<sign>(?<![\w.)\]])[-\u2212])?[$€£¥]?(?P<minus>(?<=[$€£¥])-)?"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)"
    r"(?P<divisor>/[0-9]+)?"
)
ACCENTS = re.compile("[\u0300-\u036f]")  # as characters of their own
# Between initials: "U.S.", "J. K. Rowling".
INITIALS = re.compile(r"(?<=\b[^\W\d_])\.(?:\s?(?=[^\W\d_]\.)|(?=[^\W\d_]\b))")


def normalised(text: str) -> str:
    """`text` in Unicode's form NFC, with a single space for any run of blanks and none at the ends.

    Two texts are the same answer, or the same question, if these are equal.
    """
    return " ".join(unicodedata.normalize("NFC", text).split())


def name_of(text: str) -> str:
    """A name without case, accents, punctuation (but that of numbers), and an article before it.

    Never empty where `text` is not: "The" and "!?" stay. "the U.S." is "us", "AC/DC" is "ac dc".
    """
    plain = normalised(text).casefold()
    letters = ACCENTS.sub("", unicodedata.normalize("NFD", plain))
    words = [
        word if NUMBER.fullmatch(word) else "".join(map(letter_or_blank, word))
        for word in INITIALS.sub("", letters).split()
    ]
    return re.sub(r"^(the|an|a) ", "", " ".join(" ".join(words).split())) or plain


def letter_or_blank(character: str) -> str:
    return " " if unicodedata.category(character).startswith("P") else character


def names_one_of(text: str, names: Iterable[str]) -> bool:
    """Whether a text holds one of `names` as whole words, in the sense of `name_of`."""
    said = f" {name_of(text)} "
    return any(f" {name_of(name)} " in said for name in names)


def extract_answer(text: str, opening: str, gold: str = "") -> str:
    """The answer in a generated text: from the last `opening` on, behind any chain of thought.

    Where the right answer `gold` repeats the opening, from as many openings before the end as it
    holds. A text without so many is returned whole. What follows in more lines than `gold` has is
    no part of the answer: a model may go on with a question of its own.
    """
    text, opening, gold = (unicodedata.normalize("NFC", each) for each in (text, opening, gold))
    opening = opening.strip()
    openings = max(gold.count(opening), 1)
    before, *rest = text.rsplit(opening, openings) if opening else [text]
    found = text[len(before) :] if len(rest) == openings else text
    lines, due = (re.split(r"\r\n|\r|\n", each.strip()) for each in (found, gold))
    return "\n".join(lines[: len(due)]).strip()


def number_in(text: str) -> Fraction | None:
    """The last number of a text, exactly; None if there is none.

    "$1,234.50", "1234.5", "1234.50 dollars." are one number, as are "50%" and "50", "1/2" and ".5".
    """
    found = list(NUMBER.finditer(text))
    if not found:
        return None
    last = found[-1]
    try:
        size = Fraction(last["digits"].replace(",", "")) / Fraction((last["divisor"] or "/1")[1:])
    except (ValueError, ZeroDivisionError):  # thousands of digits; a divisor of 0
        return None
    return -size if last["sign"] or last["minus"] else size


def score_text(text: str, gold: str, opening: str) -> Json:
    """Right is the same text, up to blanks and the Unicode form of accents."""
    answer, right = (extract_answer(each, opening, gold) for each in (text, gold))
    return {"answer": answer, "right": normalised(answer) == normalised(right)}


def score_number(text: str, gold: str, opening: str) -> Json:
    """Right is the same last number behind the opening; `strict`: the same text.

    An answer without the opening or a number is `unparsable`, and wrong.
    """
    found = score_text(text, gold, opening)
    said, due = (number_behind(opening, each) for each in (found["answer"], normalised(gold)))
    right = said is not None and said == due
    return found | {"right": right, "strict": found["right"], "unparsable": said is None}


def score_name(text: str, gold: str, opening: str) -> Json:
    """Right is the same name behind the opening, see `name_of`; `strict`: the same text."""
    found = score_text(text, gold, opening)
    said, due = (behind(opening, normalised(each)) for each in (found["answer"], gold))
    same = said is not None and due is not None and name_of(said) == name_of(due)
    return found | {"right": same, "strict": found["right"]}


def behind(opening: str, answer: str) -> str | None:
    """What an answer says after `opening`; None if it does not begin with it."""
    opening = normalised(opening)
    return answer.removeprefix(opening) if answer.startswith(opening) else None


def number_behind(opening: str, answer: str) -> Fraction | None:
    """The last number of an answer that begins with `opening`; None if it lacks either."""
    said = behind(opening, answer)
    return None if said is None else number_in(said)


SCORINGS: dict[str, Callable[[str, str, str], Json]] = {
    "text": score_text,
    "number": score_number,
    "name": score_name,
}
COMPARED = (
    "what is compared: the answer's text, its last number, or the name that it is, whatever its "
    "case, accents, article and punctuation"
)
