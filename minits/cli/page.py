"""A page of thoughts: one HTML file that asks for nothing else, works without script, and prints.

    rows -> cards side by side -> chunks (tokens, then the thought), lanes of speculation, counters

It holds no date and no path of this machine, so the same answers give the same bytes.
"""
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from minits.checkpoint.files import write_text
from minits.checkpoint.tiny import ASSETS
from minits.cli.flags import note
from minits.cli.models import Opened, describe_model
from minits.cli.show import Card, counters
from minits.lab.provenance import revision, without_folders
from minits.prefill import Speculation, next_lookahead
from minits.thinking import Thought
from minits.training.recipe import typed

MOST_ROWS, MOST_BYTES = 20, 200_000  # of a page, which holds one row at least
JOINERS = "\u200c\u200d"  # unseen, but part of Persian words and of emoji


class Markup(str):
    """Text that is HTML already. `tag` escapes every other."""


def tag(name: str, *parts: str, **attributes: object) -> Markup:
    """An element; class_ stands for the attribute class."""
    own = [f' {key.rstrip("_")}="{escape(str(value))}"' for key, value in attributes.items()]
    inner = "".join(part if isinstance(part, Markup) else shown(part) for part in parts)
    end = "\n" if name in ("section", "li") else ""
    return Markup(f"<{name}{''.join(own)}>{inner}</{name}>{end}")


def shown(text: str) -> Markup:
    """Any text as HTML; invisible characters, and those that turn the writing, are spelled out."""
    return Markup("".join(
        escape(c) if c.isprintable() or c in JOINERS else f"<code>{escape(repr(c)[1:-1])}</code>"
        for c in text
    ))


def token(text: str, answer: bool) -> Markup:
    """A token, its blanks made visible by the style; copied, they are blanks."""
    parts = Markup("<i> </i>".join(map(shown, text.split(" "))))
    kinds = ["a"] * answer + ["long"] * (len(text) > 20)  # the others have one line
    return tag("u", parts, **({"class_": " ".join(kinds)} if kinds else {}))


class Lane(NamedTuple):
    """A round: it ran `width` chunks from `start` on, of which the first `accepted` were right."""

    start: int
    accepted: int
    width: int


def lanes(card: Card) -> list[Lane]:
    """The rounds of the prefill, replayed from what each of them accepted."""
    result, config = card.result, card.config
    K = sum(result.accepted)
    ahead = 1 if config.prefill == "sequential" else config.lookahead or K
    row, found = Speculation(K, ahead, []), []
    for right in result.accepted:
        found.append(Lane(row.t, right, row.width))
        if config.lookahead is not None:
            thoughts = [Thought(ids) for ids in result.thought_ids[row.t : row.t + right]]
            row.lookahead = next_lookahead(row, right, thoughts)
        row.t += right
    return found


def bar(label: str, *parts: tuple[str, int, int]) -> Markup:
    """A lane: what it says, and its (kind, first chunk, chunks) on the axis of all chunks."""
    blocks = [
        tag("b", class_=kind, style=f"--a:{start};--n:{count}")
        for kind, start, count in parts
        if count
    ]
    return tag("p", tag("span", label), tag("span", *blocks, class_="bar"), class_="lane")


def speculation(card: Card) -> Markup:
    """The rounds as lanes, over the one of reading in turn."""
    K, bars = sum(card.result.accepted), []
    if card.config.prefill == "speculative":
        for number, (start, right, width) in enumerate(lanes(card), 1):
            again = width - right
            words = f"round {number}: {right} accepted" + (f", {again} redone" if again else "")
            bars.append(bar(words, ("ok", start, right), ("redo", start + right, again)))
    bars.append(bar(f"in turn: {K} passes", ("turn", 0, K)))
    summary = tag("summary", counters(card))
    return tag("details", summary, tag("div", *bars, style=f"--k:{K}"), open="")


def thought(card: Card, k: int) -> Markup:
    """The thought after chunk k, in words right or wrong where that is known."""
    result, kind, words = card.result, "zero", []
    if k < len(result.thought_ids):
        if len(result.thought_ids[k]) > 1:
            kind = "says"
            words.append(bracketed(result.thoughts[k]))
        else:
            words.append("nothing: zero state")
        if k in card.given:
            words.append(", by hand")
        if k in result.cut_thoughts:
            words.append(", cut")
    elif card.config.think:
        late = "not read to its end" if card.config.think_while_decoding else "--prompt-thoughts"
        words.append(f"no thought: {late}")
    if k < len(card.golds):
        gold = card.golds[k]
        if card.right_thought(k):
            verdict, kind = "right", f"{kind} right"
        else:
            verdict, kind = "first wrong" if k == card.first_wrong else "wrong", f"{kind} wrong"
            text = card.tokenizer.decode(gold[:-1])
            words += ["; gold: ", bracketed(text) if text else "nothing"]
        words = [tag("strong", verdict), " ", *words]
    return tag("p", *words, class_=kind)


def bracketed(text: str) -> Markup:
    """A thought; whatever way its writing runs, it does not turn what stands around it."""
    return tag("code", f"[T:{text}]", dir="auto")


def chunk(card: Card, k: int) -> Markup:
    """Chunk k: its tokens, those of the answer marked, and its thought."""
    c, answer = card.chunk_size, len(card.prompt)
    places = range(k * c, min((k + 1) * c, len(card.texts)))
    tokens = [token(card.texts[i], i >= answer) for i in places]
    text = tag("p", Markup("<wbr>".join(tokens)), dir="auto")
    return tag("li", tag("b", str(k)), tag("div", text, thought(card, k)))


def article(card: Card) -> Markup:
    """A card: its title and texts, chunks, rounds of the prefill, and all in one line of text."""
    title = [tag("span", card.title, dir="auto"), " "]
    if card.right is not None:
        verdict = "right" if card.right else "wrong"
        title.append(tag("strong", verdict, class_=verdict))
    texts = {"answer": card.result.text.strip(), "expected": card.expected}
    chunks = max(-(-len(card.texts) // card.chunk_size), len(card.golds))
    inline = Markup("\n".join(map(shown, card.inline().split("\n"))))
    return tag(
        "article",
        tag("h2", *title),
        *(
            tag("p", tag("b", word), " ", tag("span", text, dir="auto"))
            for word, text in texts.items()
            if text is not None
        ),
        tag("ol", *(chunk(card, k) for k in range(chunks))),
        speculation(card),
        tag("details", tag("summary", "as text"), tag("p", inline, class_="text", dir="auto")),
    )


def flags_of(given: Mapping[str, Any]) -> str:
    """The flags that were given, but for what only says where and how the result is shown."""
    words = []
    for name, value in given.items():
        if name in ("json", "stream", "out", "html", "prompt"):
            continue
        for each in value if isinstance(value, list) else [value]:
            words.append(typed(name, each if each is True else without_folders(str(each))))
    return " ".join(words) or "none"


def names_alone(value: object) -> str:
    """A value as it was given; of absolute paths, existing or not, the names alone."""
    names = str(value).split(",")
    return ",".join(Path(name).name if Path(name).is_absolute() else name for name in names)


def head(opened: Opened, flags: Any, given: Mapping[str, Any], seed: str) -> dict[str, str]:
    """What stands above the rows: model, revision, flags, seed."""
    about, folder = opened.about, opened.folder
    name = names_alone(getattr(flags, "model", None) or folder)
    if folder.parent.name == "snapshots":  # of the hub
        name += f" ({folder.name})"
    if about:
        about = about | {"base_model": names_alone(about.get("base_model"))}
    return {
        "model": f"{name}: {describe_model(about)}",
        "revision": revision(),
        "flags": flags_of(given),
        "seed": seed,
    }


def write_page(
    path: str, about: Mapping[str, str], rows: Sequence[Sequence[Card]], total: int
) -> None:
    """Writes a `page`, and says where it is."""
    write_text(Path(path), page(about, rows, total))
    note(f"page: {path}")


def page(about: Mapping[str, str], rows: Sequence[Sequence[Card]], total: int) -> str:
    """The page: `about` at its head, then each row's cards side by side.

    total: rows that there were; the page says how many of them it leaves out.
    """
    sections, size = [], len(HEAD + STYLE) + 2_000  # for what stands above the rows
    for cards in rows[:MOST_ROWS]:
        section = tag("section", *map(article, cards))
        size += len(section.encode())
        if sections and size > MOST_BYTES:
            break
        sections.append(section)
    count = f"{len(sections)} of {total}; {total - len(sections)} left out"
    facts = [
        tag("div", tag("dt", key), tag("dd", text, dir="auto"))
        for key, text in {**about, "rows": count}.items()
    ]
    body = tag("body", tag("h1", TITLE), tag("dl", *facts), tag("p", LEGEND), *sections)
    return f"{HEAD}<style>{STYLE}</style>\n{body}\n"


TITLE = "Thinking States: what was thought, and where"
LEGEND = (
    "Each line is a chunk of the text, and the thought that follows it; the state made of it is "
    "read with the next chunk. Boxes are tokens, those of the answer underlined; dots are blanks, "
    "and what cannot be seen is spelled out (\\n). "
    "Lanes: the chunks that each round of the prefill ran, from the first on the left to the last."
)
HEAD = f"""<!DOCTYPE html>
<html lang="en"><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{TITLE}</title>
"""
STYLE = (ASSETS / "page.css").read_text(encoding="utf-8")
