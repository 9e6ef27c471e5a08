"""Presets are runs that can be made, and the tables are those of the records."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import run

from minits.cli import report
from minits.cli.report import MARK, PAGES, put_into
from minits.cli.train import chosen
from minits.lab import provenance
from minits.lab.paper import STATE_TRACKING
from minits.lab.presets import PRESETS, TABLES, Preset
from minits.lab.records import Book, read_book, read_records
from minits.lab.tables import tables

README = Path(__file__).parents[2] / "README.md"
EVALUATION = {"n": 500, "accuracy": 0.75, "interval": [0.71, 0.79], "thought_accuracy": 0.5}
RECORD = {
    "preset": "table1/vars-20-thinking",
    "seed": 7,
    "steps": 9,
    "train_seconds": 3.4,
    "machine": "a card",
    "revision": "abc1234",
    "settings": {"model": "some weights"},
    "id": EVALUATION | {"accuracy": 1.0},
    "ood": EVALUATION,
}
TABLE1 = [name for name in PRESETS if name.startswith(sum(TABLES.values(), ()))]
QUICK = {
    "task": "parity",
    "steps": 2,
    "batch_size": 2,
    "eval_samples": 2,
    "eval_max_ops": 10,
    "max_thought_tokens": 4,
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_run_that_can_be_made(name):
    given = {"preset": name, "model": "tiny" if name.startswith("tiny/") else "folder"}
    given |= {"device": "cpu"} | {file: f"{file}.jsonl" for file in PRESETS[name].files}
    settings, task, method = chosen(given)
    values = vars(settings) | vars(task) | vars(method)
    assert values.items() >= PRESETS[name].settings.items()
    assert (task.name, method.name) == (settings.task, settings.method)
    method.stages(settings.steps, settings.batch_size)  # raises where stages do not fit


@pytest.mark.parametrize("name", TABLE1)
def test_a_preset_of_table_1_is_what_its_title_says(name):
    given = {"preset": name, "model": "tiny" if name.startswith("tiny/") else "folder"}
    settings, task, method = chosen(given | {"device": "cpu"})
    title = PRESETS[name].title
    assert f"N = {task.max_ops}" in title or name.startswith("tiny/")
    assert ("two variables" in title) == (getattr(task, "variables", None) == 2)
    assert ("long-rows" in title) == (settings.layout == "long_rows")
    if name.startswith("tiny/") and settings.method == "thinking":
        dense = "dense" in title and settings.window == 0
        assert f"window {settings.window}" in title or dense


def test_every_cell_of_the_papers_table_has_its_preset():
    for (task, method), cells in STATE_TRACKING.items():
        for N, paper in cells.items():
            preset = PRESETS[f"table1/{task}-{N}-{method}"]
            found = [preset.settings[key] for key in ("task", "method", "max_ops")]
            assert found == [task, method, N] and preset.paper == paper


def test_a_run_is_told_with_all_that_it_takes_to_trust_it_and_what_was_not_run_says_so():
    lines = tables(Book([RECORD]))["runs"].splitlines()
    (line,) = [line for line in lines if "table1/vars-20-thinking" in line]
    parts = ["87.23", "75.0 [71.0, 79.0]", "100.0", "50.0", "500", " 7 ", "9 steps, 3 s"]
    for part in [*parts, "a card, some weights", "abc1234"]:
        assert part in line
    (line,) = [line for line in lines if "table1/vars-40-thinking" in line]
    assert "97.71 | not run |" in line
    assert sum("(`" in line for line in lines) == len(TABLE1)


def test_several_runs_of_a_cell_are_all_told():
    text = tables(Book([RECORD, RECORD | {"seed": 8}]))["runs"]
    assert text.count("table1/vars-20-thinking") == 2


@pytest.mark.parametrize("title", [{"title": "Chunks of 3"}, {}])  # `train` writes none
def test_a_run_of_a_preset_that_is_no_more_is_told_by_its_own_title(title):
    lines = tables(Book([RECORD | {"preset": "tiny/gone"} | title]))["runs"].splitlines()
    (line,) = [line for line in lines if "tiny/gone" in line]
    name = f"{title.get('title', '')} (`tiny/gone`)".strip()
    assert line.startswith(f"| {name} | – | 75.0 [71.0, 79.0] |")
    assert sum("(`" in line for line in lines) == len(TABLE1) + 1


PRESET_TABLES = "runs", "gsm", "two-hop", "layers", "chunks", "probes"


def test_every_recorded_run_of_a_preset_stands_in_the_tables():
    records = [record for record in read_book().runs if "preset" in record]
    found = tables(Book(records))
    # The default of the ablations stands in several tables.
    lines = {line for name in PRESET_TABLES for line in found[name].splitlines()}
    told = [line for line in lines if "(`" in line and "| not run |" not in line]
    assert len(told) == len(records) > 0
    for record in records:
        name, revision = f"(`{record['preset']}`)", f"| {record['revision']} |"
        assert any(name in line and line.endswith(revision) for line in told)


def test_the_overview_has_every_seed_beside_the_papers_figure_and_marks_what_was_not_learned():
    unlearned = RECORD | {
        "id": EVALUATION | {"accuracy": 0.989},
        "ood": EVALUATION | {"accuracy": 0.995},
    }
    lines = tables(Book([RECORD, unlearned]))["summary"].splitlines()
    figures = "not run (33.76) | 75.0, 99.5† (87.23) | not run (97.71)"
    assert f"| Vars: Thinking States | {figures} |" in lines
    assert "| Vars: Thinking States + long-rows | not run | not run | not run |" in lines
    assert sum(line.startswith(("| Parity: ", "| Vars: ")) for line in lines) == 3 + 3 + 2


def test_every_record_names_its_weights_and_no_place_where_they_lay():
    named = {run["settings"]["model"] for run in read_book().runs}
    assert not [name for name in named if name != "tiny" and "Qwen2.5-Coder-" not in name]
    assert ", some weights |" in tables(Book([RECORD]))["summary"].splitlines()[0]


def test_no_two_presets_share_a_place_in_the_overview():
    places = [
        (preset.settings["task"], preset.title)
        for name, preset in PRESETS.items()
        if name in TABLE1 and not name.startswith("tiny/")
    ]
    assert len(set(places)) == len(places)
    assert all(title.count(", N = ") == 1 for _, title in places)


def test_the_tables_of_both_pages_are_those_of_the_records(tmp_path):
    found, told = tables(read_book()), []
    for page in PAGES:
        copy = tmp_path / page.name
        copy.write_text(page.read_text(encoding="utf-8"), encoding="utf-8")
        told += put_into(copy, found)
        assert copy.read_text(encoding="utf-8") == page.read_text(encoding="utf-8"), page
    assert told == list(found)


def test_writing_a_table_changes_nothing_else(tmp_path):
    file, (begin, end) = tmp_path / "page.md", (MARK.format("runs", w) for w in ("begin", "end"))
    file.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    assert put_into(file, {"summary": "other", "runs": "new"}) == ["runs"]
    assert file.read_text() == f"before\n{begin}\nnew\n{end}\nafter\n"
    file.write_text(f"{end}{begin}")
    with pytest.raises(ValueError, match="in this order"):
        put_into(file, {"runs": "new"})
    file.write_text("nothing")
    with pytest.raises(ValueError, match="no place for a table"):
        put_into(file, {"runs": "new"})


def test_a_line_that_is_no_json_is_named(tmp_path):
    file = tmp_path / "records.jsonl"
    for bad in ("{", "", "no"):
        file.write_text(f"{{}}\n{bad}\n")
        with pytest.raises(ValueError, match="line 2: not a record"):
            read_records(file)


LACKING = object()


@pytest.mark.parametrize(
    "kind, change",
    [
        ("runs", None),
        ("runs", {"settings": LACKING}),
        ("runs", {"machine": LACKING}),
        ("probes", None),
        ("probes", {"run": LACKING}),
        ("runs", {"ood": EVALUATION | {"accuracy": "most"}}),
        ("runs", {"ood": EVALUATION | {"interval": [0.5]}}),
        ("runs", {"id": None}),
        ("runs", {"settings": [1]}),
        ("runs", {"revision": 5}),
        ("runs", {"train_seconds": "long"}),
        ("benches", {"lines": 5}),
        ("benches", {"lines": [{"both": 1}]}),
        ("probes", {"question_first": [3]}),
    ],
)
def test_a_value_that_no_table_can_show_is_told_with_its_line(kind, change, monkeypatch, capsys):
    probe = RECORD | EVALUATION | {"run": "a run", "right": "1"}
    good = {"runs": RECORD, "benches": RECORD, "probes": probe}
    book = Book(**{name: [record] for name, record in good.items()})
    bad = 5  # no object at all
    if change:
        changed = good[kind] | change
        bad = {key: value for key, value in changed.items() if value is not LACKING}
    book = book._replace(**{kind: [good[kind], bad]})
    monkeypatch.setattr(report, "read_book", lambda: book)
    assert run.main(["report"]) == 2
    out, err = capsys.readouterr()
    file = dict(zip(good, ("train", "bench", "eval")))[kind]
    assert out == "" and f"{file}.jsonl, line 2: a value cannot be shown" in err


def test_a_record_has_no_path_of_this_machine_but_the_folder_of_its_run(tmp_path, monkeypatch):
    file = tmp_path / "rows.jsonl"
    file.write_text("")
    words = ["run.py", "train", f"--out={tmp_path}", "--train", f"{file},{file}"]
    monkeypatch.setattr("sys.argv", [*words, "--suffix", "/think, then answer"])
    figures = {"settings": {"train": str(file)}, "data_files": {"train": {"file": str(file)}}}
    line = provenance.record(figures | {"run": str(tmp_path), "n": 3}, device="cpu")
    assert line["run"] == str(tmp_path) and line["n"] == 3
    assert line["settings"]["train"] == line["data_files"]["train"]["file"] == "rows.jsonl"
    told = f"--out={tmp_path.name} --train rows.jsonl,rows.jsonl"
    assert line["command"] == f"python run.py train {told} --suffix '/think, then answer'"


def test_the_command_prints_tables_and_json(capsys):
    assert run.main(["report", "--json"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert any(line.startswith("| run | paper |") for line in out)
    assert json.loads(out[-1])["records"]


def test_write_writes_our_pages(tmp_path, monkeypatch, capsys):
    begin, end = (MARK.format("runs", word) for word in ("begin", "end"))
    pages = [tmp_path / "one.md", tmp_path / "other.md"]
    for page in pages:
        page.write_text(f"{begin}\n{end}\n")
    monkeypatch.setattr(report, "PAGES", pages)
    assert run.main(["report", "--write"]) == 0
    assert all("| run | paper |" in page.read_text() for page in pages)
    assert capsys.readouterr().out == ""


# -- training by a preset --------------------------------------------------------------------------


def test_a_training_run_records_its_preset(tmp_path, monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny/quick", Preset("quick", QUICK))
    out = ["--out", str(tmp_path / "run"), "--device", "cpu"]
    assert run.main(["train", "--preset", "tiny/quick", *out]) == 0
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert record["preset"] == "tiny/quick" and record["settings"]["steps"] == 2


@pytest.mark.parametrize(
    "flags",
    [
        ["--window", "0"],
        ["--thought-weight", "0"],
        ["--eval-samples", "5"],
        ["--steps", "3"],
        ["--min-ops", "2"],
    ],
)
def test_a_preset_takes_no_other_flag_that_makes_another_run_of_it(flags, tmp_path, capsys):
    out = ["--out", str(tmp_path / "run")]
    assert run.main(["train", "--preset", "tiny/parity-thinking", *out, *flags]) == 2
    assert flags[0] in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_run_that_is_resumed_keeps_its_preset_and_takes_no_other(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(PRESETS, "tiny/quick", Preset("quick", QUICK))
    out = ["--out", str(tmp_path / "run")]
    assert run.main(["train", "--preset", "tiny/quick", "--device", "cpu", *out]) == 0
    (tmp_path / "run" / "record.json").unlink()
    assert run.main(["train", "--resume", "--preset", "tiny/parity-dense", *out]) == 2
    assert "tiny/parity-dense (run: tiny/quick)" in capsys.readouterr().err
    assert run.main(["train", "parity", "--resume", *out]) == 0
    assert json.loads((tmp_path / "run" / "record.json").read_text())["preset"] == "tiny/quick"


def test_a_run_of_an_older_version_is_not_continued(tmp_path, capsys):
    flags = ["train", "parity", "--out", str(tmp_path / "run"), "--device", "cpu"]
    quick = "--steps 2 --batch-size 2 --eval-samples 2 --eval-max-ops 10 --max-thought-tokens 4"
    assert run.main([*flags, *quick.split()]) == 0
    file = tmp_path / "run" / "run.json"
    old = json.loads(file.read_text())
    del old["layout"], old["decay"]
    file.write_text(json.dumps(old))
    assert run.main([*flags, "--resume"]) == 2
    assert "older version" in capsys.readouterr().err


# -- the revision of the source --------------------------------------------------------------------


def git(folder, *arguments):
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run(["git", "-C", folder, *who, *arguments], check=True, capture_output=True)


@pytest.mark.parametrize(
    "place, tracked, wanted",
    [("", True, "commit"), ("", False, "env"), ("vendor", True, "env"), ("vendor", False, "env")],
)
def test_a_record_names_the_revision_of_our_own_repository_alone(
    place, tracked, wanted, tmp_path, monkeypatch
):
    monkeypatch.setenv("MINITS_REVISION", "env")
    git(tmp_path, "init")
    copy = tmp_path / place / "minits" / "lab" / "provenance.py"
    copy.parent.mkdir(parents=True)
    shutil.copy(provenance.__file__, copy)
    (tmp_path / "other").write_text("")
    git(tmp_path, "add", "." if tracked else "other")
    git(tmp_path, "commit", "-m", "first")
    head = subprocess.check_output(["git", "-C", tmp_path, "rev-parse", "--short", "HEAD"])
    monkeypatch.setattr(provenance, "__file__", str(copy))
    assert provenance.revision() == {"commit": head.decode().strip(), "env": "env"}[wanted]
