"""Two-hop questions: rows, regimes, what a model knows, and names as answers."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minits.checkpoint.tiny import make_tiny, tiny_tokenizer
from minits.fast.flat_batch import flat_losses
from minits.methods import make_method
from minits.supervision import encode_example
from minits.tasks import make_task, rows
from minits.tasks.answers import name_of, names_one_of, score_name
from minits.tasks.knowledge import ask_model, replies_of
from minits.tasks.task import check_overlap
from minits.teacher_forcing import collate as dense_collate
from minits.teacher_forcing import losses as dense_losses
from minits.thinking import ThinkingConfig

# -- names -----------------------------------------------------------------------------------------

# gold, said
SAME = [
    ("A", "a"),
    ("The Who", "the who"),
    ("The Who", "Who"),
    ("A Doll's House", "doll's house"),
    ("Odeon", "an Odeon"),
    ("U.S.", "US"),
    ("U.S.", "the U. S."),
    ("US", "U.S"),
    ("J. K. Rowling", "J.K. Rowling"),
    ("Washington D.C.", "Washington, DC."),
    ("Z\u00fcrich", "Zu\u0308rich"),
    ("Z\u00fcrich", "Zurich."),
    ("Bras\u00edlia", "BRASILIA"),
    ("AC/DC", "AC-DC"),
    ("Straße", "strasse"),
    ("L\u2019Aquila", "L'Aquila"),
    ("The", "the"),
    ("?!", "?!"),
    ("1.0", "1.0"),
    ("Rand", " Rand \n"),
]
OTHER = [
    ("A", "B"),
    ("A", ""),
    ("A", "The"),
    ("The", ""),
    ("US", "Russia"),
    ("Who", "The Guess Who"),
    ("Rome", "Rome, Italy"),
    ("Rome, Italy", "Rome"),
    ("1.0", "10"),
    ("-5", "5"),
    ("1.0", "1 0"),
    ("?!", "..."),
    ("C++", "C"),
    ("Vitamin A", "Vitamin"),
]
OPENING = "The answer is"


@pytest.mark.parametrize("gold, said", SAME)
def test_the_same_name_is_right(gold, said):
    assert score_name(said, gold, "")["right"]
    assert score_name(f"A fact. {OPENING} {said}", f"{OPENING} {gold}", OPENING)["right"]


@pytest.mark.parametrize("gold, said", OTHER)
def test_another_name_is_wrong(gold, said):
    assert not score_name(said, gold, "")["right"]
    assert not score_name(f"{OPENING} {said}", f"{OPENING} {gold}", OPENING)["right"]


def test_an_answer_without_its_opening_is_none():
    assert not score_name("Rome", f"{OPENING} Rome", OPENING)["right"]


@given(st.text(min_size=1).filter(str.strip))
def test_a_name_never_becomes_empty_and_is_its_own_name(text):
    assert name_of(text)
    assert names_one_of(text, [text])


@pytest.mark.parametrize(
    "text, names, held",
    [
        ("It lies in Russia.", ["US"], False),
        ("Norway, of course", ["Sweden", "norway"], True),
        ("capital: Washington, D.C. A city", ["Washington D.C."], True),
        ("He lives in the Hague", ["The Hague"], True),
        ("Norwegian", ["Norway"], False),
        ("", ["A"], False),
        ("anything", [], False),
    ],
)
def test_whole_words_are_found_in_a_text(text, names, held):
    assert names_one_of(text, names) is held


# -- rows ------------------------------------------------------------------------------------------

LANDS = {"Norway": ("Oslo", "Krone"), "Japan": ("Tokyo", "Yen"), "Mali": ("Bamako", "Franc")}


def row(number: int, land: str = "", **changes) -> dict:
    """A made-up row; changes of None leave a key out."""
    land = land or list(LANDS)[number % 3]
    capital = LANDS[land][0]
    found = {
        "question": f"What is the capital of the country where Bay {number} is located?",
        "e1": f"Bay {number}",
        "r1": "bay_in_country",
        "r2": "capital_of",
        "bridge": land,
        "answer": capital,
        "steps": [f"Bay {number} is in {land}.", f"The capital of {land} is {capital}."],
    }
    return {key: value for key, value in (found | changes).items() if value is not None}


FACTS = [
    {
        "relation": "r",
        "subject": f"Bay {n}",
        "object": list(LANDS)[n % 3],
        "template": "{} is in",
        "domain": "bay",
    }
    for n in range(60)
]


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def files(tmp_path) -> dict[str, str]:
    train, test = [row(n) for n in range(40)], [row(n) for n in range(50, 60)]
    return {
        "train": write(tmp_path / "train.jsonl", train),
        "test": write(tmp_path / "test.jsonl", test),
        "facts": write(tmp_path / "facts.jsonl", FACTS),
    }


def rows_only(files: dict[str, str], **options):
    return make_task("two-hop", train=files["train"], test=files["test"], **options)


def examples(task, split: str) -> list:
    return [task.example(split, n, 0) for n in range(task.size(split))]


def subjects(task, split: str) -> set[str]:
    return {example.subject for example in examples(task, split)}


def test_the_step_stands_behind_the_first_hop_and_the_second_at_the_end(files):
    task = rows_only(files, suffix="Say it.")
    first = task.example("test", 0, 0)
    question = "What is the capital of the country where Bay 50 is located?"
    assert first.prompt == f"{question} Say it." and first.answer == "The answer is Bamako"
    (step,) = first.steps
    assert question[: step.position].endswith("located") and step.text == "Bay 50 is in Mali."
    assert first.values == ((first.answer.index("Bamako"), 0),)
    both = rows_only(files, steps_shown="both", step_after="subject").example("test", 0, 0)
    assert [both.prompt[: step.position] for step in both.steps] == [
        "What is the capital of the country where Bay 50",
        both.prompt,
    ]
    assert both.steps[1].text == "The capital of Mali is Bamako." and both.values[0][1] == 1
    named = rows_only(files, steps_shown="name", suffix="Say it.").example("test", 0, 0)
    assert named == replace(first, steps=(replace(step, text="Mali."),))


def test_a_row_may_say_where_its_first_hop_ends(tmp_path):
    path = write(tmp_path / "a.jsonl", [row(1, at=7)])
    task = make_task("two-hop", train=path, valid_share=0)
    assert task.example("train", 0, 0).steps[0].position == 7


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"e1": "Rome"}, "does not name its subject e1, 'Rome'"),
        ({"steps": ["Bay 1 is in Japan."]}, "has 1 steps; a two-hop question has one for each"),
        ({"steps": ["Bay 1 is here.", "x Tokyo"]}, "does not end with its object, 'Japan'"),
        ({"steps": ["Japan", "x Tokyo"]}, "does not end with its object, 'Japan'"),
        ({"aliases": "Edo"}, "'aliases' of the row is \"Edo\", not a list"),
        ({"aliases": [5]}, "each step is a text, not 5"),
        ({"bridge": None}, "it must be an object that holds"),
        ({"at": 700}, "'at' is 700, no character of the question"),
        (
            {"question": "What is the land of Bay 1<T>?"},
            "holds <T>, which marks steps for the task",
        ),
        ({"at": "7"}, "'at' is \"7\", no character of the question"),
        ({"answer": " "}, "is empty"),
    ],
)
def test_what_is_no_row_is_told_with_its_line(tmp_path, changes, said):
    task = make_task("two-hop", train=write(tmp_path / "a.jsonl", [row(0), row(1, **changes)]))
    with pytest.raises(ValueError, match="a.jsonl, line 2: ") as error:
        task.size("train")
    assert said in str(error.value)


@pytest.mark.parametrize("line", ["[1]", "5", '"e1.value"', "{"])
def test_what_is_no_object_is_told(tmp_path, line):
    (tmp_path / "a.jsonl").write_text(json.dumps(row(0)) + "\n" + line)
    with pytest.raises(ValueError, match="a.jsonl, line 2: "):
        make_task("two-hop", train=str(tmp_path / "a.jsonl")).size("train")


# -- splits ----------------------------------------------------------------------------------------


def test_valid_is_a_share_of_the_train_subjects_whatever_their_order(files, tmp_path):
    task = rows_only(files)
    assert task.splits == ("train", "valid", "test")
    parts = subjects(task, "train"), subjects(task, "valid")
    assert not parts[0] & parts[1] and len(parts[0] | parts[1]) == 40
    assert 1 <= len(parts[1]) <= 12
    turned = write(tmp_path / "turned.jsonl", [row(n) for n in reversed(range(40))])
    assert subjects(make_task("two-hop", train=turned), "valid") == parts[1]
    assert rows_only(files, valid_share=0).splits == ("train", "test")
    own = rows_only(files, valid=write(tmp_path / "valid.jsonl", [row(45)]))
    assert (own.size("train"), own.size("valid")) == (40, 1)


def test_a_file_that_two_splits_divide_is_read_once(files, monkeypatch):
    read, content_of = [], rows.content_of
    monkeypatch.setattr(
        rows, "content_of", lambda split, name: read.append(split) or content_of(split, name)
    )
    task = rows_only(files)
    assert all(examples(task, split) for split in ("train", "valid", "test"))
    assert sorted(read) == ["test", "train"]


def test_the_share_is_that_of_many_subjects(tmp_path):
    path = write(tmp_path / "many.jsonl", [row(n) for n in range(2000)])
    assert 250 <= make_task("two-hop", train=path).size("valid") <= 350


def test_no_subject_is_in_two_splits(files, tmp_path):
    check_overlap(rows_only(files))
    other = row(3, r2="currency_of", question="What is the currency where Bay 3 is?")
    task = rows_only(files | {"test": write(tmp_path / "again.jsonl", [other])})
    with pytest.raises(ValueError, match="asks what .*train.jsonl|asks what train.jsonl, line 4"):
        check_overlap(task)


def test_a_subject_is_one_in_both_forms_of_its_accents(files, tmp_path):
    """Case tells subjects apart, in all of these: the hash decides about the splits of records."""
    composed, apart = "Z\u00fcrich  Bay", "Zu\u0308rich Bay"

    def named(subject: str) -> dict:
        question = f"What is the capital of the country where {subject} is located?"
        return row(1, e1=subject, question=question)

    subjects = composed, apart, composed.upper()
    path = write(tmp_path / "test.jsonl", [named(each) for each in subjects])
    task = rows_only(files | {"test": path}, valid_share=0)
    first, same, other = map(task.cluster, examples(task, "test"))
    assert first == same != other
    assert task.overlap_key("test", 0) != task.overlap_key("test", 2)
    with pytest.raises(ValueError, match="asks what"):
        check_overlap(replace(task, train=write(tmp_path / "apart.jsonl", [named(apart)])))
    # Beside what is known no fact is about them, either.
    write(tmp_path / "test.jsonl", [named(composed)])
    facts = [FACTS[0] | {"subject": subject} for subject in subjects]
    write(tmp_path / "facts.jsonl", facts)
    kept = [row(1)["question"], named(composed)["question"]]
    known = tmp_path / "known.json"
    data = rows_only(files, valid_share=0).sources()
    known.write_text(json.dumps({"model": "m", "data": data, "kept": kept}))
    how = {"knowledge": "parametric", "known": str(known), "facts": files["facts"]}
    task = rows_only(files, valid_share=0, **how)
    assert [fact.prompt for fact in task.fact_rows.examples] == [f"{composed.upper()} is in"]


def test_a_split_that_would_be_empty_is_refused(tmp_path):
    for n in range(5):
        path = write(tmp_path / f"{n}.jsonl", [row(n)])
        task = make_task("two-hop", train=path)
        with pytest.raises(ValueError, match="no row is left for .* may be used, which"):
            [task.size(split) for split in task.splits]


# -- full knowledge --------------------------------------------------------------------------------


def test_facts_are_rows_of_the_training_as_often_as_asked(files):
    task = rows_only(files, knowledge="full", facts=files["facts"], fact_repeats=2)
    plain = rows_only(files)
    train = examples(task, "train")
    assert train[: plain.size("train")] == examples(plain, "train")
    facts = train[plain.size("train") :]
    assert len(facts) == 120 and facts[0].prompt == "Bay 0 is in" and facts[0].answer == "Norway"
    assert all(not fact.steps and fact.taught for fact in facts)
    assert examples(task, "valid") == examples(plain, "valid")
    assert task.sources()["facts"]["repeats"] == 2 and task.sources()["facts"]["rows"] == 60
    check_overlap(task)


@pytest.mark.parametrize("method", ["thinking", "cot", "no-cot"])
def test_every_method_sees_the_same_rows(files, method):
    task = rows_only(files, knowledge="full", facts=files["facts"])
    tokenizer = tiny_tokenizer(task.texts())
    config = ThinkingConfig(4, 1, 1, tokenizer.eos_ids, tokenizer.pad_id)
    row = make_method(method).encode(task.example("train", -1, 0), tokenizer, config)
    assert tokenizer.decode(row.ids) == "Bay 59 is in Mali<eos>"


def test_l_t_can_be_left_off_on_facts(files):
    how = {"knowledge": "full", "facts": files["facts"]}
    taught, untaught = (rows_only(files, fact_thoughts=t, **how) for t in ("trivial", "untaught"))
    tokenizer = tiny_tokenizer(taught.texts())
    model, _ = make_tiny(seed=0, window=None, thinks=True, texts=taught.texts())
    model.config = replace(model.config, chunk_size=2)
    method, found = make_method("thinking"), {}
    for name, task in (("taught", taught), ("untaught", untaught)):
        facts = [task.example("train", n, 0) for n in (-1, -2)]
        asked = task.example("train", 0, 0)
        rows = [encode_example(each, tokenizer, model.config) for each in (*facts, asked)]
        dense = dense_losses(model, dense_collate(rows, model))
        flat = flat_losses(model, method.collate(rows, model.config, layout="rows"))
        for ours, theirs in ((flat.lm, dense.lm), (flat.thought, dense.thought)):
            assert torch.allclose(ours, theirs, rtol=1e-5)
        found[name] = flat
    # The same answers are learnt; of thoughts only those of the question are left.
    assert torch.allclose(found["taught"].lm, found["untaught"].lm, rtol=1e-5)
    assert found["taught"].thought_tokens > found["untaught"].thought_tokens > 0


def test_facts_can_be_said(files):
    how = {"knowledge": "full", "facts": files["facts"], "suffix": "Say it now."}
    task = rows_only(files, fact_thoughts="said", **how)
    tokenizer = tiny_tokenizer(task.texts())
    config = ThinkingConfig(2, 1, 1, tokenizer.eos_ids, tokenizer.pad_id)
    fact = task.example("train", -1, 0)
    row = make_method("thinking").encode(fact, tokenizer, config)
    assert tokenizer.decode(row.ids) == "Bay 59 is in Say it now. The answer is Mali<eos>"
    end = len(tokenizer.encode("Bay 59 is in")) - 1
    said = [k for k, thought in enumerate(row.thoughts) if len(thought) > 1]
    assert said == [end // 2]
    assert tokenizer.decode(row.thoughts[said[0]][:-1]) == " Bay 59 is in Mali."
    assert fact.answer[fact.values[0][0] :] == "Mali"
    written = make_method("cot").encode(fact, tokenizer, config)
    assert "Say it now. Bay 59 is in Mali. The answer is Mali" in tokenizer.decode(written.ids)
    names = replace(task, steps_shown="name").example("train", -1, 0)
    assert [step.text for step in names.steps] == ["Mali."] and names.prompt == fact.prompt
    # A hop alone is asked in the same words.
    asked = replace(task, ask="second").example("test", 0, 0)
    assert asked.prompt.endswith(" is Say it now.") and asked.answer.startswith("The answer is ")


def test_untaught_rows_alone_have_no_thought_loss(files):
    task = rows_only(files, knowledge="full", facts=files["facts"], fact_thoughts="untaught")
    model, tokenizer = make_tiny(seed=0, window=None, thinks=True, texts=task.texts())
    rows = [encode_example(task.example("train", -1, 0), tokenizer, model.config)]
    found = flat_losses(model, make_method("thinking").collate(rows, model.config, layout="rows"))
    assert found.thought == 0 and found.thought_tokens == 0 and found.lm > 0


@pytest.mark.parametrize(
    "options, said",
    [
        ({"knowledge": "full"}, "--facts FILE go together; --knowledge is full, --facts not given"),
        ({"knowledge": "full"}, "--knowledge full and --facts FILE go together"),
        ({"facts": "f"}, "--knowledge full and --facts FILE go together"),
        ({"knowledge": "parametric"}, "--knowledge parametric and --known FILE go together"),
        ({"known": "k", "knowledge": "full", "facts": "f"}, "--knowledge parametric and --known"),
    ],
)
def test_a_regime_has_its_file(options, said):
    with pytest.raises(ValueError, match=said):
        make_task("two-hop", **options)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"template": "is in"}, "has no {} for its subject"),
        ({"object": ""}, "is empty"),
        ({"subject": 5}, "'subject' of the fact is 5"),
    ],
)
def test_what_is_no_fact_is_told_with_its_line(files, tmp_path, changes, said):
    path = write(tmp_path / "f.jsonl", [FACTS[0], FACTS[1] | changes])
    task = rows_only(files, knowledge="full", facts=path)
    with pytest.raises(ValueError, match="f.jsonl, line 2: ") as error:
        task.size("train")
    assert said in str(error.value)


# -- parametric knowledge --------------------------------------------------------------------------


def test_rows_are_kept_whose_facts_are_known_and_not_guessed(files):
    task = rows_only(files, valid_share=0)
    rows = examples(task, "test")  # Mali, Norway, Japan, Mali, …

    def reply(prompts):
        """Knows where all bays are but Bay 52; no capital but by filling in; guesses Oslo."""
        assert len(prompts) == len(set(prompts))
        said = {}
        for prompt in prompts:
            lands = [land for land in LANDS if land in prompt]
            number = int(prompt.split("Bay ")[1].split()[0]) if "Bay" in prompt else None
            said[prompt] = "no idea"
            if number and number != 52 and prompt.startswith("Bay"):
                said[prompt] = f"{list(LANDS)[number % 3]}, a country"
            elif lands and prompt.startswith("Fill"):
                said[prompt] = f"the city of {LANDS[lands[0]][0]}."
            elif "where is located?" in prompt and prompt.startswith("Question"):
                said[prompt] = "Oslo"
        return said

    found = ask_model({"test": rows}, reply)
    assert found["kept"] == [row(n)["question"] for n in (50, 53, 55, 56, 58, 59)]
    assert found["shares"]["test"] == {
        "rows": 10,
        "first_hop": 0.9,
        "second_hop": 1.0,
        "not_guessed": 0.7,
        "kept": 0.6,
    }


def test_training_reads_the_kept_rows_of_the_same_files(files, tmp_path):
    plain = rows_only(files, valid_share=0)
    kept = [row(n)["question"] for n in (1, 2, 3, 51)]
    known = {"model": "m", "data": plain.sources(), "kept": kept}
    path = tmp_path / "known.json"
    path.write_text(json.dumps(known))
    how = {"knowledge": "parametric", "known": str(path)}
    task = rows_only(files, valid_share=0, **how)
    assert subjects(task, "train") == {"Bay 1", "Bay 2", "Bay 3"}
    assert subjects(task, "test") == {"Bay 51"}
    about = task.sources()["known"]
    assert (about["rows"], about["model"]) == (4, "m")
    # Facts beside them are about neither the subjects of valid and test nor their bridges.
    taught = rows_only(files, valid_share=0, facts=files["facts"], **how)
    facts = [each.prompt for each in examples(taught, "train") if not hasattr(each, "subject")]
    assert facts == [f"Bay {n} is in" for n in range(60) if n != 51]
    assert taught.sources()["facts"]["used"] == 59
    assert examples(taught, "test") == examples(task, "test")
    asked, split = taught.evaluated({})
    assert (split, examples(asked, "test")) == ("test", examples(task, "test"))
    land = FACTS[0] | {"subject": "Norway", "template": "the currency of {} is", "object": "Franc"}
    write(tmp_path / "facts.jsonl", [*FACTS, land])
    task = rows_only(files, valid_share=0, facts=files["facts"], **how)
    assert task.sources()["facts"]["used"] == 59
    write(tmp_path / "facts.jsonl", FACTS)
    write(tmp_path / "train.jsonl", [row(n) for n in range(39)])
    with pytest.raises(ValueError, match="was made from other rows than those of .*train.jsonl"):
        rows_only(files, valid_share=0, **how).size("train")
    for changes in (
        {"kept": None},
        {"kept": 5},
        {"kept": [[1]]},
        {"data": None},
        {"data": [1]},
        {"data": {"train": {}}},
        {"data": {"train": "rows"}},
        {"data": {"a": {"sha256": []}}},
    ):
        path.write_text(json.dumps(known | changes))
        with pytest.raises(ValueError, match="is no JSON object with model, data, kept: make it"):
            rows_only(files, **how).size("train")
    for text in ("{}", "[1]", "", "[" * 10_000):
        path.write_text(text)
        with pytest.raises(ValueError, match="is no JSON object with model, data, kept: make it"):
            rows_only(files, **how).size("train")
    for other in (tmp_path, tmp_path / "nope"):
        with pytest.raises(FileNotFoundError, match=f"--known {other} is no file"):
            rows_only(files, **how | {"known": str(other)}).size("train")


def test_where_no_row_is_known_the_file_is_named(files, tmp_path):
    known = {"model": "m", "data": rows_only(files, valid_share=0).sources(), "kept": []}
    path = tmp_path / "known.json"
    path.write_text(json.dumps(known))
    words = "no row is left for train. Of 40 rows 0 may be used .--known .*known.json"
    with pytest.raises(ValueError, match=words):
        rows_only(files, knowledge="parametric", known=str(path)).size("train")


def test_facts_beside_what_is_known_name_a_bridge_by_no_other_name(files, tmp_path):
    write(tmp_path / "test.jsonl", [row(51, bridge_aliases=["Nippon"])])
    facts = [FACTS[0] | {"subject": name, "template": "{} has"} for name in ("Nippon", "Chile")]
    write(tmp_path / "facts.jsonl", facts)
    plain = rows_only(files, valid_share=0)
    kept = [row(n)["question"] for n in (1, 51)]
    path = tmp_path / "known.json"
    path.write_text(json.dumps({"model": "m", "data": plain.sources(), "kept": kept}))
    how = {"knowledge": "parametric", "known": str(path), "facts": files["facts"]}
    task = rows_only(files, valid_share=0, **how)
    assert [each.prompt for each in task.fact_rows.examples] == ["Chile has"]


def test_facts_are_repeated_as_often_as_memory_holds(files):
    with pytest.raises(ValueError, match="--fact-repeats 1001: must be at most 1000"):
        rows_only(files, knowledge="full", facts=files["facts"], fact_repeats=1001)


def test_a_file_without_facts_is_not_told_to_hold_questions(files, tmp_path):
    empty = write(tmp_path / "none.jsonl", [])
    with pytest.raises(ValueError, match="--facts .* holds no row") as error:
        rows_only(files, knowledge="full", facts=empty).size("train")
    assert "question" not in str(error.value)


def test_replies_are_first_lines_whatever_the_batch(files):
    model, tokenizer = make_tiny(seed=0, window=None, thinks=True)
    model.config = replace(model.config, chunk_size=2)
    plain, _ = make_tiny(seed=0, window=None, thinks=False)
    prompts = ["The coin", "The coin starts at state heads. Alice flips the coin.", "The"]
    together = replies_of(model, tokenizer, prompts)
    assert together.keys() == set(prompts) and together == replies_of(plain, tokenizer, prompts)
    for prompt in prompts:
        assert replies_of(model, tokenizer, [prompt])[prompt] == together[prompt]


def test_a_reply_ends_with_its_line(monkeypatch):
    said = [SimpleNamespace(text="\n Oslo, I think\nTokyo")]
    monkeypatch.setattr("minits.tasks.knowledge.generate", lambda *_, **__: said)
    assert replies_of(None, None, ["Where?"]) == {"Where?": "Oslo, I think"}


# -- scores ----------------------------------------------------------------------------------------


def test_any_name_of_the_answer_is_right_but_no_part(tmp_path):
    path = write(tmp_path / "a.jsonl", [row(1, aliases=["Edo", "T\u014dky\u014d"])])
    task = make_task("two-hop", train=path, valid_share=0)
    example = task.example("train", 0, 0)
    said = ["Tokyo", "tokyo.", "the Edo", "Kyoto", "Tokyo Bay", "To"]
    scores = [task.score(f"A fact. The answer is {each}", example)["right"] for each in said]
    assert scores == [True, True, True, False, False, False]
    no_opening = make_task("two-hop", train=path, valid_share=0, opening="")
    example = no_opening.example("train", 0, 0)
    assert example.answer == "Tokyo" and no_opening.score("Edo", example)["right"]


@pytest.mark.parametrize("ask", ["question", "first", "second"])
def test_every_gold_is_right(files, ask):
    task = rows_only(files, ask=ask)
    for split in task.splits:
        for example in examples(task, split):
            assert task.score(example.answer, example)["right"]
            assert not task.score(f"{example.answer} Bay", example)["right"]


@pytest.mark.parametrize(
    "thoughts, text, answer, bridge",
    [
        (["Bay 50 is in Mali."], "The answer is Bamako", True, True),
        (["", "Bay 50 is in Mali."], "The answer is Oslo", False, True),
        (["Bay 50 is in Japan."], "The answer is Tokyo", False, False),
        (["Bay 50 is in Malibu."], "The answer is Bamako", True, False),
        ([], "The answer is Bamako", True, False),
        (None, "Bay 50 is in Mali. The answer is Bamako", True, True),
        (None, "Bay 50 is in Japan. The answer is Bamako", True, False),
        (None, "The answer is Bamako", True, None),
        (None, "The answer is Oslo. The answer is Oslo", False, None),  # what repeats is no step
    ],
)
def test_results_by_hop(files, thoughts, text, answer, bridge):
    task = rows_only(files)
    example = task.example("test", 0, 0)
    right = task.score(text, example)["right"]
    found = task.score_steps(text, thoughts, example, right)
    assert right is answer
    known = None if bridge is None else (not bridge, bridge and not answer, bridge and answer)
    names = "bridge_wrong", "bridge_right_answer_wrong", "both_right"
    assert tuple(found[name] for name in names) == (known or (None, None, None))
    assert task.group(example) == "bay_in_country"


def test_the_subject_does_not_tell_the_bridge(tmp_path):
    changes = {
        "e1": "Bank of Mali",
        "question": "What is the capital of the country where Bank of Mali is located?",
        "steps": ["Bank of Mali is in Mali.", "The capital of Mali is Bamako."],
    }
    path = write(tmp_path / "a.jsonl", [row(2, **changes)])
    task = make_task("two-hop", train=path, valid_share=0)
    example = task.example("train", 0, 0)
    for said, bridge in (("Japan", False), ("Mali", True)):
        thoughts = [f"Bank of Mali is in {said}."]
        assert task.score_steps("", thoughts, example, True)["both_right"] is bridge


@pytest.mark.parametrize("shown", ["bridge", "both", "name"])
@pytest.mark.parametrize("bridge", ["Yorkshire", "York", "New York"])
def test_the_bridge_may_hold_the_subject_or_be_it(tmp_path, bridge, shown):
    changes = {
        "e1": "York",
        "bridge": bridge,
        "question": "What is the capital of the land of York?",
        "steps": [f"York is in {bridge}.", f"The capital of {bridge} is Bamako."],
    }
    path = write(tmp_path / "a.jsonl", [row(2, **changes)])
    task = make_task("two-hop", train=path, valid_share=0, steps_shown=shown)
    example = task.example("train", 0, 0)
    gold = [step.text for step in example.steps]
    assert task.score_steps(example.answer, gold, example, True)["both_right"]
    assert not task.score_steps("", ["Japan."], example, True)["both_right"]


def test_what_training_rows_hold_is_told_apart(files, tmp_path):
    train = [row(n, "Japan") for n in range(3)] + [row(3, "Norway")]
    test = [row(50, "Japan"), row(51, "Norway"), row(52, "Mali")]
    test.append(row(53, "Mali", r2="other"))
    paths = {"train": write(tmp_path / "a", train), "test": write(tmp_path / "b", test)}
    task = rows_only(paths, valid_share=0)
    found = [task.score_steps("", [], example, True) for example in examples(task, "test")]
    assert [each["usual_answer_right"] for each in found] == [True, False, False, False]
    assert [each["right_where_second_fact_seen"] for each in found] == [True, True, None, None]
    assert [each["right_where_second_fact_new"] for each in found] == [None, None, True, True]
    alone = make_task("two-hop", test=paths["test"])
    found = alone.score_steps("", [], alone.example("test", 0, 0), True)
    assert found["usual_answer_right"] is None and found["right_where_second_fact_new"] is None


def test_a_hop_can_be_asked_alone_in_the_words_of_its_fact(files):
    task = rows_only(files, knowledge="full", facts=files["facts"], ask="first")
    first, fact = task.example("test", 0, 0), task.example("train", -10, 0)
    assert (first.prompt, first.answer, first.steps) == ("Bay 50 is in", "Mali", ())
    assert (fact.prompt, fact.answer) == (first.prompt, first.answer)
    assert task.score(" Mali", first)["right"] and not task.score("Oslo", first)["right"]
    assert task.score_steps("", [], first, True) == {}
    second = replace(task, ask="second").example("valid", 0, 0)
    assert second.prompt.startswith("The capital of") and second.prompt.endswith(" is")
    check_overlap(task)


def test_facts_are_not_looked_for_in_evaluation(files):
    task = rows_only(files, knowledge="full", facts=files["facts"])
    Path(files["facts"]).unlink()
    other, split = task.evaluated({})
    assert split == "test" and other.size("test") == 10
    assert other.size("train") + other.size("valid") == 40


# -- tables ----------------------------------------------------------------------------------------

CELLS = {
    "uid": "7",
    "fact_comp_type": "song-singer-mother",
    "e1.value": "Quiet Hill",
    "e2.value": "Ann Lee",
    "e3.value": "Eve Lee",
    "e2.aliases": "[['Ann Lee', 'A. Lee']]",
    "e3.aliases": "[['Eve Lee'], [\"Eve O'Lee\"]]",
    "r1.category": "song-singer",
    "r2.category": "person-mother",
    "r1(e1).prompt": "The singer of 'Quiet Hill' is",
    "r2(e2).prompt": "The mother of Ann Lee is named",
    "r2(r1(e1)).prompt": "The mother of the singer of 'Quiet Hill' is named",
}


def table(path: Path, *rows: dict[str, str]) -> str:
    """The rows' way from a CSV file to lines."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    with path.open(newline="", encoding="utf-8") as file:
        return write(path.with_suffix(".jsonl"), list(csv.DictReader(file)))


def test_tables_of_two_hop_fact_are_read(tmp_path):
    path = table(tmp_path / "a.csv", CELLS, CELLS | {"e1.value": "Hill"})
    task = make_task("two-hop", train=path, valid_share=0, steps_shown="both")
    example = task.example("train", 0, 0)
    assert (example.subject, task.size("train")) == ("Quiet Hill", 2)
    first, second = example.steps
    assert first.text == "The singer of 'Quiet Hill' is Ann Lee."
    assert example.prompt[: first.position] == "The mother of the singer of 'Quiet Hill'"
    assert second.text == "The mother of Ann Lee is named Eve Lee."
    assert example.answer == "The answer is Eve Lee"
    assert task.score("The answer is eve o\u2019lee", example)["right"]
    assert task.score_steps("", ["by A. Lee"], example, True)["both_right"]
    assert example.hops[1].prompt == "The mother of Ann Lee is named"


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"e3.aliases": "['Eve"}, "e3.aliases is no list of names"),
        ({"e3.aliases": "5"}, "e3.aliases is no list of names"),
        ({"r2.category": ""}, "nothing stands in the columns r2.category"),
    ],
)
def test_what_is_no_row_of_a_table_is_told(tmp_path, changes, said):
    task = make_task("two-hop", train=table(tmp_path / "a.csv", CELLS, CELLS | changes))
    with pytest.raises(ValueError, match="a.jsonl, line 2: ") as error:
        task.size("train")
    assert said in str(error.value)
    lacking = {key: value for key, value in CELLS.items() if key != "e1.value"}
    with pytest.raises(ValueError, match="the row holds"):
        make_task("two-hop", train=table(tmp_path / "b.csv", lacking)).size("train")
