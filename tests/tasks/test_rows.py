"""The task `rows`: what a file of one's own may hold, what is refused, and what is kept of it."""

from __future__ import annotations

import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minits.checkpoint.tiny import ASSETS, ENTRIES, make_tiny, tiny_tokenizer
from minits.supervision import MARKER, Step, parse_marked, render_marked
from minits.tasks import make_task
from minits.tasks.task import check_overlap

TOM = {
    "question": "Tom has 3 pens. He buys 2.",
    "steps": [{"at": 15, "text": "3"}, {"at": 26, "text": "5"}],
    "answer": "5",
}
MARKED = {
    "question": "Tom has 3 pens.<T> He buys 2.<T>",
    "steps": ["3", "5"],
    "answer": "5",
}


def row(**changes) -> str:
    """A line of a file: Tom's, with changes; what is changed to None is left out."""
    return json.dumps({key: value for key, value in (TOM | changes).items() if value is not None})


def task_of(folder: Path, content: str | bytes, **options):
    """The task that trains on a file with that content."""
    file = folder / "own.jsonl"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return make_task("rows", train=str(file), **options)


def examples(task, split: str = "train"):
    return [task.example(split, i, 0) for i in range(task.size(split))]


# -- what a row says -------------------------------------------------------------------------------


def test_both_forms_of_a_row_say_the_same(tmp_path):
    placed, marked = examples(task_of(tmp_path, f"{json.dumps(TOM)}\n{json.dumps(MARKED)}\n"))
    assert placed.prompt == marked.prompt == "Tom has 3 pens. He buys 2."
    assert placed.steps == marked.steps == (Step(15, "3"), Step(26, "5"))
    assert placed.answer == marked.answer == "The answer is 5"
    assert (placed.size, placed.name, marked.name) == (
        2,
        "own.jsonl, line 1",
        "own.jsonl, line 2",
    )


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)
texts = texts.filter(lambda text: text.strip() and MARKER not in text)


@given(data=st.data(), question=texts, steps=st.lists(texts, max_size=5), answer=texts)
def test_any_text_survives_in_both_forms(tmp_path_factory, data, question, steps, answer):
    places = sorted(data.draw(st.integers(0, len(question))) for _ in steps)
    marked = render_marked(question, [Step(*pair) for pair in zip(places, steps)])
    if marked.count(MARKER) != len(steps):  # the halves of a marker of the question's own
        return
    placed = [{"at": at, "text": text} for at, text in zip(places, steps)]
    lines = [
        {"question": question, "steps": placed, "answer": answer},
        {"question": marked, "steps": steps, "answer": answer},
    ]
    content = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    for found in examples(task_of(tmp_path_factory.mktemp("rows"), content, opening="")):
        assert found.prompt == question and found.answer == answer
        assert found.steps == tuple(map(Step, places, steps))


@pytest.mark.parametrize(
    ("opening", "answer", "expected"),
    [
        ("The answer is", "5", "The answer is 5"),
        ("The answer is", "The answer is 5", "The answer is 5"),
        ("  A: ", "5", "A: 5"),
        ("", "5", "5"),
    ],
)
def test_answers_begin_with_the_opening(opening, answer, expected, tmp_path):
    (found,) = examples(task_of(tmp_path, row(answer=answer), opening=opening))
    assert found.answer == expected


def test_a_row_needs_no_steps(tmp_path):
    assert examples(task_of(tmp_path, row(steps=None)))[0].steps == ()


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_lines_end_at_line_feeds_and_carriage_returns_only(end, mark, tmp_path):
    odd = json.dumps(TOM | {"answer": "a\u2028b\x85c\u2029d"}, ensure_ascii=False)
    content = mark + end.join([odd, "", "  ", odd + end]).encode()
    found = examples(task_of(tmp_path, content))
    assert [each.name for each in found] == ["own.jsonl, line 1", "own.jsonl, line 4"]
    assert {each.answer for each in found} == {"The answer is a\u2028b\x85c\u2029d"}


# -- what is refused -------------------------------------------------------------------------------

AT = {"at": 15, "text": "3"}
BAD = {
    "no JSON": ('{"question": "a"', "no JSON: Expecting ',' delimiter at character 17"),
    "a text without its end": (
        '{"question": "a',
        "no JSON: Unterminated string starting at character 14 (a row is one line)",
    ),
    "two rows in a line": (f"{row()} {row()}", "no JSON: Extra data"),
    "no object": (
        "[1]",
        "the row holds [1]; it must be an object that holds question, answer, perhaps steps, and n",
    ),
    "nested": ("[" * 100_000, "recursion"),
    "no question": (
        row(question=None),
        "the row holds steps, answer; it must be an object that holds question, answer, perhaps ",
    ),
    "no answer": (
        row(answer=None),
        "the row holds question, steps; it must be an object that holds question, answer, perhaps",
    ),
    "unknown key": (row(anwser="5"), "the row holds question, steps, answer, anwser; it must"),
    "nothing but an answer": ('{"answer": "5"}', "the row holds answer; it must"),
    "a key twice": ('{"answer": "5", "answer": "6"}', "a key is there twice: answer, answer"),
    "question is a number": (row(question=5), "'question' of the row is 5, not a text"),
    "answer is a number": (row(answer=5), "'answer' of the row is 5, not a text"),
    "steps are a text": (row(steps="3"), "'steps' of the row is \"3\", not a list"),
    "empty question": (row(question=" ", steps=[]), "is empty"),
    "empty answer": (row(answer="\n"), "is empty"),
    "empty step": (row(steps=[{"at": 15, "text": " "}]), "is empty"),
    "markers alone": (row(question="<T>", steps=["3"]), "is empty"),
    "NUL": (row(question="a\0b", steps=[]), "'\\x00' is no character of a text"),
    "half a character": (row(answer="\ud800"), "'\\ud800' is no character of a text"),
    "a raw NUL": (row().replace("Tom", "\0"), "no JSON: Invalid control character"),
    "no UTF-8": (b'{"question": "\xe9"}', "utf-8"),
    "a mark inside": ("\ufeff" + row(), "no JSON"),
    "no place": (row(steps=[{"text": "3"}]), "step 1 holds text; it must be an object"),
    "more than a place": (row(steps=[AT, AT | {"to": 1}]), "step 2 holds at, text, to;"),
    "a place that is a text": (row(steps=[AT | {"at": "15"}]), "'at' of step 1 is \"15\", not a w"),
    "a place that is true": (row(steps=[AT | {"at": True}]), "'at' of step 1 is true"),
    "a place of 15.0": (row(steps=[AT | {"at": 15.0}]), "'at' of step 1 is 15.0"),
    "a step of a number": (row(steps=[AT | {"text": 3}]), "'text' of step 1 is 3, not a text"),
    "before the question": (row(steps=[AT | {"at": -1}]), "characters [-1]"),
    "behind the question": (row(steps=[AT | {"at": 27}]), "[27]; they must follow the order of "),
    "places out of order": (row(steps=[AT, AT | {"at": 3}]), "characters [15, 3]"),
    "texts without markers": (row(steps=["3"]), "0 markers '<T>' for 1 steps"),
    "markers without texts": (row(question="a<T>", steps=[]), "1 markers '<T>' for 0 steps"),
    "markers and places": (row(question="a<T>", steps=[AT]), "beside markers each step is a text"),
    "two kinds of steps": (row(steps=[AT, "5"]), "0 markers '<T>' for 2 steps"),
    "steps of numbers": (
        row(steps=[3]),
        "step 1 holds 3; it must be an object that holds at, text, and nothing else",
    ),
}


def bad_bytes(line: str | bytes) -> bytes:
    return line if isinstance(line, bytes) else line.encode()


@pytest.mark.parametrize("line, message", BAD.values(), ids=BAD)
def test_a_line_that_is_no_row_is_an_error_that_names_file_and_line(line, message, tmp_path):
    content = b"\n".join([row().encode(), b"", bad_bytes(line), row().encode()])
    with pytest.raises(ValueError) as error:
        examples(task_of(tmp_path, content))
    told = str(error.value)
    assert told.startswith(f"{tmp_path / 'own.jsonl'}, line 3: ") and "--skip-bad" in told
    assert message in told and len(told) < 600 and ".." not in told


@pytest.mark.parametrize("line", [line for line, _ in BAD.values()], ids=BAD)
def test_such_lines_can_be_passed_over_and_are_counted(line, tmp_path):
    content = b"\n".join([row().encode(), bad_bytes(line), bad_bytes(line)])
    task = task_of(tmp_path, content, skip_bad=True)
    assert [each.name for each in examples(task)] == ["own.jsonl, line 1"]
    about = task.sources()["train"]
    assert (about["rows"], about["skipped"]) == (1, 2)
    assert about["first_skipped"].startswith("line 2: ")


@pytest.mark.parametrize("content", ["", "\n \r\n"])
def test_a_file_without_rows_is_an_error(content, tmp_path):
    with pytest.raises(ValueError, match=r"--train .*own.jsonl holds no row \(0 bad lines\)"):
        examples(task_of(tmp_path, content))


def test_a_file_of_bad_lines_alone_is_an_error_that_tells_the_first(tmp_path):
    with pytest.raises(ValueError, match=r"2 bad lines, the first: line 1: no JSON"):
        examples(task_of(tmp_path, "a\nb\n", skip_bad=True))


@pytest.mark.parametrize("name", ["nope.jsonl", "."])
def test_a_file_that_is_none_is_an_error_that_tells_what_there_is(name, tmp_path):
    (tmp_path / "other.jsonl").write_text(row())
    task = make_task("rows", train=str(tmp_path / name))
    with pytest.raises(FileNotFoundError, match=r"--train .* is no file \(.*holds other.jsonl\)"):
        examples(task)


def test_a_task_without_a_file_to_train_on_says_which_flag_is_missing(tmp_path):
    with pytest.raises(ValueError, match="no --train FILE"):
        make_task("rows").example("train", 0, 0)


def test_an_answer_without_a_number_is_none_for_scoring_by_number(tmp_path):
    assert examples(task_of(tmp_path, row(answer="many")))
    with pytest.raises(ValueError, match="line 1: --scoring number: .*many.* has no number"):
        examples(task_of(tmp_path, row(answer="many"), scoring="number", opening="Answer 1:"))


# -- splits and files ------------------------------------------------------------------------------


def test_splits_are_the_files_that_were_named(tmp_path):
    assert task_of(tmp_path, row()).splits == ("train",)
    assert task_of(tmp_path, row(), test="a").splits == ("train", "test")
    assert task_of(tmp_path, row(), test="a", valid="b").splits == ("train", "valid", "test")


@pytest.mark.parametrize(
    "again", ["Tom has  3 pens. He buys 2.\n", "Tom has 3 pens.\u00a0He buys 2."]
)
def test_a_question_in_two_files_is_an_error_that_names_both_lines(again, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join([row(question="New?", steps=[]), row(question=again, steps=[])]))
    task = task_of(tmp_path, row(), test=str(other))
    with pytest.raises(ValueError, match="^other.jsonl, line 2 asks what own.jsonl, line 1 asks"):
        check_overlap(task)
    other.write_text(row(question="New?", steps=[]))
    check_overlap(task_of(tmp_path, row(), test=str(other)))


def test_accents_in_another_form_are_the_same_question(tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text(row(question="cafe\u0301", steps=[]))
    task = task_of(tmp_path, row(question="caf\u00e9", steps=[]), valid=str(other))
    with pytest.raises(ValueError, match=r"\(1 such in training and valid\)"):
        check_overlap(task)


def test_sources_tell_rows_and_hash(tmp_path):
    task = task_of(tmp_path, f"{row()}\n{row()}\n")
    content = (tmp_path / "own.jsonl").read_bytes()
    assert task.sources() == {
        "train": {
            "file": str(tmp_path / "own.jsonl"),
            "rows": 2,
            "skipped": 0,
            "sha256": sha256(content).hexdigest(),
        }
    }


def test_each_of_several_files_counts_in_their_hash(tmp_path):
    other = tmp_path / "other.jsonl"
    hashes = set()
    for question in ("New?", "Newer?"):
        other.write_text(row(question=question, steps=[]))
        task = task_of(tmp_path, row())
        both = replace(task, train=f"{task.train},{other}")
        hashes.add(both.sources()["train"]["sha256"])
    assert len(hashes) == 2


def test_a_file_is_read_once(tmp_path):
    task = task_of(tmp_path, row())
    first = examples(task)
    (tmp_path / "own.jsonl").unlink()
    assert examples(task) == first


def test_paths_are_kept_whole_so_that_a_run_can_go_on_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.jsonl").write_text(row())
    task = make_task("rows", train="own.jsonl")
    monkeypatch.chdir("/")
    assert task.train == str(tmp_path / "own.jsonl") and len(examples(task)) == 1


# -- the tokenizer that is made from the file ------------------------------------------------------


def test_the_sample_that_ships_is_sound():
    train, test = (str(ASSETS / f"rows-{name}.jsonl") for name in ("train", "test"))
    task = make_task("rows", train=train, test=test, scoring="number")
    check_overlap(task)
    assert (task.size("train"), task.size("test")) == (32, 8)
    for example in [*examples(task), *examples(task, "test")]:
        sentences = example.prompt.split(".")[:-1]
        count = int(sentences[0].split()[3])
        found = [count]
        for sentence in sentences[1:]:
            _, verb, number = sentence.split()
            count += {"adds": 1, "takes": -1}[verb] * int(number)
            found.append(count)
        assert [int(step.text) for step in example.steps] == found
        assert example.answer == f"The answer is {count}"
        assert all(example.prompt[step.position - 1] == "." for step in example.steps)


def test_a_tokenizer_made_from_texts_is_always_the_same_small_one():
    texts = ["Zoë buys 12 pens. " * 3, "Zoë doesn't."] * 5
    tokenizer = tiny_tokenizer(texts)
    assert tokenizer.definition == tiny_tokenizer(iter(texts)).definition
    assert 258 < len(tokenizer.known_ids) <= ENTRIES
    assert tokenizer.token(0) == "<eos>" and tokenizer.token(1) == "<pad>"
    words = [tokenizer.decode([i]) for i in tokenizer.encode("Zoë buys 12 pens.")]
    assert words == ["Zoë", " buys", " 1", "2", " pens", "."]


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_it_spells_any_text(text):
    tokenizer = tiny_tokenizer(["one two"])
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and not {0, 1} & set(ids)


def test_the_tiny_models_vocabulary_is_that_of_its_tokenizer():
    model, tokenizer = make_tiny(seed=0, window=16, thinks=True, texts=["a b c"] * 3)
    assert model.backbone.config.vocab_size == len(tokenizer.known_ids)
    assert not model.blocked.any()


def test_a_marker_in_a_question_is_no_text(tmp_path):
    (found,) = examples(task_of(tmp_path, json.dumps(MARKED)))
    assert parse_marked(MARKED["question"], MARKED["steps"])[0] == found.prompt
    assert MARKER not in "".join(task_of(tmp_path, json.dumps(MARKED)).texts())
