"""The page of thoughts (cli/page.py): whole, harmless, the same bytes again, and true to its results."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from itertools import accumulate
from pathlib import Path

import pytest
from cli_helpers import call, result
from hypothesis import given
from hypothesis import strategies as st
from strategies import half, write_tokenizer

from minits import GenerationConfig, load
from minits.checkpoint.tiny import ASSETS
from minits.checkpoint.tokenizer import Tokenizer
from minits.cli import page as pages
from minits.cli.page import MOST_BYTES, flags_of, lanes, page, names_alone
from minits.cli.show import Card
from minits.cli.models import SHIPPED
from minits.generation import GenerationResult, generate_ids, with_texts
from minits.supervision import encode_prompt
from minits.tasks import make_task

END = 256
TAGS = set(
    "html meta title style body h1 h2 dl div dt dd p section article span b strong ol li u i code "
    "details summary wbr".split()
)
ATTRIBUTES = {"lang", "charset", "name", "content", "http-equiv", "class", "style", "dir", "open"}
VOID = {"meta", "wbr"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    """Each byte is a token, so characters are torn between tokens and between chunks."""
    folder = tmp_path_factory.mktemp("bytes")
    write_tokenizer(folder / "tokenizer.json", 260)
    return Tokenizer.from_folder(folder, (END,), END)


class Parsed(HTMLParser):
    """Elements of a page, each (tag, attributes, text); a text in `code` is one that was spelled out."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[list] = []
        self.found: list[tuple[str, dict, str]] = []
        self.feed(html)
        self.close()
        assert [each[0] for each in self.open] == ["html"]  # whose end tag may be left out

    def handle_starttag(self, tag, attrs):
        assert tag in TAGS and {key for key, _ in attrs} <= ATTRIBUTES, (tag, attrs)
        if tag not in VOID:
            self.open.append([tag, dict(attrs), ""])

    def handle_endtag(self, tag):
        name, attrs, text = self.open.pop()
        assert name == tag
        self.found.append((name, attrs, text))
        spelled = name == "code" and "dir" not in attrs
        self.open[-1][2] += ast.literal_eval(f'"{text}"') if spelled else text

    def handle_data(self, data):
        if self.open:
            self.open[-1][2] += data

    def handle_comment(self, data):
        raise AssertionError(f"a comment: {data}")

    def texts(self, tag: str, **attrs: str) -> list[str]:
        wanted = {key.rstrip("_"): value for key, value in attrs.items()}.items()
        return [text for name, own, text in self.found if name == tag and wanted <= own.items()]


def card(
    tokenizer: Tokenizer,
    prompt: str,
    answer: str = " so",
    thoughts: tuple[str, ...] = (),
    title: str = "prompt",
    c: int = 4,
    **more,
) -> Card:
    """One as if a model had read `prompt`, thought the `thoughts` and said `answer`."""
    ids, said = encode_prompt(tokenizer, prompt), [*tokenizer.encode(answer), END]
    K, full = -(-len(ids) // c), (len(ids) + len(said) - 1) // c
    told = [[*tokenizer.encode(text), END] for text in thoughts[:full]]
    told += [[END]] * (full - len(told))
    misses = [k for k in range(K - 1) if len(told[k]) > 1]
    edges = [0, *(k + 1 for k in misses), K]
    accepted = [after - before for before, after in zip(edges, edges[1:])]
    passes = sum(K - start for start in edges[:-1])
    found = GenerationResult(said, told, len(accepted), len(misses), "eos", [], passes, accepted)
    found = with_texts(found, tokenizer)
    return Card(title, ids, found, tokenizer, c, GenerationConfig(), **more)


NASTY = {
    "markup": "<script>alert(1)</script><img src=x onerror=alert(2)>",
    "end of everything": "</p></li></section></style></html><!-- ]]> -->",
    "attributes": '" onmouseover="alert(1)" \' x=\'',
    "entities": "&lt;b&gt; &amp;amp; &#60; &nbsp &copy",
    "right to left": "שלום עולם — مرحبا بالعالم 12 + 3",
    "bidi controls": "a\u202eevil\u202c b\u2066c\u2069 \u200f\u061c",
    "emoji": "👩‍👩‍👧‍👦 🏳️‍🌈 🧑🏽‍🚀 é ñ",
    "control characters": "a\x00b\x07c\x1b[31md\x7f\x85\x9f\u2028\ufeff",
    "line ends": "\none\r\ntwo\rthree\n\n\tfour\n",
    "blanks": "  two  blanks \xa0 nbsp \u3000 wide ",
    "backslashes": r"\n is no line end, \x00 no NUL, \u202e not turned",
    "address": "https://example.com/?a=1&b=2 javascript:alert(1) url(//x.example/y)",
}


def check_whole(html: str, one: Card, prompt: str, answer: str, thought: str) -> None:
    """Every text stands in the page as it was, and nothing of it became markup."""
    parsed = Parsed(html)
    tokens = parsed.texts("u")
    count = len(one.prompt)
    assert "".join(tokens[:count]) == prompt
    assert "".join(tokens[count:]) == answer + one.tokenizer.decode([END])
    assert len(parsed.texts("u", class_="a")) == len(one.result.ids)
    assert parsed.texts("p", class_="text") == [one.inline()]
    said = parsed.texts("code", dir="auto")
    assert said == [f"[T:{text}]" for text in one.result.thoughts if text]
    assert not thought or said[0] == f"[T:{thought}]"
    spans = parsed.texts("span", dir="auto")
    assert spans == [one.title, answer.strip(), one.expected]


@pytest.mark.parametrize("name", NASTY)
def test_nasty_texts_stand_in_the_page_whole_and_harmless(name, tokenizer):
    text = NASTY[name]
    one = card(tokenizer, text, text, (text,), text, expected=text)
    check_whole(page({"model": text, "flags": text}, [[one]], 1), one, text, text, text)
    assert Parsed(page({"model": text}, [[one]], 1)).texts("dd")[0] == text


@half
@given(st.text(min_size=1), st.text(), st.text(), st.text())
def test_any_text_stands_in_the_page_whole_and_harmless(tokenizer, prompt, answer, thought, title):
    one = card(tokenizer, prompt, answer, (thought,), title, expected=title)
    html = page({"model": title}, [[one]], 1)
    decoded = [tokenizer.decode(tokenizer.encode(text)) for text in (prompt, answer, thought)]
    check_whole(html, one, *decoded[:2], decoded[2] if one.result.thoughts else "")
    assert Parsed(html).texts("dd")[0] == title
    # No character that is unseen, or turns the writing round, is left but those of ours.
    assert all(c.isprintable() or c in "\n" + pages.JOINERS for c in html)


def test_a_page_asks_for_nothing_and_has_no_script(shipped):
    html = page({}, [[shipped_card(*shipped, 1)]], 1)
    assert "default-src 'none'" in html
    assert not re.search(r"<script|<link|<img|<iframe|@import|url\(|src=|href=|https?:", html)


# -- what is told is what was ----------------------------------------------------------------------


def shipped_card(model, tokenizer, index: int, golds=(), **options) -> Card:
    """The shipped model's reading of an example of Parity."""
    example = make_task("parity", eval_max_ops=20).example("ood", index, 0)
    ids = encode_prompt(tokenizer, example.prompt)
    (found,) = generate_ids(model, [ids], **options)
    found = with_texts(found, tokenizer)
    config = GenerationConfig(**options)
    return Card("x", ids, found, tokenizer, 8, config, golds=golds, expected=example.answer)


WAYS = [{"prefill": "sequential"}]
WAYS += [{"draft": d, "lookahead": n} for d in ("trivial", "carry") for n in (None, 1, 2, 3, 8)]


@pytest.fixture(scope="module")
def shipped():
    return load(SHIPPED)


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_lanes_are_the_rounds_that_the_result_counts(options, shipped):
    for index in range(3):
        one = shipped_card(*shipped, index, **options)
        found, K = lanes(one), -(-len(one.prompt) // 8)
        assert len(found) == one.result.rounds
        assert sum(lane.width for lane in found) == one.result.chunk_passes
        assert [lane.accepted for lane in found] == one.result.accepted
        starts = accumulate((lane.accepted for lane in found), initial=0)
        assert [lane.start for lane in found] + [K] == list(starts)
        assert all(lane.start + lane.width <= K for lane in found)


def test_quiet_texts_double_the_lookahead_in_the_lanes_too(tokenizer):
    quiet = card(tokenizer, "x" * 60)  # 15 chunks
    found = replace(quiet.result, accepted=[1, 2, 4, 8], rounds=4, chunk_passes=15)
    config = GenerationConfig(lookahead=1)
    widths = [lane.width for lane in lanes(replace(quiet, result=found, config=config))]
    assert widths == [1, 2, 4, 8]


def test_lanes_and_counters_in_the_page_are_those_of_the_result(shipped):
    one = shipped_card(*shipped, 1)
    html = page({}, [[one]], 1)
    parsed = Parsed(html)
    told, r = parsed.texts("summary")[0], one.result
    assert f"{len(one.prompt)} tokens in {-(-len(one.prompt) // 8)} chunks" in told
    assert f"{r.nontrivial} non-trivial" in told and f"{len(r.ids)} new tokens" in told
    assert f"{r.rounds} rounds, {r.chunk_passes} chunk passes" in told and " s" not in told[-4:]
    words = [text for text in parsed.texts("span") if re.match("round|in turn", text)]
    assert len(words) == r.rounds + 1 and words[-1] == f"in turn: {sum(r.accepted)} passes"
    numbers = [list(map(int, re.findall(r"(\d+) (?:accepted|redone)", line))) for line in words]
    assert sum(map(sum, numbers)) == r.chunk_passes
    blocks = re.findall(r'class="(ok|redo)" style="--a:(\d+);--n:(\d+)"', html)
    assert sum(int(count) for *_, count in blocks) == r.chunk_passes
    assert sum(int(count) for kind, _, count in blocks if kind == "ok") == sum(r.accepted)


def test_right_and_wrong_are_words_the_first_wrong_thought_and_zero_states_too(tokenizer):
    golds = [[*tokenizer.encode(text), END] for text in ("a", "b", "", "d")]
    one = card(tokenizer, "x" * 16, " yes", ("a", "", "c", "e"), golds=golds, right=False)
    one = replace(one, given={3: one.result.thought_ids[3]})
    one = replace(one, result=replace(one.result, cut_thoughts=[2]))
    parsed = Parsed(page({}, [[one]], 1))
    told = [text for name, own, text in parsed.found if name == "p" and own.get("class")]
    assert told[:5] == [
        "right [T:a]",
        "first wrong nothing: zero state; gold: [T:b]",
        "wrong [T:c], cut; gold: nothing",
        "wrong [T:e], by hand; gold: [T:d]",
        "nothing: zero state",
    ]
    kinds = [own["class"] for name, own, _ in parsed.found if name == "p" and "class" in own]
    assert kinds[:5] == ["says right", "zero wrong", "says wrong", "says wrong", "zero"]
    assert parsed.texts("strong", class_="wrong") == ["wrong"]
    assert parsed.texts("strong") == ["wrong", "right", "first wrong", "wrong", "wrong"]
    css = pages.STYLE
    assert re.search(r"p\.wrong \{ border: \S+ dashed", css) and "p.right { border" in css


def test_a_gold_thought_that_never_came_is_wrong_and_shown(tokenizer):
    golds = [[END], [END], [*tokenizer.encode("late"), END]]
    one = card(tokenizer, "xxxx", "", golds=golds, right=False)
    told = Parsed(page({}, [[one]], 1)).texts("p", class_="zero wrong")
    assert told[-1] == "wrong no thought: not read to its end; gold: [T:late]"


# -- size and left out -----------------------------------------------------------------------------


def test_twenty_rows_of_a_problems_length_are_small_and_the_rest_is_counted(tokenizer):
    text = "Tom has 15 boxes & each holds 8 pens. He sells <three> quarters. "
    # A token a word in real vocabularies: about 100 tokens.
    one = card(tokenizer, (text * 2)[:100], " The answer is 30.", ("15*8=120", "", "=90"), c=8)
    html = page({}, [[one]] * 30, 500)
    assert html.count("<section>") == 20 and "20 of 500; 480 left out" in html
    assert len(html.encode()) <= MOST_BYTES


def test_long_rows_stop_before_the_page_grows_too_large_but_one_always_stands(tokenizer):
    long = card(tokenizer, "🙂<&>" * 200, c=8)
    html = page({}, [[long]] * 20, 20)
    shown = html.count("<section>")
    assert 1 <= shown < 20 and len(html.encode()) <= MOST_BYTES
    assert f"{shown} of 20; {20 - shown} left out" in html
    huge = card(tokenizer, "🙂<&>" * 3000, c=8)
    html = page({}, [[huge]] * 2, 2)
    assert html.count("<section>") == 1 and "1 of 2; 1 left out" in html


# -- the commands ----------------------------------------------------------------------------------

COIN = "The coin starts at state heads. Alice flips the coin. Bob doesn't flip the coin."
INFER = ["infer", "--run", SHIPPED]
EVAL = ["eval", "--run", SHIPPED, "--samples", 24, "--eval-max-ops", 14]


@pytest.mark.parametrize(
    "command",
    [[*INFER, COIN], [*INFER, "--thought", "1=heads"], EVAL],
    ids=["text", "demo", "eval"],
)
def test_the_same_command_writes_the_same_bytes_and_no_path_of_this_machine(command, empty):
    for name in ("one.html", empty / "two.html"):
        status, _, err = call(*command, "--html", name)
        assert status == 0 and f"page: {name}\n" in err
    one, two = (Path(name).read_bytes() for name in ("one.html", "two.html"))
    assert one == two
    assert str(SHIPPED.parent).encode() not in one and str(empty).encode() not in one
    assert not re.search(rb"20\d\d-\d\d-\d\d", one)
    assert {path.name for path in empty.iterdir()} == {"one.html", "two.html"}


def test_a_page_replaces_nothing_and_needs_a_folder(empty):
    (empty / "mine.html").write_text("years of work")
    status, out, err = call(*EVAL, "--html", "same", "--out", "./same")
    assert (status, out) == (2, "") and "--out and --html are both ./same" in err
    for command in (INFER, EVAL):
        status, out, err = call(*command, "--html", "mine.html")
        assert (status, out) == (2, "") and "--html mine.html exists" in err
        status, out, err = call(*command, "--html", "no/such.html")
        assert (status, out) == (2, "") and "--html no/such.html: its folder" in err
    assert (empty / "mine.html").read_text() == "years of work"


def test_the_page_of_an_evaluation_shows_wrong_and_right_rows_with_golds(empty):
    status, _, _ = call(*EVAL, "--states", "zero", "--html", "page.html", "--out", "lines.jsonl")
    assert status == 0
    parsed = Parsed((empty / "page.html").read_text(encoding="utf-8"))
    lines = [json.loads(line) for line in (empty / "lines.jsonl").read_text().splitlines()]
    about = dict(zip(parsed.texts("dt"), parsed.texts("dd")))
    assert about["rows"] == "20 of 24; 4 left out" and about["seed"] == "0 (of the examples)"
    assert about["model"].startswith("parity: thinking on parity")
    assert about["flags"] == "--run parity --samples 24 --eval-max-ops 14 --states zero"
    titles = [text for text in parsed.texts("h2")]
    shown = {int(title.split()[1]): title.split()[2] for title in titles}
    verdicts = {True: "right", False: "wrong"}
    assert shown == {i: verdicts[lines[i]["correct"]] for i in shown} and len(shown) == 20
    assert set(list(shown.values())[:2]) == {"right", "wrong"}
    golds = sum(len(lines[i]["gold_thoughts"]) for i in shown)
    right = sum(lines[i]["thoughts_right"] for i in shown)
    words = [text for text in parsed.texts("strong") if text != ""]
    marks = [own["class"] for name, own, _ in parsed.found if name == "p" and "class" in own]
    assert sum(kind.endswith(" right") for kind in marks) == right
    assert sum(kind.endswith(" wrong") for kind in marks) == golds - right > 0
    first = [lines[i]["first_wrong"] for i in shown]
    assert words.count("first wrong") == sum(place is not None for place in first)


def test_thoughts_that_were_not_to_be_thought_are_not_wrong(empty):
    how = ["--samples", 3, "--prompt-thoughts", "--html", "page.html", "--out", "lines.jsonl"]
    status, out, _ = call("eval", "--run", SHIPPED, *how, "--eval-max-ops", 12, "--json")
    told = result(out)
    assert status == 0 and told["thought_accuracy"] == told["thoughts_all_right"] == 1.0
    assert told["first_wrong"] is None
    for line in (empty / "lines.jsonl").read_text().splitlines():
        assert json.loads(line)["thoughts"] == json.loads(line)["gold_thoughts"]
    html = (empty / "page.html").read_text(encoding="utf-8")
    assert "no thought: --prompt-thoughts" in html and "not read to its end" not in html


def test_a_thought_given_by_hand_changes_what_follows_and_stands_beside(empty):
    flags = ["--thought", "0=tails", "--html", "page.html", "--json"]
    status, out, _ = call(*INFER, COIN, *flags)
    usual, given = map(json.loads, out.splitlines())
    assert status == 0 and usual["way"] == "" and given["way"] == "--thought 0=tails"
    assert usual["thoughts"][0] == " heads" and given["thoughts"][0] == " tails"
    assert (usual["text"], given["text"]) == (
        " The final state of the coin is tails.",
        " The final state of the coin is heads.",
    )
    html = (empty / "page.html").read_text(encoding="utf-8")
    assert html.count("<section>") == 1 and html.count("<article>") == 2
    assert html.count(", by hand") == 1
    out = call(*INFER, COIN, *flags[:2])[1]
    assert out.count("answer: ") == 2 and "\n--thought 0=tails:\nThe coin" in out


def test_given_thoughts_are_read_alike_in_all_ways_of_reading(empty):
    found = []
    for how in (["--prefill", "sequential"], ["--draft", "carry"], ["--lookahead", "2"], []):
        flags = ["--thought", "1=heads heads", "--thought", "0=", *how, "--json"]
        line = result(call(*INFER, COIN, *flags)[1])
        found.append([line[key] for key in ("text", "thoughts", "nontrivial", "stop_reason")])
    assert found == [found[0]] * 4 and found[0][1][:2] == ["", " heads heads"]


def test_thoughts_are_given_to_every_prompt_of_a_file(empty):
    prompts = [COIN, COIN.replace("heads", "tails"), COIN[:53]]
    (empty / "prompts.txt").write_text("\n".join(prompts))
    flags = ["--file", "prompts.txt", "--thought", "0=tails", "--json", "--html", "page.html"]
    lines = list(map(json.loads, call(*INFER, *flags)[1].splitlines()))
    assert [line["line"] for line in lines] == [1, 1, 2, 2, 3, 3]
    for prompt, line in zip(prompts, lines[1::2]):
        alone = result(call(*INFER, prompt, "--thought", "0=tails", "--json")[1])
        assert alone["text"] == line["text"] and alone["thoughts"] == line["thoughts"]
    html = (empty / "page.html").read_text(encoding="utf-8")
    assert html.count("<section>") == 3 and html.count("<article>") == 6


BAD = {
    "no number": ("x=heads", "give K=TEXT"),
    "negative": ("-1=heads", "give K=TEXT"),
    "no text": ("1", "give K=TEXT"),
    "no chunk": ("7=heads", "--thought 7=…: prompt and its answer have 3 chunks with a thought"),
    "unknown word": ("1=dog", "--thought 1=dog: the word ' dog' is not in this small vocabulary"),
    "control characters": ("1=\x1b[31m", "--thought 1=\\x1b[31m: the word"),
    "too long": ("1=heads heads heads", "has 3 tokens, more than --max-thought-tokens = 2"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_thought_that_cannot_be_given_is_told_in_one_line(name, empty):
    told, words = BAD[name]
    status, _, err = call(*INFER, COIN, f"--thought={told}", "--max-thought-tokens", 2)
    last = err.splitlines()[-1]
    assert status == 2 and last.startswith("run.py infer: --thought") and words in last


def test_two_thoughts_for_one_chunk_and_thoughts_of_a_model_without_any_are_refused(inside):
    status, _, err = call(*INFER, COIN, "--thought", "1=heads", "--thought", "01=tails")
    assert status == 2 and "--thought 01=tails: chunk 1 has a thought already" in err
    status, _, err = call("infer", "Hi", "--model", "plain", "--thought", "0=Ho")
    assert status == 2 and "--thought does nothing without thoughts" in err


def test_the_question_first_stands_beside_the_prompt_as_it_is(inside):
    prompt = "Tom has 3 <b>pens</b>. He buys 2. How many?"
    flags = ["--model", "plain", "--think", "on", "--max-new-tokens", 4, "--max-thought-tokens", 3]
    status, out, _ = call(
        "infer", prompt, *flags, "--question-first", "--html", "first.html", "--json"
    )
    usual, first = map(json.loads, out.splitlines())
    assert status == 0 and (usual["way"], first["way"]) == ("", "question first")
    alone = result(call("infer", f"How many? {prompt}", *flags, "--json")[1])
    assert first["thoughts"] == alone["thoughts"] and first["text"] == alone["text"]
    html = Path("first.html").read_text(encoding="utf-8")
    Path("first.html").unlink()
    tokens = "".join(Parsed(html).texts("u"))
    assert tokens.startswith(prompt) and f"How many? {prompt}" in tokens


def test_a_text_that_only_looks_like_a_path_stays_whole_among_the_flags(tmp_path):
    given = {"run": str(tmp_path), "stop": ["/think", "a=/no/such"], "suffix": "/"}
    told = f"--run {tmp_path.name} --stop /think --stop a=/no/such --suffix /"
    assert flags_of(given) == told


def test_paths_of_this_machine_are_cut_to_names():
    values = ["/home/me/run", "runs/x", "/a/b.jsonl,/c/d.jsonl", "", "2=heads", 3]
    wanted = ["run", "runs/x", "b.jsonl,d.jsonl", "", "2=heads", "3"]
    assert list(map(names_alone, values)) == wanted


# -- the page that ships ---------------------------------------------------------------------------

# After a change of the page that is meant, committed, in the project's folder:
# python run.py infer --run minits/assets/parity --thought 2=tails --html new.html
# mv new.html minits/assets/thoughts.html
EXAMPLE = ASSETS / "thoughts.html"


def test_the_page_that_ships_is_what_its_command_writes(empty, monkeypatch):
    html = EXAMPLE.read_text(encoding="utf-8")
    parsed = Parsed(html)
    about = dict(zip(parsed.texts("dt"), parsed.texts("dd")))
    assert about["flags"] == "--run minits/assets/parity --thought 2=tails"
    monkeypatch.setattr(pages, "revision", lambda: about["revision"])
    monkeypatch.chdir(ASSETS.parents[1])
    command = ["infer", *about["flags"].split(), "--html", empty / "new.html"]
    assert call(*command)[0] == 0
    assert (empty / "new.html").read_bytes() == EXAMPLE.read_bytes()


# -- a real browser --------------------------------------------------------------------------------

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
REPORT = """<script>
addEventListener("load", () => {
  const wide = [...document.querySelectorAll("*")].filter(
    (each) => each.getBoundingClientRect().right > document.documentElement.clientWidth + 1);
  document.documentElement.dataset.told = JSON.stringify({
    wide: wide.map((each) => each.outerHTML.slice(0, 80)),
    asked: performance.getEntriesByType("resource").map((each) => each.name),
    paper: getComputedStyle(document.body).backgroundColor,
    alerts: window.alerts || 0,
    text: document.querySelector(".text").textContent,
  });
});
window.alert = () => { window.alerts = (window.alerts || 0) + 1; };
</script>"""


def in_browser(html: str, folder: Path, width: int, dark: bool) -> dict:
    """What headless Chromium makes of a page; a script of ours, which no page has, looks at it."""
    policy = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
    assert len(policy.findall(html)) == 1
    file = folder / "seen.html"
    file.write_text(policy.sub(lambda _: REPORT, html), encoding="utf-8")
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900", scheme]
    flags += [f"--user-data-dir={folder / 'profile'}", "--dump-dom", file.as_uri()]
    done = subprocess.run([BROWSER, *flags], capture_output=True, timeout=120)
    (left,) = re.findall(r'<html[^>]* data-told="([^"]*)"', done.stdout.decode())
    return json.loads(unescape(left))


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here (apt-get install chromium)")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_in_a_browser_nothing_is_asked_for_run_or_cut_off(width, dark, tokenizer, tmp_path):
    text = " ".join(NASTY.values()) + "x" * 200
    one = card(tokenizer, text, text, (text, "", text), text, c=8, right=False, expected=text)
    told = in_browser(page({"model": text}, [[one, one]], 1), tmp_path, width, dark)
    assert told["wide"] == [] and told["asked"] == [] and told["alerts"] == 0
    assert told["paper"] == ("rgb(21, 22, 26)" if dark else "rgb(255, 255, 255)")
    # Characters that were spelled out are text; all others are as they were.
    for name in ("markup", "entities", "right to left", "emoji", "attributes"):
        assert NASTY[name] in told["text"]
