"""Interventions at test (lab/interventions.py): states as they are, zero, of another row; gold thoughts."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest
import torch
from strategies import Shape, build, steer

from minits.checkpoint.tiny import ASSETS
from minits.cli import eval as evaluation
from minits.cli import main
from minits.generation import generate_ids
from minits.lab.interventions import STATES, Shuffled
from minits.prefill import Intervention
from minits.supervision import Row

SHIPPED = f"--run={ASSETS / 'parity'}"


class Told(Intervention):
    """What each row was given, by place."""

    def __init__(self, inner: Intervention) -> None:
        self.inner, self.own, self.given = inner, {}, {}

    def states(self, places, states):
        given = self.inner.states(places, states)
        self.own |= zip(places, states)
        self.given |= zip(places, given)
        return given


def read(name: str, prompts: list[list[int]]) -> Told:
    model = build(Shape(chunk_size=2))
    told = Told(STATES[name]([]))
    with steer(model, -1e4):  # every thought says something
        how = {"max_new_tokens": 1, "prefill": "sequential", "hook": told}
        generate_ids(model, prompts, **how)
    return told


def test_zero_gives_nothing_and_normal_all():
    prompts = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14]]
    zero, normal = read("zero", prompts), read("normal", prompts)
    assert len(zero.given) == 5 and all(not state.any() for state in zero.given.values())
    assert all(torch.equal(state, normal.own[at]) for at, state in normal.given.items())
    assert all(state.any() for state in normal.own.values())


def test_shuffled_gives_the_newest_state_of_the_next_row_counted_round():
    # Rows of 3, 1 and 2 chunks; the fourth completes none.
    prompts = [[5, 6, 7, 8, 9, 10], [11, 12], [13, 14, 15, 16], [17]]
    told = read("shuffled", prompts)
    source = {(0, 0): (1, 0), (1, 0): (2, 0), (2, 0): (0, 0), (0, 1): (1, 0), (2, 1): (0, 1)}
    source[0, 2] = (1, 0)
    assert told.given.keys() == source.keys()
    for at, other in source.items():
        assert torch.equal(told.given[at], told.own[other])
    # A row alone has none to take from.
    again = read("shuffled", [[5, 6, 7, 8]])
    assert len(again.given) == 2 and not any(state.any() for state in again.given.values())


def test_the_hook_of_one_latent_a_row_is_the_same():
    latents = torch.randn(3, 1, 4)
    found = Shuffled().states([(0, 0), (1, 0), (2, 0)], latents)
    assert torch.equal(found, latents.roll(-1, 0))


def accuracy(capsys, *flags: str) -> dict:
    assert main.main(["eval", SHIPPED, "--samples=30", "--json", *flags]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_without_its_states_the_shipped_model_is_no_better_than_a_coin(capsys):
    usual, zero, shuffled = (
        accuracy(capsys, *flags) for flags in ([], ["--states=zero"], ["--states=shuffled"])
    )
    assert "states" not in usual and usual["accuracy"] > 0.95
    for name, found in (("zero", zero), ("shuffled", shuffled)):
        assert found["states"] == name and found["accuracy"] < 0.75


def test_no_batch_of_an_evaluation_knows_of_another(capsys, monkeypatch):
    # Rows alone have no other to take from, however many came before them. So it is refused.
    monkeypatch.setattr(evaluation, "check_states", lambda *asked: None)
    alone = accuracy(capsys, "--states=shuffled", "--batch-size=1")
    zero = accuracy(capsys, "--states=zero")
    assert alone["right"] == zero["right"] and alone["mean_nontrivial"] == zero["mean_nontrivial"]


def test_gold_thoughts_take_the_place_of_the_models_own_row_by_row():
    prompts, end = [[5, 6, 7, 8, 9, 10], [11, 12, 13, 14], [15, 16, 17]], 0
    model = build(Shape(chunk_size=2))
    end = model.config.thought_end
    golds = [[[7, 8, end], [end], [9, end]], [[end], [3, 4, 5, end]], []]
    rows = [Row(ids, len(ids), thoughts) for ids, thoughts in zip(prompts, golds)]
    for how in ({"prefill": "sequential"}, {"draft": "trivial"}, {"draft": "carry"}):
        hook = STATES["gold"](rows)
        found = generate_ids(model, prompts, max_new_tokens=4, hook=hook, **how)
        usual = generate_ids(model, prompts, max_new_tokens=4, **how)
        for one, own, gold in zip(found, usual, golds):
            assert one.thought_ids[: len(gold)] == gold and len(one.thought_ids) >= len(gold)
        assert found[0].thought_ids[:3] != usual[0].thought_ids[:3]
        assert found[2] == usual[2]  # nothing is known of that row: its own thoughts
        assert found[0].nontrivial == 1  # of those that enter a chunk of the prompt


def untrained(folder) -> str:
    """A run whose T says nothing right yet."""
    quick = "--steps 2 --batch-size 2 --max-ops 3 --eval-max-ops 4 --eval-samples 2 --device cpu"
    assert main.main(f"train parity --out {folder} {quick}".split()) == 0
    return f"--run={folder}"


def test_an_evaluation_under_gold_thoughts_has_them_all_right(tmp_path, capsys):
    run = untrained(tmp_path / "run")
    found = {}
    for name in ("normal", "gold"):
        flags = ["eval", run, "--samples=12", "--batch-size=5", "--json", f"--states={name}"]
        assert main.main([*flags, f"--out={tmp_path / name}"]) == 0
        found[name] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["gold"]["states"] == "gold" and "states" not in found["normal"]
    assert found["normal"]["nontrivial_right"] == 0.0
    lines = list(map(json.loads, (tmp_path / "gold").read_text().splitlines()))
    for line in lines:
        said, gold = line["thoughts"], line["gold_thoughts"]
        assert said[: len(gold)] == gold[: len(said)]


REFUSED = {
    "a method without thoughts": (
        "coconut --first-stage 0 --stage-samples 2 --steps 6",
        "--states=gold",
        "coconut has no thoughts",
    ),
    "states of a method without any": ("no-cot --steps 2", "--states=zero", "no-cot has no states"),
    "gold of a method without any": ("no-cot --steps 2", "--states=gold", "no-cot has no thoughts"),
}


def test_drafts_cannot_be_shuffled(capsys):
    flags = ["eval", SHIPPED, "--states=shuffled", "--prefill=speculative"]
    assert main.main(flags) == 2
    assert "needs --prefill sequential" in capsys.readouterr().err


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_method_does_not_have_cannot_be_replaced(name, tmp_path, capsys):
    method, flag, words = REFUSED[name]
    out = tmp_path / "run"
    quick = "--batch-size 2 --max-ops 3 --eval-max-ops 4 --eval-samples 2 --device cpu"
    assert main.main(f"train parity --method {method} --out {out} {quick}".split()) == 0
    assert main.main(["eval", f"--run={out}", flag]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("samples, batch, alone", [(5, 4, True), (3, 1, True), (6, 4, False)])
def test_shuffled_wants_another_row_for_every_one(samples, batch, alone):
    flags = evaluation.EvalFlags(states="shuffled", batch_size=batch)
    rows = [(None, Row([3, 4, 0], 2, []))] * samples
    with pytest.raises(ValueError, match="a row is alone") if alone else nullcontext():
        evaluation.check_states(flags, rows, 64)
