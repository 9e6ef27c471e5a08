"""The key/value cache: a plain object that a caller makes, passes in and keeps. No module ever holds one."""
from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """Keys and values of every layer, preallocated: `k` and `v` are [layers, B, G, S + 1, D].

    Token t of a row lives in slot t, so a slot number *is* a position and "who may see whom" needs no bookkeeping: a
    query at position p sees the slots <= p, all of which were written by the time p is computed. Three things follow.
    Rolling back is just going on from an earlier position: stale slots lie ahead of every query until they are written
    again. Rows of a batch may stand at different positions. And padding has one place to go: slot S, one past the
    last, is written but never read (`waste`).

    Memory: 2 * layers * B * G * (S + 1) * D elements.
    """

    def __init__(self, layers: int, rows: int, kv_heads: int, slots: int, head_dim: int, *,
                 dtype: torch.dtype, device: torch.device | str) -> None:
        """`slots` (S) is the longest row the cache can hold, in tokens."""
        self.slots = slots
        self.k = torch.zeros(layers, rows, kv_heads, slots + 1, head_dim, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)

    @classmethod
    def over(cls, k: Tensor, v: Tensor) -> KVCache:
        """A cache that uses the tensors k, v [layers, B, G, S + 1, D] themselves."""
        cache = cls.__new__(cls)
        cache.slots, cache.k, cache.v = k.shape[3] - 1, k, v
        return cache

    @property
    def waste(self) -> int:
        """The slot (and position) for padding: no query ever reads it."""
        return self.slots

    def write(self, layer: int, k: Tensor, v: Tensor, positions: Tensor) -> None:
        """Puts the new k, v [B, G, T, D] of one layer into slots `positions` [B, T], replacing what was there."""
        rows = torch.arange(len(positions), device=positions.device)[:, None]  # [B, 1]
        self.k[layer][rows, :, positions] = k.transpose(1, 2)  # indexing by (rows, positions) gives [B, T, G, D]
        self.v[layer][rows, :, positions] = v.transpose(1, 2)

    def read(self, layer: int, span: int) -> tuple[Tensor, Tensor]:
        """Views [B, G, span, D] of a layer's first `span` slots; `span` <= S leaves the waste slot out."""
        return self.k[layer, :, :, :span], self.v[layer, :, :, :span]
