"""Presets are runs that can be made, and the tables are those of the records."""
import json
from pathlib import Path

import pytest

import run
from minits.training.recipe import TrainConfig, resolve_train
from minits.lab.presets import PAPER, PRESETS
from minits.lab.tables import BEGIN, END, put_into, read_records, report
from minits.training.loop import make_task, task_options

README = Path(__file__).parent.parent / "README.md"
EVALUATION = {"n": 500, "accuracy": 0.75, "interval": [0.71, 0.79], "thought_accuracy": 0.5}
RECORD = {"preset": "table1/vars-20-thinking", "seed": 7, "steps": 9, "train_seconds": 3.4, "machine": "a card",
          "revision": "abc1234", "settings": {"model": "some weights"},
          "id": EVALUATION | {"accuracy": 1.0}, "ood": EVALUATION}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_run_that_can_be_made(name):
    model = "tiny" if name.startswith("tiny/") else "folder"
    config = resolve_train(TrainConfig(model=model, device="cpu", **PRESETS[name].settings))
    make_task(config.task, **task_options(config))
    title = PRESETS[name].title
    assert f"N = {config.max_ops}" in title or name.startswith("tiny/")
    assert ("two variables" in title) == (config.variables == 2)
    assert ("long-rows" in title) == (config.layout == "long_rows")
    if name.startswith("tiny/") and config.method == "thinking":
        assert f"window {config.window}" in title or ("dense" in title and config.window == 0)


def test_every_cell_of_the_papers_table_has_its_preset():
    for (task, method), cells in PAPER.items():
        for N, paper in cells.items():
            preset = PRESETS[f"table1/{task}-{N}-{method}"]
            settings = preset.settings
            assert (settings["task"], settings["method"], settings["max_ops"], preset.paper) == (task, method, N, paper)


def test_a_run_is_told_with_all_that_it_takes_to_trust_it_and_what_was_not_run_says_so():
    lines = report([RECORD]).splitlines()
    (line,) = [line for line in lines if "table1/vars-20-thinking" in line]
    for part in ("87.23", "75.0 [71.0, 79.0]", "100.0", "50.0", "500", " 7 ", "9 steps, 3 s", "a card, some weights",
                 "abc1234"):
        assert part in line
    (line,) = [line for line in lines if "table1/vars-40-thinking" in line]
    assert "97.71 | not run |" in line
    assert sum("(`" in line for line in lines) == len(PRESETS)


def test_several_runs_of_a_cell_are_all_told():
    text = report([RECORD, RECORD | {"seed": 8}])
    assert text.count("table1/vars-20-thinking") == 2


def test_the_overview_has_every_seed_beside_the_papers_figure_and_marks_what_was_not_learned():
    unlearned = RECORD | {"id": EVALUATION | {"accuracy": 0.989}, "ood": EVALUATION | {"accuracy": 0.995}}
    lines = report([RECORD, unlearned]).splitlines()
    assert "| Vars: Thinking States | not run (33.76) | 75.0, 99.5† (87.23) | not run (97.71) |" in lines
    assert "| Vars: Thinking States + long-rows | not run | not run | not run |" in lines
    assert sum(line.startswith(("| Parity: ", "| Vars: ")) for line in lines) == 3 + 3 + 2


def test_no_two_presets_share_a_place_in_the_overview():
    places = [(preset.settings["task"], preset.title) for name, preset in PRESETS.items() if not name.startswith("tiny/")]
    assert len(set(places)) == len(places) and all(title.count(", N = ") == 1 for _, title in places)


def test_the_tables_of_the_readme_are_those_of_the_records():
    text = README.read_text(encoding="utf-8")
    assert text.split(BEGIN)[1].split(END)[0].strip() == report(read_records()).strip()


def test_writing_the_tables_changes_nothing_else(tmp_path):
    file = tmp_path / "page.md"
    file.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    put_into(file, "new\n")
    assert file.read_text() == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    file.write_text(f"{END}{BEGIN}")
    with pytest.raises(ValueError, match="in this order"):
        put_into(file, "new\n")


def test_a_line_that_is_no_record_is_named(tmp_path):
    file = tmp_path / "records.jsonl"
    file.write_text("{}\n{\n")
    with pytest.raises(ValueError, match="line 2"):
        read_records(file)


def test_the_command_prints_tables_and_json(capsys):
    assert run.main(["report", "--json"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert any(line.startswith("| run | paper |") for line in out) and json.loads(out[-1])["records"]


def test_a_training_run_records_its_preset(tmp_path, monkeypatch, capsys):
    from minits.lab import presets
    quick = presets.Preset("quick", {"task": "parity", "steps": 2, "batch_size": 2, "eval_samples": 2, "eval_max_ops": 10})
    monkeypatch.setitem(PRESETS, "tiny/quick", quick)
    assert run.main(["train", "--preset", "tiny/quick", "--out", str(tmp_path / "run"), "--device", "cpu"]) == 0
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert record["preset"] == "tiny/quick" and record["settings"]["steps"] == 2


def test_a_preset_takes_no_other_flag_that_makes_another_run_of_it(tmp_path, capsys):
    for flags in (["--window", "0"], ["--thought-weight", "0"], ["--eval-samples", "5"], ["--steps", "3"]):
        assert run.main(["train", "--preset", "tiny/parity-thinking", "--out", str(tmp_path / "run"), *flags]) == 2
        assert flags[0] in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_run_that_is_resumed_keeps_its_preset_and_takes_no_other(tmp_path, monkeypatch, capsys):
    from minits.lab import presets
    settings = {"task": "parity", "steps": 2, "batch_size": 2, "eval_samples": 2, "eval_max_ops": 10}
    monkeypatch.setitem(PRESETS, "tiny/quick", presets.Preset("quick", settings))
    out = ["--out", str(tmp_path / "run")]
    assert run.main(["train", "--preset", "tiny/quick", "--device", "cpu", *out]) == 0
    (tmp_path / "run" / "record.json").unlink()
    assert run.main(["train", "--resume", "--preset", "tiny/parity-dense", *out]) == 2
    assert "tiny/parity-dense (run: tiny/quick)" in capsys.readouterr().err
    assert run.main(["train", "parity", "--resume", *out]) == 0
    assert json.loads((tmp_path / "run" / "record.json").read_text())["preset"] == "tiny/quick"


def test_a_run_of_an_older_version_is_not_continued(tmp_path, capsys):
    flags = ["train", "parity", "--out", str(tmp_path / "run"), "--device", "cpu"]
    assert run.main([*flags, "--steps", "2", "--batch-size", "2", "--eval-samples", "2", "--eval-max-ops", "10"]) == 0
    file = tmp_path / "run" / "run.json"
    old = json.loads(file.read_text())
    del old["layout"], old["decay"]
    file.write_text(json.dumps(old))
    assert run.main([*flags, "--resume"]) == 2
    assert "older version" in capsys.readouterr().err
