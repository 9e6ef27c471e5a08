"""Differences on the same rows: the mean, its interval, seeds and groups."""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest

from minits.lab.paired import difference


def bits(values) -> str:
    return "".join(str(int(value)) for value in values)


def test_the_interval_is_that_of_the_central_limit():
    rng = np.random.default_rng(1)
    ours, theirs = rng.random(2000) < 0.3, rng.random(2000) < 0.2
    mean, low, high = difference([bits(ours)], [bits(theirs)])
    rows = ours.astype(float) - theirs
    assert mean == pytest.approx(rows.mean())
    half = 1.96 * rows.std() / sqrt(2000)
    assert (mean - low, high - mean) == (
        pytest.approx(half, rel=0.06),
        pytest.approx(half, rel=0.06),
    )


def test_rows_are_paired():
    rng = np.random.default_rng(2)
    hard = rng.random(500) < 0.5
    assert difference([bits(hard)], [bits(hard)]) == (0.0, 0.0, 0.0)


def test_a_row_counts_with_its_mean_over_seeds():
    assert difference(["10", "11"], ["00"])[0] == pytest.approx(0.75)


def test_rows_of_a_group_are_drawn_together():
    ours, theirs = "1" * 50 + "0" * 50, "0" * 100
    groups = ["a"] * 50 + ["b"] * 50
    _, low, high = difference([ours], [theirs], groups)
    assert (low, high) == (0.0, 1.0)
    _, low, high = difference([ours], [theirs])
    assert 0.35 < low < 0.45 < 0.55 < high < 0.65


def test_of_many_groups_the_interval_is_that_of_the_central_limit():
    rng = np.random.default_rng(3)
    groups = rng.integers(400, size=1000)  # of unequal sizes
    ours = rng.random(1000) < rng.random(400)[groups]
    mean, low, high = difference([bits(ours)], ["0" * 1000], list(groups))
    apart = np.bincount(groups, ours - mean)  # sums of groups, whose variances add up
    half = 1.96 * sqrt(apart @ apart) / 1000
    assert half > 1.1 * 1.96 * ours.std() / sqrt(1000)  # more than that of rows
    assert (mean - low, high - mean) == (
        pytest.approx(half, rel=0.06),
        pytest.approx(half, rel=0.06),
    )


def test_names_of_groups_do_not_matter():
    rng = np.random.default_rng(4)
    ours, groups = bits(rng.random(300) < 0.5), rng.integers(100, size=300)
    other = [f"group {name}" for name in rng.permutation(100)[groups]]
    assert difference([ours], ["0" * 300], list(groups)) == difference([ours], ["0" * 300], other)


def test_other_rows_cannot_be_compared():
    with pytest.raises(ValueError, match="different numbers of rows"):
        difference(["10"], ["101"])
