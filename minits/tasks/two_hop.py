"""Two-hop questions: "the currency of the country where X is located", by way of the country.

Two regimes (paper, section 4.3). Full knowledge: all facts are rows of the training too, so that
what is measured is how they are put together. Parametric: only rows stay whose two facts the base
model knows, without guessing the answer (knowledge.py); facts may be trained on beside them, but
none about what valid and test ask.
"""
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

from minits.checkpoint.files import Json
from minits.settings import flag, setting
from minits.supervision import Example, Step
from minits.tasks.answers import (
    COMPARED,
    SCORINGS,
    behind,
    name_of,
    names_one_of,
    normalised,
)
from minits.tasks.hops import TwoHopExample, parse_fact, parse_two_hop
from minits.tasks.knowledge import read_known
from minits.tasks.rows import FILES, Rows, SplitRows, read_rows
from minits.tasks.task import Task

REGIMES = {"full": "facts", "parametric": "known"}  # and the option that names its file
ALONE = {"first": 0, "second": 1}  # the hops, where one alone is asked


@dataclass(frozen=True)
class TwoHop(Rows):
    """Trained on questions about some subjects (and on facts); evaluated on other subjects."""

    scoring: str = setting("name", COMPARED, choices=tuple(SCORINGS))
    knowledge: str = setting(
        "rows",
        "where facts come from: full (--facts, trained on), parametric (the base model: --known), "
        "or the rows alone",
        choices=("rows", *REGIMES),
    )
    facts: str | None = setting(
        None,
        "file of facts; each is a training row: its template with the subject, the object. With "
        "--known only facts about what no question of valid or test is about",
    )
    fact_repeats: int = setting(1, "how often an epoch goes through the facts", least=1, most=1000)
    fact_thoughts: str = setting(
        "trivial",
        "what T learns where a fact is read: to think nothing (trivial), no lesson (untaught: no "
        "thought loss), or to say it (said: it is asked for like a question, and is its step)",
        choices=("trivial", "untaught", "said"),
    )
    known: str | None = setting(None, "file that `data --ask-model` made: only its rows are used")
    valid_share: float = setting(
        0.15,
        "share of the subjects of --train, chosen by their hash, whose rows are evaluated on "
        "instead; not beside --valid",
        least=0,
        most=0.9,
    )
    steps_shown: str = setting(
        "bridge",
        "steps of a row: the bridge's fact, both facts, or the bridge's name alone",
        choices=("bridge", "both", "name"),
    )
    step_after: str = setting(
        "hop",
        "where the bridge's fact stands: after the words that name the first hop, or right after "
        "the subject",
        choices=("hop", "subject"),
    )
    ask: str = setting(
        "question",
        "what is asked in evaluation: the question, or its first or second hop alone, in the words "
        "of the facts",
        choices=("question", *ALONE),
    )

    name: ClassVar = "two-hop"
    unit: ClassVar = "hops"
    kept: ClassVar = (*Rows.kept, "steps_shown", "step_after")
    paths: ClassVar = (*FILES, *REGIMES.values())
    recipes: ClassVar = Rows.recipes | {
        ("*", "real"): {  # facts taught, 0.5B: 1e-4 was worse on valid, but for No-CoT
            "chunk_size": 4, "layout": "pack", "steps": 1200, "batch_size": 64, "lr": 3e-5,
            "warmup": 40, "decay": 1.0,
        },
    }

    def check(self) -> None:
        for regime, option in REGIMES.items():
            file, wanted = getattr(self, option), self.knowledge == regime
            beside = option == "facts" and self.knowledge == "parametric"  # those may be, too
            if bool(file) != wanted and not beside:
                raise ValueError(
                    f"--knowledge {regime} and {flag(option)} FILE go together; --knowledge is "
                    f"{self.knowledge}, {flag(option)} {file or 'not given'}. Give both or neither."
                )

    def has(self, split: str) -> bool:
        return super().has(split) or bool(split == "valid" and self.train and self.valid_share)

    @cached_property
    def divided(self) -> SplitRows:
        """What --train names, where its rows are those of two splits."""
        return super().read_split("train")

    def read_split(self, split: str) -> SplitRows:
        """As that of the task rows; raises ValueError, too, where no row is left."""
        cut = split != "test" and not self.valid and self.valid_share > 0
        rows, about = self.divided if cut else super().read_split(split)
        if self.known:
            rows = self.known_rows(rows, about)
        used = len(rows)
        if cut:
            rows = [row for row in rows if self.held_out(row.subject) == (split == "valid")]
        if not rows:
            known = f" (--known {self.known})" if self.known else ""
            raise ValueError(
                f"{about['file']}: no row is left for {split}. Of {about['rows']} rows {used} may "
                f"be used{known}, which --valid-share {self.valid_share} divides by subject. Name "
                "other files, or choose another share."
            )
        about = about | {"used": len(rows)}
        if split == "train" and self.facts:
            rows = rows + self.fact_rows.examples * self.fact_repeats
        if split != "train" and self.ask != "question":
            rows = [self.as_fact(hop_alone(row, ALONE[self.ask])) for row in rows]
        return SplitRows(rows, about)

    @cached_property
    def fact_rows(self) -> SplitRows:
        """The facts that are trained on."""
        rows, about = read_rows("facts", self.facts, parse_fact, self.skip_bad)
        if self.known:  # what a question needs is the base model's to know
            asked = [row for split in self.splits[1:] for row in self.loaded(split).examples]
            names = {normalised(n) for row in asked for n in (row.subject, *row.hops[0].names)}
            texts = [normalised(row.prompt) for row in rows]
            rows = [row for row, text in zip(rows, texts) if not any(n in text for n in names)]
            about = about | {"used": len(rows)}
        return SplitRows(list(map(self.as_fact, rows)), about)

    def as_fact(self, row: Example) -> Example:
        """A row without steps as facts are trained on."""
        if self.fact_thoughts == "said":
            words = row.answer if self.steps_shown == "name" else f"{row.prompt} {row.answer}"
            fact = Step(len(row.prompt), f"{words}.")
            said = self.with_words(replace(row, steps=(fact,)))
            return replace(said, values=((len(said.answer) - len(row.answer), 0),))
        return replace(row, taught=self.fact_thoughts != "untaught")

    @cached_property
    def what_is_known(self) -> Json:
        """What the file --known holds, see `read_known`."""
        return read_known(Path(self.known))

    def known_rows(self, rows: list[TwoHopExample], about: Json) -> list[TwoHopExample]:
        """The rows whose facts are known. Raises ValueError if the model was not asked them."""
        if about["sha256"] not in self.what_is_known["files"]:
            raise ValueError(
                f"--known {self.known} was made from other rows than those of {about['file']} "
                f"(SHA-256 {about['sha256']:.12}…). Make it anew: data two-hop --ask-model."
            )
        return [row for row in rows if row.question in self.what_is_known["kept"]]

    def held_out(self, subject: str) -> bool:
        """Whether rows about `subject` are not trained on."""
        digest = sha256(normalised(subject).encode()).digest()
        return int.from_bytes(digest[:8], "big") < self.valid_share * 2**64

    def parse(self, line: str) -> Any:
        row = self.with_words(parse_two_hop(line, self.step_after))
        steps = row.steps if self.steps_shown == "both" else row.steps[:1]
        if self.steps_shown == "name":
            steps = (replace(steps[0], text=f"{row.hops[0].names[0]}."),)
        # The answer needs the last step that is shown.
        place = len(row.answer) - len(row.hops[1].names[0])
        return replace(row, steps=steps, values=((place, len(steps) - 1),))

    def overlap_key(self, split: str, index: int) -> str:
        """The subject of a question. Facts are trained on for the subjects of all splits."""
        row = self.loaded(split).examples[index]
        return f"a question about {row.subject}" if isinstance(row, TwoHopExample) else row.prompt

    def group(self, example: Example) -> str | None:
        """By what the bridge is of its subject."""
        return example.hops[0].relation

    def cluster(self, example: Example) -> str | None:
        return normalised(example.subject)

    def sources(self) -> dict[str, Json]:
        found = super().sources()
        if self.facts and self.train:
            found["facts"] = self.fact_rows.about | {"repeats": self.fact_repeats}
        if self.known:
            known = self.what_is_known
            found["known"] = {
                "file": self.known,
                "rows": len(known["kept"]),
                "model": known["model"],
                "sha256": known["sha256"],
            }
        return found

    def evaluated(self, given: Json) -> tuple[Task, str]:
        """As `Rows.evaluated`, without the facts: only questions are evaluated on."""
        task, split = super().evaluated(given)
        idle = ["facts", "fact_repeats"] + ["fact_thoughts"] * (task.ask == "question")
        if found := [name for name in idle if name in given]:
            raise ValueError(f"{flag(found[0])}: no facts are evaluated on; leave it out.")
        task.check()  # of what is asked for: below, the regime goes with its facts
        if split != "train" and task.valid_share != self.valid_share:
            raise ValueError(
                f"--valid-share {task.valid_share}: the run left out {self.valid_share}, which "
                "says what it was trained on; leave it out."
            )
        if split == "train" and task.ask != "question":
            raise ValueError(f"--ask {task.ask}: of --train only whole questions are evaluated.")
        regime = "parametric" if task.known else "rows"
        return replace(task, knowledge=regime, facts=None) if task.facts else task, split

    # -- scores ------------------------------------------------------------------------------------

    def score(self, text: str, example: Example) -> Json:
        """As a task does, with any name of the answer for it."""
        opening = self.opening if behind(self.opening, example.answer) is not None else ""
        golds = [example.answer]
        golds += [f"{opening} {name}".strip() for name in example.hops[-1].names[1:]]
        scores = [SCORINGS[self.scoring](text, gold, opening) for gold in golds]
        return next((score for score in scores if score["right"]), scores[0])

    @cached_property
    def seen(self) -> dict[str, Counter[str]]:
        """Of the training rows, how often each answer follows a second fact, or two relations."""
        rows = self.loaded("train").examples if self.train else ()
        found = {}
        for row in rows:
            if isinstance(row, TwoHopExample):
                first, second = row.hops
                for key in (second.prompt, f"{first.relation} {second.relation}"):
                    found.setdefault(key, Counter())[second.names[0]] += 1
        return found

    def score_steps(
        self, text: str, thoughts: Sequence[str] | None, example: Example, right: bool
    ) -> dict[str, bool | None]:
        """By hop, where a step was said; by what training rows hold, where they are at hand.

        usual_answer_right: whether the pair's most frequent answer in training is this row's.
        """
        if self.ask != "question":
            return {}
        first, second = example.hops
        said, _ = self.steps_and_answer(text, thoughts)
        # The subject may hold the bridge's name: the "Bank of Norway" is in Norway. A name that is
        # said alone may hold the subject: York is in "Yorkshire".
        alone = self.steps_shown == "name" and any(example.subject in n for n in first.names)
        rest = said if alone else said.replace(example.subject, " ", 1)
        bridge = names_one_of(rest, first.names)
        told = thoughts is not None or bool(said.strip())  # No-CoT says nothing
        known = second.prompt in self.seen
        usual = self.seen.get(f"{first.relation} {second.relation}", Counter(("",)))
        names = map(name_of, second.names)
        marks = {
            "bridge_wrong": (told, not bridge),
            "bridge_right_answer_wrong": (told, bridge and not right),
            "both_right": (told, bridge and right),
            "right_where_second_fact_seen": (known, right),
            "right_where_second_fact_new": (self.seen and not known, right),
            "usual_answer_right": (self.seen, name_of(usual.most_common(1)[0][0]) in names),
        }
        return {name: mark if counts else None for name, (counts, mark) in marks.items()}


def hop_alone(row: TwoHopExample, number: int) -> TwoHopExample:
    """One hop of a row as a question, without steps; as a fact is trained on."""
    hop = row.hops[number]
    return replace(
        row, prompt=hop.prompt, answer=hop.names[0], steps=(), values=(), size=1, hops=(hop,)
    )
