"""`bench cost` measures what it says: the passes of training, over as many tokens on every side."""

import json
import sys
from types import SimpleNamespace

import pytest
import run
import torch
from strategies import Shape, fresh, write_checkpoint

from minits import teacher_forcing
from minits.lab import bench_cost, figures
from minits.lab.bench_cost import (
    COCONUT,
    LENGTH,
    PLAIN,
    REFED,
    SIDES,
    STEPS,
    THINKING,
    findings,
    functions_of,
    passes,
    sides_of,
    table,
)
from minits.supervision import Row

SHAPE = Shape(vocab=1024, limit=512, chunk_size=4)


@pytest.fixture(scope="module")
def model():
    found = fresh(SHAPE).train()
    with torch.no_grad():  # fed back 32 times, such weights make much of a rounding
        for layer in found.backbone.model.layers:
            layer.self_attn.o_proj.weight *= 0.25
            layer.mlp.down_proj.weight *= 0.25
    return found


@pytest.fixture(scope="module")
def sides(model):
    return {(side.name, side.steps): side for side in sides_of(model, STEPS)}


def total(side):
    return teacher_forcing.loss(side.losses())


def test_every_side_reads_128_tokens_and_answers_with_the_same_8(sides):
    assert set(sides) == {(PLAIN, 0), *((name, n) for name in SIDES[1:] for n in STEPS)}
    answers = set()
    for (name, n), side in sides.items():
        _, batch = side.losses.args
        if name in (COCONUT, REFED):
            read = batch.ids.shape[1] + batch.latents.shape[1] + batch.rest.shape[1]
            assert read == LENGTH and batch.latents.shape[1] == n
            answers.add(tuple(batch.labels[0].tolist()))
        else:
            assert batch.lm_at.tolist() == list(range(LENGTH - 8, LENGTH))
            answers.add(tuple(batch.lm_labels.tolist()))
    assert len(answers) == 1


@pytest.mark.parametrize("n", STEPS)
def test_n_steps_are_n_thoughts_and_their_states(sides, n):
    model, batch = sides[THINKING, n].losses.args
    assert model.config.chunk_size == LENGTH // n
    assert batch.thought_at.tolist() == list(range(n))
    assert batch.lengths.tolist() == [9] * n
    even = LENGTH % model.config.chunk_size == 0  # no chunk follows the last one
    assert (batch.state_at >= 0).sum() == n - even


@pytest.mark.parametrize("n", [1, 10, 32])
def test_the_loss_is_that_of_the_definition(sides, n):
    for name, steps in ((THINKING, n), (PLAIN, 0)):
        model, batch = sides[name, steps].losses.args
        thought = [*batch.thoughts[0, :8].tolist(), model.config.thought_end] if steps else []
        ids = [*batch.ids[0, :LENGTH].tolist(), int(batch.lm_labels[-1])]
        row = Row(ids, LENGTH - 7, [thought] * steps)
        wanted = teacher_forcing.losses(model, teacher_forcing.collate([row], model))
        torch.testing.assert_close(total(sides[name, steps]), teacher_forcing.loss(wanted))


@pytest.mark.parametrize("n", STEPS)
def test_re_fed_and_cached_are_the_same_in_loss_and_gradient(model, sides, n):
    found = []
    for name in (COCONUT, REFED):
        figure = torch.zeros((), dtype=torch.float64)
        forward, both = functions_of(sides[name, n], figure, model, False)
        forward().backward()
        found.append([figure, *(p.grad.clone() for p in model.backbone.parameters())])
        both()
        assert all(p.grad is None for p in model.parameters())
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)


def test_graphs_give_a_line_for_each_side_and_the_same_losses(model, monkeypatch):
    """On a CPU, where a graph is the function itself."""
    captured = []

    def capture(function, pool):
        captured.append(pool)
        return SimpleNamespace(replay=function)

    monkeypatch.setattr(bench_cost, "capture", capture)
    few = sides_of(model, (1, 4))
    *eager, _ = passes(few, model, False, 1)
    *graphs, found = passes(few, model, False, 1, "pool")
    assert captured == ["pool"] * 2 * len(few)
    for one, other in zip(eager, graphs, strict=True):
        assert (one["path"], other["path"]) == ("eager", "graphs")
        assert one["loss"] == other["loss"] != 0
        for line in (one, other):  # of a single repeat
            parts = line["forward"]["ms"] + line["backward"]["ms"]
            assert line["both"]["ms"] == pytest.approx(parts)
    assert found["what"] == "findings" and found["path"] == "graphs"
    assert all(p.grad is None for p in model.parameters())


def made_up(path="eager"):
    """Coconut takes 5 + 2 n ms, re-fed 5 + 3 n, Thinking States 10 or 11."""
    times = [(PLAIN, 0, 2.5)]
    for n in (1, 4, 10):
        times += [(COCONUT, n, 5.0 + 2 * n), (REFED, n, 5.0 + 3 * n)]
        times.append((THINKING, n, 11.0 if n == 4 else 10.0))
    return [
        {"side": side, "steps": n, "path": path}
        | {part: {"ms": ms * share} for part, share in PARTS.items()}
        for side, n, ms in times
    ]


PARTS = {"forward": 0.4, "backward": 0.6, "both": 1.0}


def test_the_findings_are_those_of_the_figure():
    found = findings(made_up())
    line = {"ms_a_latent": 2.0, "intercept_ms": 5.0, "r_squared": 1.0}
    assert found[COCONUT] == pytest.approx(line)
    assert found[REFED] == pytest.approx(line | {"ms_a_latent": 3.0})
    assert found[THINKING] == {"slowest_over_fastest": 1.1}
    over = {THINKING: 2.5, REFED: 25 / 35, PLAIN: 10.0}
    assert found["Coconut at 10 steps over"] == pytest.approx(over)


def test_the_table_has_a_row_for_each_number_of_steps_and_a_part_for_each_path():
    one, other = table([*made_up(), {"what": "other"}, *made_up("graphs")]).split("\n\n")
    heads, _, *rows = [line.strip("| ").split(" | ") for line in one.splitlines()]
    assert heads == ["steps, eager", *SIDES] and other.startswith("| steps, graphs |")
    assert [row[0] for row in rows] == ["0", "1", "4", "10"]
    assert rows[3][3] == "25.0 (10.0 + 15.0)"
    assert table([]) == ""


def test_the_command_prints_lines_table_and_record_and_draws(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_cost, "STEPS", (1, 10))
    folder, figure = write_checkpoint(tmp_path / "model", SHAPE), tmp_path / "figure.png"
    flags = ["--model", str(folder), "--device", "cpu", "--repeats", "1", "--json"]
    try:
        figures.pyplot()
        flags += ["--figure", str(figure)]
    except ValueError:
        figure = None  # without matplotlib, which is no package of ours
    assert run.main(["bench", "cost", *flags]) == 0
    out, err = capsys.readouterr()
    assert f"{2 * (1 + 3 * len(STEPS)) * 3} calls before the first of their lines" in err
    *lines, last = out.splitlines()
    record = json.loads(last)
    told = [json.loads(line) for line in lines if line.startswith("{")]
    assert [line["what"] for line in told] == [line["what"] for line in record["lines"]]
    assert lines[len(told)].startswith("| steps, eager | no latents |")
    assert [line["side"] for line in told if "side" in line] == [PLAIN, *SIDES[1:] * 2]
    ratios = [(line["what"], line.get("layout")) for line in told if "ratio" in line]
    assert ratios == [
        ("answers, batch of 4 over batch of 1", None),
        ("optimizer step, coconut over cot", "rows"),
        ("optimizer step, coconut over cot", "pack"),
    ]
    rates = [line["rows_per_s"] * line["ms"] for line in told if "rows_per_s" in line]
    assert rates == pytest.approx([4e3, 4e3], rel=0.01)
    assert figure is None or figure.read_bytes().startswith(b"\x89PNG")


def test_steps_change_no_weights():
    model = fresh(SHAPE, torch.float32).train()
    before = [p.clone() for p in model.parameters()]
    how = bench_cost.TrainSettings(device="cpu", dtype="float32", lr=1e-5, layout="rows")
    lines = list(bench_cost.optimizer_steps(model, how, 3, 1, False))
    assert [line["path"] for line in lines[:3]] == ["eager"] * 3
    assert [line["tokens"] for line in lines[:2]] == [lines[0]["tokens"]] * 2
    for p, was in zip(model.parameters(), before):
        assert torch.equal(p, was) and p.grad is None


@pytest.mark.parametrize(
    "flags, words",
    [
        (["cost"], ["needs --model"]),
        (["cost", "--model", "x", "--chunk-size", "4"], ["--chunk-size does nothing"]),
        (["train", "--model", "x", "--figure", "a.png"], ["--figure does nothing in bench train"]),
        (["cost", "--model", "x", "--figure", "no/a.png"], ["--figure no/a.png", "folder"]),
        (["cost", "--model", "x", "--figure", "here.png"], ["--figure here.png exists"]),
    ],
)
def test_bad_input_is_one_line_and_status_2(flags, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.png").touch()
    assert run.main(["bench", *flags]) == 2
    error = capsys.readouterr().err
    assert [word for word in words if word not in error] == [] and error.count("\n") == 1


def test_a_figure_without_matplotlib_names_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    flags = ["--model", "x", "--figure", str(tmp_path / "a.png")]
    assert run.main(["bench", "cost", *flags]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
