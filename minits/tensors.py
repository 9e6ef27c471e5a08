"""The few helpers over tensors that every file shares."""
from collections.abc import Sequence

import torch
from torch import Tensor

IGNORED = -100  # a label that counts nothing in a cross-entropy
PASS = 2048  # tokens that go through a layer at once: bounds the memory of attention and MLP


def on_device(values: Sequence, device: torch.device | str) -> Tensor:
    """Whole numbers (or nested lists of them) as an int64 tensor, without waiting for the device.

    A plain `torch.tensor(values, device="cuda")` waits until the card has done all it was given
    before (measured: a third of a speculative prefill). From pinned memory the copy takes its
    place in the queue.
    """
    tensor = torch.tensor(values, dtype=torch.long)
    if torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor


def in_order(rows: int, width: int, device: torch.device) -> Tensor:
    """The positions 0 … width - 1 in every row: [rows, width]."""
    return torch.arange(width, device=device).expand(rows, width)


def in_pieces(x: Tensor, positions: Tensor, most: int = PASS) -> list[tuple[Tensor, Tensor]]:
    """x [B, L, E] and its positions [B, L] in pieces of at most `most` tokens in all."""
    width = max(most // len(x), 1)
    return list(zip(x.split(width, dim=1), positions.split(width, dim=1)))


def pad(
    rows: Sequence[Sequence[int]], value: int, width: int, device: torch.device | str = "cpu"
) -> Tensor:
    """`rows` filled up on the right with `value`: [len(rows), width], int64."""
    filled = [[*row, *[value] * (width - len(row))] for row in rows]
    return on_device(filled, device).view(len(rows), width)
