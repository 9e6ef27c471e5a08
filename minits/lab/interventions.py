"""Interventions at test: what an answer is worth with other states, or with other thoughts.

If it is worth as much without its states, the thoughts do nothing; if it is worth more with gold
thoughts, T is what errs.
"""
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from minits.prefill import NOTHING, Intervention
from minits.supervision import Row
from minits.training.scoring import HookMaker


class Zero(Intervention):
    """Every state is as after a trivial thought; every latent of Coconut is zero."""

    def states(self, places: Sequence[tuple[int, int]], states: Tensor) -> Tensor:
        return torch.zeros_like(states)


class Shuffled(Intervention):
    """Every row of one batch reads the newest state of the next one, counted round.

    Zero where there is none yet, or no other row. Prompts must be read sequentially: the drafts of
    speculation are not what a row thought.
    """

    def __init__(self) -> None:
        self.newest: dict[int, Tensor] = {}  # of each row, its own

    def states(self, places: Sequence[tuple[int, int]], states: Tensor) -> Tensor:
        self.newest |= {row: state for (row, _), state in zip(places, states)}
        found = []
        for row, _ in places:
            others = sorted(self.newest.keys() - {row}, key=lambda other: (other < row, other))
            found.append(self.newest[others[0]] if others else torch.zeros_like(states[0]))
        return torch.stack(found)


class Scripted(Intervention):
    """T is made to say what is given, by row and chunk (ids, EOS included); elsewhere its own."""

    def __init__(self, scripts: Sequence[Mapping[int, Sequence[int]]]) -> None:
        self.scripts = scripts

    def thought(self, row: int, chunk: int) -> Sequence[int] | None:
        return self.scripts[row].get(chunk)


def gold(rows: Sequence[Row]) -> Scripted:
    """The thoughts that training would teach, as far as they are known."""
    return Scripted([dict(enumerate(row.thoughts)) for row in rows])


# What `eval --states` names, made for the rows of each batch.
STATES: dict[str, HookMaker] = {
    "normal": lambda rows: NOTHING,
    "zero": lambda rows: Zero(),
    "shuffled": lambda rows: Shuffled(),
    "gold": gold,
}
