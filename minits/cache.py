"""The key/value cache: a plain object that a caller makes, passes in and keeps.

No module holds one.

A worked example, one layer, slots P = 6, two prompts of 5 and 2 tokens in chunks of 4:

    pass 1 reads positions  [0 1 2 3]      token t of a row lives in slot t, so a slot number *is*
                            [0 1 6 6]      a position; 6 = P is the trash slot, where padding goes

    slot                     0  1  2  3  4  5 | 6
    row 0                    a  b  c  d  .  . | .
    row 1                    f  g  .  .  .  . | x

    pass 2 reads positions  [4 6 6 6]      row 1 has ended: all of its places are padding
                            [6 6 6 6]
    row 0                    a  b  c  d  e  . | x

    A query at position p sees the slots 0 … p, all of which were written by the time p is
    computed. The trash slot is never read.

    Was the guess wrong under which c and d were read? Then pass 2 reads [2 3 4 6] instead, and
    slots 2 and 3 are replaced. Rolling back is just going on from an earlier position: what is
    stale lies ahead of every query until it is written again.
"""
import torch
from torch import Tensor


class KVCache:
    """Keys and values of every layer: `k` and `v` are [layers, B, G, P + 1, D], zeros at first.

    Rows may stand at different positions. Memory: 2 * layers * B * G * (P + 1) * D numbers.
    """

    def __init__(
        self,
        layers: int,
        rows: int,  # B
        kv_heads: int,  # G
        slots: int,  # P: the longest row that fits, in tokens
        head_dim: int,  # D
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        shape = (layers, rows, kv_heads, slots + 1, head_dim)
        self.slots = slots
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def trash(self) -> int:
        """The slot (and position) for padding: it is written and never read."""
        return self.slots

    def span(self, positions: Tensor) -> int:
        """How many slots a pass over `positions` [B, L] can see. Waits for the device."""
        real = positions.masked_fill(positions == self.trash, 0)
        return int(real.max()) + 1

    def write(self, layer: int, k: Tensor, v: Tensor, positions: Tensor) -> None:
        """Puts k, v [B, G, L, D] of one layer into slots `positions` [B, L]."""
        rows = torch.arange(len(positions), device=positions.device)[:, None]  # [B, 1]
        # Indexing by (rows, positions) gives [B, L, G, D].
        self.k[layer][rows, :, positions] = k.transpose(1, 2)
        self.v[layer][rows, :, positions] = v.transpose(1, 2)

    def read(self, layer: int, span: int) -> tuple[Tensor, Tensor]:
        """Views [B, G, span, D] of a layer's first `span` slots."""
        k, v = self.k[layer], self.v[layer]
        return k[:, :, :span], v[:, :, :span]


class DifferentiableKVCache(KVCache):
    """The same, for gradients through several passes: `k` and `v` are lists, a tensor a layer.

    Thinking States needs no such gradients; Coconut (methods/coconut.py) does.
    Writing in place would destroy what the backward pass of an earlier read needs, so each write
    makes a new tensor.
    """

    def __init__(self, *sizes: int, **kind) -> None:
        super().__init__(*sizes, **kind)
        self.k, self.v = list(self.k), list(self.v)

    def write(self, layer: int, k: Tensor, v: Tensor, positions: Tensor) -> None:
        """As `KVCache.write`; earlier reads keep what they saw."""
        rows = torch.arange(len(positions), device=positions.device)[:, None]
        for tensors, new in ((self.k, k), (self.v, v)):
            by_slot = tensors[layer].transpose(1, 2)  # [B, P + 1, G, D]
            written = by_slot.index_put((rows, positions), new.transpose(1, 2))
            tensors[layer] = written.transpose(1, 2)
