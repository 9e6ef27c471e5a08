"""Figures are drawn of what there is, and nothing is drawn of nothing."""

from __future__ import annotations

import sys

import pytest
import run
from made_up import answered, costs, trained

from minits.lab.figures import FIGURES, by_length, draw_all
from minits.lab.presets import CHUNKS, LAYERS
from minits.lab.records import Book, read_book


def png(path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


def test_every_figure_is_drawn_of_records(tmp_path):
    pytest.importorskip("matplotlib")
    runs = [trained(f"ablation/gsm-extract-{n}", 0.3, n) for n in LAYERS]
    runs += [
        trained(f"ablation/gsm-chunk-{c}{end}", 0.3, c) for c in CHUNKS for end in ("", "-one")
    ]
    runs += [trained("ablation/two-hop-chunk-4", 0.5), trained("gsm/0.5b-icot-steps", 0.5)]
    runs += [trained("gsm/0.5b-thinking", 0.5), *read_book().runs]
    names = ("gsm/0.5b-thinking", "ablation/gsm-chunk-8")
    benches = [answered(name, thinking=5.0, cot=9.0) for name in names]
    (tmp_path / "figures").mkdir()
    found = draw_all(Book(runs, [*benches, costs()]), tmp_path / "figures")
    assert found == dict.fromkeys(FIGURES, True)
    assert sorted(path.stem for path in (tmp_path / "figures").iterdir()) == sorted(FIGURES)
    assert all(png(path) for path in (tmp_path / "figures").iterdir())


def test_nothing_is_drawn_of_no_records(tmp_path):
    pytest.importorskip("matplotlib")
    assert draw_all(Book([]), tmp_path) == dict.fromkeys(FIGURES, False)
    assert list(tmp_path.iterdir()) == []


def test_buckets_of_several_runs_are_one_line():
    one = {"1-20": {"n": 30, "accuracy": 1.0}, "21-40": {"n": 10, "accuracy": 0.5}}
    other = {"21-40": {"n": 30, "accuracy": 0.1}, "41-60": {"n": 5, "accuracy": 0.1}}
    assert by_length([one, other], 10) == [(15.0, 100.0), (30.5, 20.0)]


def test_the_command_says_what_it_drew_and_what_not(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert run.main(["report", "--figures", str(tmp_path / "new")]) == 0
    out, told = capsys.readouterr()
    assert out == "" and png(tmp_path / "new" / "lengths.png")
    for name in FIGURES:
        drawn = (tmp_path / "new" / f"{name}.png").exists()
        assert (f"{name}: not drawn" in told) != drawn


@pytest.mark.parametrize(
    "name, words",
    [
        ("file", "takes no file (Not a directory)"),
        ("file/new", "takes no file (Not a directory)"),
        ("drawn", "cost.png exists. Nothing is overwritten"),
    ],
)
def test_a_figure_is_drawn_where_it_can_be_and_over_nothing(name, words, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (tmp_path / "drawn").mkdir()
    files = [tmp_path / "file", tmp_path / "drawn" / "cost.png"]
    for file in files:
        file.write_text("mine")
    assert run.main(["report", "--figures", str(tmp_path / name)]) == 2
    told = capsys.readouterr().err
    assert f"--figures {tmp_path / name}" in told and words in told
    assert told.endswith("name another folder.\n")
    assert [file.read_text() for file in files] == ["mine"] * 2
    assert list((tmp_path / "drawn").iterdir()) == files[1:]


def test_a_value_that_cannot_be_drawn_is_told(tmp_path):
    pytest.importorskip("matplotlib")
    found = {"buckets": {"1-20": {"n": "many", "accuracy": 1.0}}}
    record = {"preset": "table1/parity-10-thinking", "ood": found}
    with pytest.raises(ValueError, match="a value cannot be drawn"):
        draw_all(Book([record]), tmp_path)


def test_without_matplotlib_the_install_command_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run.main(["report", "--figures", str(tmp_path / "new")]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
