"""Ablations at test (lab/interventions.py): states as they are, zero, and of another row."""

from __future__ import annotations

import json

import torch
from strategies import Shape, build, steer

from minits.checkpoint.tiny import ASSETS
from minits.cli import main
from minits.generation import generate_ids
from minits.lab.interventions import STATES, Shuffled
from minits.prefill import Intervention

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


def read(name: str, prompts: list[list[int]], told: Told | None = None) -> Told:
    model = build(Shape(chunk_size=2))
    told = told or Told(STATES[name]())
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
    # Another batch knows nothing of this one; a row alone has none to take from.
    again = read("shuffled", [[5, 6, 7, 8]], Told(told.inner))
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


def test_drafts_cannot_be_shuffled(capsys):
    flags = ["eval", SHIPPED, "--states=shuffled", "--prefill=speculative"]
    assert main.main(flags) == 2
    assert "needs --prefill sequential" in capsys.readouterr().err


def test_a_method_without_states_is_refused(tmp_path, capsys):
    out = tmp_path / "run"
    quick = "--steps 2 --batch-size 2 --max-ops 3 --eval-max-ops 4 --eval-samples 2 --device cpu"
    train = f"train parity --method no-cot --out {out} {quick}"
    assert main.main(train.split()) == 0
    assert main.main(["eval", f"--run={out}", "--states=zero"]) == 2
    assert "no-cot has no states" in capsys.readouterr().err
