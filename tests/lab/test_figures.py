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


def test_a_file_is_no_folder_for_figures(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (tmp_path / "file").write_text("")
    assert run.main(["report", "--figures", str(tmp_path / "file")]) == 2
    assert "is a file; name a folder" in capsys.readouterr().err


def test_without_matplotlib_the_install_command_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run.main(["report", "--figures", str(tmp_path / "new")]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
