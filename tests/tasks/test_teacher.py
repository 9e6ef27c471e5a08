"""The teacher, against a small local server that answers well, badly, late and not at all."""

from __future__ import annotations

import json
import multiprocessing
import threading
import time
from collections import Counter
from unittest.mock import patch

import pytest
from teacher_server import Server, serving

from minits.supervision import Step
from minits.tasks.align import teacher
from minits.tasks.align.problems import Problem, parse_problem
from minits.tasks.align.teacher import align_with_teacher, judged

ROWS = [
    "Tom’s bag holds 1,200 pens. He  gives half away. How many stay?||<<1200/2=600>> #### 600",
    "Ann has 3 cats and 5 dogs. How many pets?||<<3+5=8>> #### 8",
    "A café sells 2 cakes at $2.50 each. Pay?||<<2*2.5=5>> #### 5",
]
PROBLEMS = [parse_problem(row) for row in ROWS]


def marked(problem: Problem) -> str:
    """A good reply: all markers at the end."""
    question = problem.question + "<T>" * len(problem.steps)
    return json.dumps({"question": question, "steps": problem.steps})


def good(number: int, question: str) -> tuple[int, str]:
    return 200, next(marked(problem) for problem in PROBLEMS if problem.question == question)


@pytest.fixture
def serve():
    """What starts a server with a reply to (number of the request, question)."""
    with serving() as start:
        yield lambda reply: start(lambda n, said: reply(n, json.loads(said)["question"]))


def align(server: Server | str, out, problems=PROBLEMS, **given) -> Counter[str]:
    url = server if isinstance(server, str) else server.url
    hurry = {"TIMEOUT": 5.0, "WAIT": 0.01} | {k: v for k, v in given.items() if k.isupper()}
    options = {"threads": 2} | {k: v for k, v in given.items() if k.islower()}
    with patch.multiple(teacher, **hurry):
        return align_with_teacher(problems, out, url=url, model="m", **options)


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def replies(out) -> list[dict]:
    return lines(out.with_name(out.name + ".replies.jsonl"))


def test_good_replies_become_rows_in_order_and_are_not_asked_again(serve, tmp_path, monkeypatch):
    monkeypatch.setenv("MINITS_TEACHER_KEY", "secret")
    server, out = serve(good), tmp_path / "rows.jsonl"
    assert align(server, out) == {"accepted": 3}
    assert lines(out) == [
        {
            "question": problem.question,
            "steps": [{"at": len(problem.question), "text": step} for step in problem.steps],
            "answer": problem.answer,
        }
        for problem in PROBLEMS
    ]
    path, headers, body = server.seen[0]
    assert path == "/v1/chat/completions"
    assert headers["authorization"] == "Bearer secret"
    assert body["model"] == "m" and body["temperature"] == 0
    assert sum(message["role"] == "assistant" for message in body["messages"]) == 3
    assert "secret" not in (tmp_path / "rows.jsonl.replies.jsonl").read_text()

    before = out.read_bytes()
    assert align(server, out) == {"accepted": 3}
    assert server.asked == 3 and out.read_bytes() == before


def test_what_was_answered_is_found_again_wherever_it_stands(serve, tmp_path):
    server, out = serve(good), tmp_path / "rows.jsonl"
    align(server, out, PROBLEMS[:2])
    more = [PROBLEMS[2], PROBLEMS[1], PROBLEMS[0], PROBLEMS[2]]
    assert align(server, out, more) == {"accepted": 4}
    assert server.asked == 3
    assert [row["question"] for row in lines(out)] == [problem.question for problem in more]


@pytest.mark.parametrize("content", ["my notes\n", None])
def test_a_file_of_other_rows_is_not_overwritten(serve, tmp_path, content):
    server, out = serve(good), tmp_path / "rows.jsonl"
    if content:
        out.write_text(content)
    else:
        align(server, out, PROBLEMS[:2])
    before, asked = out.read_bytes(), server.asked
    with pytest.raises(ValueError, match="rows.jsonl holds other rows.*Nothing is overwritten"):
        align(server, out, PROBLEMS[1:])
    assert out.read_bytes() == before and server.asked == asked


def test_a_line_cut_short_by_a_kill_is_asked_again(serve, tmp_path):
    server, out = serve(good), tmp_path / "rows.jsonl"
    align(server, out)
    out.unlink()
    path = tmp_path / "rows.jsonl.replies.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    assert align(server, out) == {"accepted": 3}
    assert server.asked == 4 and len(replies(out)) == len(lines(out)) == 3


def test_a_call_that_is_killed_goes_on_where_it_was(serve, tmp_path):
    problems = [Problem(f"A {i}. B?", ("1+1=2",), "2", f"row {i}") for i in range(9)]
    held = threading.Event()

    def reply(number: int, question: str) -> tuple[int, str]:
        if number > 4:
            held.wait(20)
        return 200, json.dumps({"question": question + "<T>", "steps": ["1+1=2"]})

    server, out = serve(reply), tmp_path / "rows.jsonl"
    path = tmp_path / "rows.jsonl.replies.jsonl"
    child = multiprocessing.get_context("fork").Process(
        target=align, args=(server, out, problems), daemon=True
    )
    child.start()
    for _ in range(1000):
        if path.exists() and len(path.read_bytes().splitlines()) == 4:
            break
        time.sleep(0.01)
    child.kill()
    child.join()
    held.set()
    kept = replies(out)
    assert len(kept) == 4 and not out.exists()
    before = server.asked
    assert align(server, out, problems) == {"accepted": 9}
    assert server.asked == before + 5 and replies(out)[:4] == kept
    assert [row["question"] for row in lines(out)] == [problem.question for problem in problems]


def test_a_line_that_is_no_reply_is_named(serve, tmp_path):
    (tmp_path / "rows.jsonl.replies.jsonl").write_text('{"digest": "a", "reply": ""}\n[]\n')
    with pytest.raises(ValueError, match="replies.jsonl, line 2: no reply"):
        align("http://localhost", tmp_path / "rows.jsonl")


@pytest.mark.parametrize("url", ["localhost:8000/v1", "ftp://localhost", "Qwen/Qwen2.5-7B"])
def test_what_is_no_url_is_refused(tmp_path, url):
    with pytest.raises(ValueError, match="--teacher-url.*http"):
        align(url, tmp_path / "rows.jsonl")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("key", ["se\ncret", "s\u00e9cret"])
def test_a_key_that_cannot_be_is_refused_and_not_shown(tmp_path, monkeypatch, key):
    monkeypatch.setenv("MINITS_TEACHER_KEY", key)
    with pytest.raises(ValueError, match="MINITS_TEACHER_KEY") as caught:
        align("http://localhost", tmp_path / "rows.jsonl")
    assert "cret" not in str(caught.value)


def test_an_endpoint_that_shows_the_key_does_not_get_it_into_a_file(serve, tmp_path, monkeypatch):
    monkeypatch.setenv("MINITS_TEACHER_KEY", "secret\n")
    server, out = (
        serve(lambda number, question: (401, "no such key: secret")),
        tmp_path / "rows.jsonl",
    )
    with pytest.raises(ConnectionError, match="no such key") as caught:
        align(server, out, PROBLEMS[:1])
    assert server.seen[0][1]["authorization"] == "Bearer secret"
    assert "secret" not in str(caught.value)
    assert "secret" not in "".join(path.read_text() for path in tmp_path.iterdir())


def test_the_hubs_own_key_is_not_sent(serve, tmp_path, monkeypatch):
    monkeypatch.delenv("MINITS_TEACHER_KEY", raising=False)
    monkeypatch.setenv("HF_TOKEN", "of-the-hub")
    server = serve(good)
    align(server, tmp_path / "rows.jsonl", PROBLEMS[:1])
    assert server.seen[0][1]["authorization"] == "Bearer none"


Q = PROBLEMS[0].question
S = ["1200/2=600"]
FIRST = Q.index(" He")  # the end of the first sentence


@pytest.mark.parametrize(
    "question, steps, expected",
    [
        (Q[:FIRST] + "<T>" + Q[FIRST:], S, FIRST),
        # Blanks, quotes, a marker after the blank, a code fence: read as they are meant.
        (Q.replace("’", "'").replace("  ", " ").replace("pens.", "pens.<T>"), S, FIRST),
        (Q.replace("pens. He", "pens. <T> He"), S, FIRST),
        (Q + " <T>\n", S, len(Q)),
        (Q, S, "markers"),
        (Q + "<T><T>", S, "markers"),
        (Q + "<t>", S, "markers"),
        (Q + "<T>", ["1200/2=601"], "steps"),
        (Q + "<T>", [], "steps"),
        (Q + "<T>", S * 2, "steps"),
        (Q + "<T>", "1200/2=600", "steps"),
        (Q.replace("stay", "remain") + "<T>", S, "question"),
        (Q.replace("1,200", "1200") + "<T>", S, "question"),
        (Q[:-1] + "<T>", S, "question"),
        (Q.replace("1,200", "1,2<T>00"), S, "place"),
        (Q.replace("1,200", "1<T>,200"), S, "place"),
        (Q.replace("pens", "pe<T>ns"), S, "place"),
        (Q.replace("Tom’s", "Tom<T>'s"), S, "place"),
        ("<T>" + Q, S, "place"),
        (5, S, "form"),
        (Q + " <T>" + "<T>", S * 2, "steps"),
    ],
)
def test_what_is_accepted_and_what_is_rejected(question, steps, expected):
    reply = (
        "<think>{1}</think>Here it is:\n```json\n"
        + json.dumps({"question": question, "steps": steps})
        + "\n```"
    )
    placed, reason = judged(PROBLEMS[0], reply)
    if isinstance(expected, int):
        assert (placed, reason) == ((Step(expected, S[0]),), "")
    else:
        assert placed == () and reason.startswith(expected + ":")


@pytest.mark.parametrize("reply", ["", "no", "{", "[1]", '{"question": "x"}', "{" * 100_000])
def test_what_is_no_json_is_rejected(reply):
    assert judged(PROBLEMS[0], reply) == ((), "form: no JSON object with question and steps")


def test_places_are_those_of_the_problems_own_text_whatever_its_accents():
    problem = PROBLEMS[2]
    for own, said in [("é", "e\u0301"), ("e\u0301", "é")]:
        question = problem.question.replace("é", own)
        mine = Problem(question, problem.steps, problem.answer)
        theirs = problem.question.replace("é", said).replace(" Pay", "<T> Pay")
        placed, reason = judged(mine, json.dumps({"question": theirs, "steps": mine.steps}))
        assert reason == "" and question[: placed[0].position].endswith("each.")


def test_steps_keep_their_order():
    problem = Problem("A 1. B 2. C?", ("1+1=2", "2+2=4"), "4")
    reply = {"question": "A 1.<T> B 2. C?<T>", "steps": list(problem.steps)}
    placed, _ = judged(problem, json.dumps(reply))
    assert placed == (Step(4, "1+1=2"), Step(12, "2+2=4"))
    reply["steps"].reverse()
    assert judged(problem, json.dumps(reply))[1].startswith("steps:")


@pytest.mark.parametrize("own", ["caf\u00e9s are 2", "cafe\u0301s are 2"])
def test_a_marker_behind_an_accent_is_within_the_word(own):
    problem = Problem(own, ("1+1=2",), "2")
    for said in ("cafe\u0301<T>s are 2", "caf\u00e9<T>s are 2"):
        reply = json.dumps({"question": said, "steps": ["1+1=2"]})
        assert judged(problem, reply)[1].startswith("place:")


def test_a_question_that_holds_a_marker_of_its_own_is_never_written():
    problem = Problem("What is <T>?", ("1+1=2",), "2")
    reply = json.dumps({"question": problem.question, "steps": ["1+1=2"]})
    assert judged(problem, reply)[1].startswith("question:")
    with pytest.raises(ValueError, match="holds <T>"):
        teacher.row_line(problem.question, (), "2")


def test_a_bad_reply_is_kept_with_its_reason_and_not_asked_again(serve, tmp_path):
    server = serve(lambda number, question: (200, "I cannot do that."))
    out = tmp_path / "rows.jsonl"
    for _ in range(2):
        assert align(server, out) == {"form": 3}
    assert server.asked == 3 and lines(out) == []
    kept = replies(out)
    assert {row["reply"] for row in kept} == {"I cannot do that."}
    assert all(row["reason"].startswith("form: ") for row in kept)


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_server_in_trouble_is_asked_again(serve, tmp_path, status):
    server = serve(lambda number, question: (status, "") if number < 3 else good(0, question))
    assert align(server, tmp_path / "rows.jsonl", PROBLEMS[:1]) == {"accepted": 1}
    assert server.asked == 3


def test_a_wrong_key_is_not_tried_again(serve, tmp_path):
    server = serve(lambda number, question: (401, ""))
    with pytest.raises(ConnectionError, match="401"):
        align(server, tmp_path / "rows.jsonl", PROBLEMS[:1])
    assert server.asked == 1


def test_a_late_reply_is_given_up_and_asked_again_by_the_next_call(serve, tmp_path):
    slow = PROBLEMS[1].question
    waits = {slow: 1.0}

    def late(number: int, question: str) -> tuple[int, str]:
        time.sleep(waits.get(question, 0.0))
        return good(number, question)

    server, out = serve(late), tmp_path / "rows.jsonl"
    counts = align(server, out, TIMEOUT=0.3, TRIES=2)
    assert counts == {"accepted": 2, "no reply": 1}
    assert [row["reply"] for row in replies(out) if row["reason"]] == [None]
    waits.clear()
    assert align(server, out) == {"accepted": 3}
    assert [row["question"] for row in lines(out)] == [problem.question for problem in PROBLEMS]


def test_nobody_there_ends_it_and_keeps_what_there_is(serve, tmp_path):
    server, out = serve(good), tmp_path / "rows.jsonl"
    align(server, out, PROBLEMS[:1])
    with pytest.raises(ConnectionError, match="answered none of the last 2 problems.*run it again"):
        align("http://127.0.0.1:9/v1", out, TRIES=2)
    assert len(lines(out)) == 1
    assert align(server, out) == {"accepted": 3}


def test_the_examples_of_the_prompt_would_be_accepted():
    for marked_question, steps in teacher.EXAMPLES:
        reply = json.dumps({"question": marked_question, "steps": steps})
        question = marked_question.replace("<T>", "")
        _, reason = judged(Problem(question, tuple(steps), "0"), reply)
        assert reason == ""
