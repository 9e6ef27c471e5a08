"""`--window`: sliding attention of the tiny model, for every method, and of no other model."""

from __future__ import annotations

import pytest
from training_helpers import begin

from minits.tasks import make_task
from minits.training.recipe import TrainSettings, resolve


def test_every_method_takes_the_window_that_was_asked_for(tmp_path):
    given = [("thinking", None), ("no-cot", None), ("thinking", 0), ("no-cot", 8), ("cot", 8)]
    found = [
        begin(tmp_path / str(number), method=method, window=window).model.backbone.config
        for number, (method, window) in enumerate(given)
    ]
    assert [config.sliding_window for config in found] == [16, None, None, 8, 8]


@pytest.mark.parametrize("window", [0, 16])
def test_a_window_beside_a_checkpoint_which_has_its_own_is_refused(window, tmp_path):
    settings = TrainSettings(task="parity", model=str(tmp_path), window=window, device="cpu")
    with pytest.raises(ValueError, match=f"--window {window}: only the tiny model"):
        resolve(settings, make_task("parity"))
