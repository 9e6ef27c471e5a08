"""Two-hop questions as files hold them: r2(r1(e1)) = e3, by way of the bridge e2 = r1(e1).

    {"question": "What is the currency of the country where Bergen is located?",
     "e1": "Bergen", "r1": "city_in_country", "r2": "country_currency", "answer": "Krone",
     "steps": ["Bergen is part of Norway.", "The currency of Norway is the Krone."],
     "bridge": "Norway"}

May be there, too: aliases (of the answer), bridge_aliases, and at: the character of the question up
to which the words reach that name the first hop. A line may also hold the columns of TwoHopFact or
SOCRATES; of their tables csv.DictReader and json.dumps make such lines.
"""
import json
from ast import literal_eval
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from minits.checkpoint.files import Json
from minits.supervision import Example, Step
from minits.tasks.rows import check_texts, check_unmarked, members, parse_json

ROW = dict.fromkeys(("question", "e1", "r1", "r2", "bridge", "answer"), str)
ROW |= dict.fromkeys(("steps", "bridge_aliases", "aliases"), list)
FACT = dict.fromkeys(("subject", "object", "template"), str)
# The columns of those tables, and what they are called here. A step: a hop's prompt and object.
COLUMNS = {
    "r2(r1(e1)).prompt": "question",
    "e1.value": "e1",
    "r1.category": "r1",
    "e2.value": "bridge",
    "r2.category": "r2",
    "e3.value": "answer",
}
HOPS = {"r1(e1).prompt": "bridge", "r2(e2).prompt": "answer"}
ALIASES = {"e2.aliases": "bridge_aliases", "e3.aliases": "aliases"}


class Hop(NamedTuple):
    """A fact as a question: "The currency of Norway is the" -> Krone."""

    relation: str
    prompt: str
    names: tuple[str, ...]  # of its object, all of them right


@dataclass(frozen=True)
class TwoHopExample(Example):
    """A two-hop question. Its steps are those of both hops, in order."""

    question: str = ""  # without a suffix
    subject: str = ""  # e1
    hops: tuple[Hop, ...] = ()


def parse_two_hop(line: str, after: str) -> TwoHopExample:
    """The question in a line of JSON, its first step after its "hop", or after its "subject".

    Raises ValueError saying what is wrong with it.
    """
    row = parse_json(line)
    if isinstance(row, dict):
        row = of_table(row) if "e1.value" in row else row
    absent = {"bridge_aliases": [], "aliases": []}
    found = members(row, ROW, "the row", absent=absent, others=True)
    question, subject, *relations, bridge, answer, steps, bridge_aliases, aliases = found
    if len(steps) != 2:
        raise ValueError(f"it has {len(steps)} steps; a two-hop question has one for each hop")
    names = (bridge, *bridge_aliases), (answer, *aliases)
    check_texts((question, subject, *relations, *steps, *names[0], *names[1]))
    check_unmarked(question)
    if subject not in question:
        raise ValueError(f"the question {question!r} does not name its subject e1, {subject!r}")
    hops = []
    for step, relation, known in zip(steps, relations, names):
        prompt, there, _ = step.rpartition(known[0])
        if not there or not prompt.strip():
            raise ValueError(f"the step {step!r} does not end with its object, {known[0]!r}")
        hops.append(Hop(relation, prompt.rstrip(), known))
    ends = {
        "hop": row.get("at", len(question.rstrip(" .?!"))),
        "subject": question.index(subject) + len(subject),
    }
    at = ends[after]
    if not (type(at) is int and 0 <= at <= len(question)):
        raise ValueError(f"'at' is {json.dumps(at)}, no character of the question")
    placed = Step(at, steps[0]), Step(len(question), steps[1])
    return TwoHopExample(
        question, placed, answer, size=2, question=question, subject=subject, hops=tuple(hops)
    )


def parse_fact(line: str) -> Example:
    """A fact as a row of its own. Raises ValueError saying what is wrong with it."""
    subject, answer, template = members(parse_json(line), FACT, "the fact", others=True)
    check_texts((subject, answer, template))
    if "{}" not in template:
        raise ValueError(f"the template {template!r} has no {{}} for its subject")
    return Example(template.replace("{}", subject), (), answer, size=1)


def of_table(cells: Json) -> Json:
    """The row that stands in the columns of TwoHopFact or SOCRATES. Raises ValueError.

    The words behind the bridge's name in the prompt of the second hop end the question as well;
    those before them name the first hop.
    """
    if missing := [name for name in (*COLUMNS, *HOPS, *ALIASES) if not cells.get(name)]:
        raise ValueError(f"nothing stands in the columns {', '.join(missing)}")
    row: Json = {key: cells[column] for column, key in COLUMNS.items()}
    row["steps"] = [f"{cells[prompt]} {row[name]}." for prompt, name in HOPS.items()]
    for column, key in ALIASES.items():
        try:
            row[key] = list(texts_in(literal_eval(str(cells[column]))))
        except (SyntaxError, TypeError) as error:
            raise ValueError(f"{column} is no list of names: {cells[column]!r:.100}") from error
    rest = cells["r2(e2).prompt"].rpartition(row["bridge"])[2]
    return row | {"at": len(row["question"].removesuffix(rest))}


def texts_in(value: Any) -> Iterator[str]:
    """The texts in lists of lists."""
    if isinstance(value, str):
        yield value
    else:
        for each in value:
            yield from texts_in(each)
