"""Training with teacher-forced reasoning (paper, section 3.2): every chunk at once, each under its gold state.

    Row (supervision.py) -> collate -> Batch -> teacher_forced -> H, out -> losses -> L_LM + w L_T

This is the definition: dense tensors, one sample a row, all logits. What trains at full speed gives the same losses and gradients.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minits.cache import KVCache
from minits.fast.cross_entropy import IGNORED
from minits.supervision import Row
from minits.thinking import Losses, ThinkingStates, on_device, pad


@dataclass(frozen=True)
class DenseBatch:
    """Rows padded on the right to K whole chunks, T = K * c."""

    ids: Tensor  # [B, T] what the backbone reads: each row without its last token, which is only predicted
    labels: Tensor  # [B, T] the next token where it is supervised (answer and closing EOS), else IGNORED
    thoughts: Tensor  # [B, K, n] Z*: the gold thought after each chunk, EOS included, then padding
    lengths: Tensor  # [B, K] tokens of each thought, EOS included; 0 after a chunk that never completes


def collate_dense(rows: Sequence[Row], model: ThinkingStates) -> DenseBatch:
    """The batch of `rows` on the model's device."""
    config, device = model.config, model.device
    c = config.chunk_size
    K = max(-(-(len(row.ids) - 1) // c) for row in rows)
    n = max(c, *(len(z) for row in rows for z in row.thoughts), 1)
    labels = [[IGNORED] * (row.prompt_length - 1) + row.ids[row.prompt_length:] for row in rows]
    thoughts = [[*row.thoughts, *[[]] * (K - len(row.thoughts))] for row in rows]
    return DenseBatch(
        ids=pad([row.ids[:-1] for row in rows], config.pad_id, K * c, device),
        labels=pad(labels, IGNORED, K * c, device),
        thoughts=torch.stack([pad(row, config.pad_id, n, device) for row in thoughts]),
        lengths=on_device([[len(z) for z in row] for row in thoughts], device))


def gold_states(model: ThinkingStates, batch: DenseBatch) -> Tensor:
    """S* [B, T, E]: 0 for the first chunk, then C of the gold thought before; exactly 0 after a trivial one."""
    B, K, _ = batch.thoughts.shape
    states = model.compress(batch.thoughts.flatten(0, 1), batch.lengths.flatten())  # [B * K, c, E]
    states = states.where((batch.lengths.flatten() > 1)[:, None, None], 0.0).view(B, K, *states.shape[1:])
    return torch.cat([torch.zeros_like(states[:, :1]), states[:, :-1]], dim=1).flatten(1, 2)


def teacher_forced(model: ThinkingStates, batch: DenseBatch, cache: KVCache | None = None) -> tuple[Tensor, Tensor]:
    """(H, final normed vectors), both [B, T, E], under the gold thoughts; fills `cache` if one is given."""
    B, T = batch.ids.shape
    positions = torch.arange(T, device=batch.ids.device).clamp(max=model.backbone.config.max_position_embeddings - 1)
    frame = model.backbone.frame(positions[None].expand(B, T), cache, span=T)
    X = model.lower(batch.ids, frame)
    H = model.middle(X + gold_states(model, batch), frame) if model.thinks else model.middle(X, frame)
    return H, model.upper(H, frame)


def thought_logits(model: ThinkingStates, H: Tensor, batch: DenseBatch) -> Tensor:
    """T's logits [B, K, n, V] for every token of the gold thoughts: it reads the chunk's H, then the tokens before."""
    (B, K, n), c = batch.thoughts.shape, model.config.chunk_size
    given = model.backbone.model.embed_tokens(batch.thoughts[..., :-1])  # [B, K, n - 1, E]
    x = torch.cat([H.unflatten(1, (K, c)), given], dim=2).flatten(0, 1)  # [B * K, c + n - 1, E]
    frame = model.backbone.frame(torch.arange(c + n - 1, device=H.device)[None])
    return model.thinking_block.lm_head(model.thinking_block(x, frame, last=n)).unflatten(0, (B, K))


def losses(model: ThinkingStates, batch: DenseBatch) -> tuple[Losses, Tensor]:
    """The summed cross-entropies, and the numbers of supervised tokens [2] that L_LM and L_T are means over."""
    H, out = teacher_forced(model, batch)
    lm = cross_entropy(model.backbone.lm_head(out), batch.labels)
    if not model.thinks:
        return Losses(lm, torch.zeros_like(lm)), torch.stack([(batch.labels != IGNORED).sum(), torch.tensor(0)])
    n = batch.thoughts.shape[-1]
    real = torch.arange(n, device=H.device) < batch.lengths[..., None]  # [B, K, n]
    thought = cross_entropy(thought_logits(model, H, batch), batch.thoughts.where(real, IGNORED))
    return Losses(lm, thought), torch.stack([(batch.labels != IGNORED).sum(), real.sum()])


def loss(model: ThinkingStates, batch: DenseBatch, w: float = 1.0) -> Tensor:
    """L = L_LM + w L_T, each a mean over its supervised tokens (the paper: a sum over chunks; README)."""
    sums, counts = losses(model, batch)
    L_LM, L_T = torch.stack([sums.lm, sums.thought]) / counts.clamp(min=1)
    return L_LM + w * L_T


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Summed cross-entropy (nats) of logits [..., V] against labels [...]; `IGNORED` ones count nothing."""
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum")
