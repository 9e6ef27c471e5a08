"""How far two methods lie apart on the same rows, and how sure that is."""
from collections.abc import Sequence

import numpy as np

DRAWS = 10_000


def difference(
    ours: Sequence[str],  # of each seed, which rows were right, as in a `Report`
    theirs: Sequence[str],
    groups: Sequence[object] | None = None,  # the group of each row; its rows are drawn together
) -> tuple[float, float, float]:
    """(mean, low, high) of accuracy of `ours` less that of `theirs`.

    Each row counts with its mean over seeds; the 95 % interval is a paired bootstrap over rows, or
    over groups of them. Raises ValueError if the rows are not the same number.
    """
    if len({len(right) for right in (*ours, *theirs)}) != 1:
        raise ValueError("the evaluations have different numbers of rows; compare the same rows.")
    means = [np.mean([list(map(int, right)) for right in side], axis=0) for side in (ours, theirs)]
    rows = means[0] - means[1]
    _, group = np.unique(range(len(rows)) if groups is None else groups, return_inverse=True)
    sums, counts = np.bincount(group, rows), np.bincount(group)
    # Groups of one kind are drawn alike: how often each kind comes is multinomial, and few kinds
    # are drawn much faster than many groups.
    (sums, counts), alike = np.unique([sums, counts], axis=1, return_counts=True)
    draws = np.random.default_rng(0).multinomial(alike.sum(), alike / alike.sum(), size=DRAWS)
    found = (draws @ sums) / (draws @ counts)
    low, high = np.quantile(found, [0.025, 0.975])
    return float(rows.mean()), float(low), float(high)
