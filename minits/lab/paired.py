"""How far two methods lie apart on the same rows, and how sure that is."""
from collections.abc import Sequence
from functools import cache

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
    if groups is None:
        # Rows of one value are drawn alike: how often each value comes is multinomial, and few
        # values are drawn much faster than many rows.
        values, alike = np.unique(rows, return_counts=True)
        draws = np.random.default_rng(0).multinomial(len(rows), alike / len(rows), size=DRAWS)
        found = draws @ values / len(rows)
    else:
        # Groups go in the order of their first rows: records may number the same ones differently.
        places = {group: place for place, group in enumerate(dict.fromkeys(groups))}
        group = [places[each] for each in groups]
        both = np.array([np.bincount(group, rows), np.bincount(group)], dtype=np.float32)
        # Not by @, whose threads wait for one another where other processes keep cores busy.
        sums, counts = np.einsum("kg,dg->kd", both, drawn(len(places)))
        found = sums / counts
    low, high = np.quantile(found, [0.025, 0.975])
    return float(rows.mean()), float(low), float(high)


@cache
def drawn(groups: int) -> np.ndarray:  # [DRAWS, groups]
    """How often each of so many groups comes in each draw, which all comparisons share."""
    found = np.random.default_rng(0).integers(groups, size=(DRAWS, groups))
    found += groups * np.arange(DRAWS)[:, None]  # numbers of its own for each draw: one count does
    counts = np.bincount(found.ravel(), minlength=found.size)
    return counts.reshape(found.shape).astype(np.float32)  # half the memory to read
