"""Training with teacher-forced reasoning (paper, section 3.2): all chunks at once, gold states.

    Row -> collate -> Batch -> teacher_forced -> H, out -> losses -> L_LM + w L_T

This is the definition: dense tensors, one sample a row, all logits. What trains at full speed
(fast/flat_batch.py) gives the same losses and gradients.
"""
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minits.cache import KVCache
from minits.supervision import Row
from minits.tensors import IGNORED, in_order, on_device, pad
from minits.thinking import ThinkingStates


@dataclass(frozen=True)
class Batch:
    """Rows padded on the right to K whole chunks, L = K * c tokens.

    The row of a prompt of 8 tokens (a … h) and an answer of 2 (i j) in chunks of 4, whose first
    chunk thinks two tokens (x y) and whose second one nothing:

        ids       a b c d | e f g h | i j . .        i and j are read, EOS is only predicted
        labels    . . . . | . . . i | j EOS . .      the next token, from the prompt's last one on
        thoughts  x y EOS | EOS     |                the third chunk never completes
        lengths   3       | 1       | 0
        states    0       | C(x y)  | 0              what each chunk reads: the thought before it
    """

    ids: Tensor  # [B, L] what the backbone reads
    labels: Tensor  # [B, L] the next token where it is supervised, else IGNORED
    thoughts: Tensor  # [B, K, n] Z*, the gold thought after each chunk, EOS included, padded
    lengths: Tensor  # [B, K] tokens of each thought; 0 after a chunk that never completes


@dataclass(frozen=True)
class Losses:
    """Summed cross-entropies (nats), and the numbers of tokens that they are over."""

    lm: Tensor  # of answer tokens, closing EOS included; the paper does not say of which tokens
    thought: Tensor  # of thought tokens, EOS of trivial ones included
    lm_tokens: Tensor
    thought_tokens: Tensor


def collate(rows: Sequence[Row], model: ThinkingStates) -> Batch:
    """The batch of `rows`, on the model's device."""
    c, pad_id, device = model.config.chunk_size, model.config.pad_id, model.device
    K = max(-(-(len(row.ids) - 1) // c) for row in rows)
    n = max([c, *(len(thought) for row in rows for thought in row.thoughts)])
    labels = [[IGNORED] * (row.prompt_length - 1) + row.ids[row.prompt_length :] for row in rows]
    thoughts = [[*row.thoughts, *[[]] * (K - len(row.thoughts))] for row in rows]
    return Batch(
        ids=pad([row.ids[:-1] for row in rows], pad_id, K * c, device),
        labels=pad(labels, IGNORED, K * c, device),
        thoughts=torch.stack([pad(row, pad_id, n, device) for row in thoughts]),
        lengths=on_device([[len(thought) for thought in row] for row in thoughts], device),
    )


def gold_states(model: ThinkingStates, batch: Batch) -> Tensor:
    """S* [B, L, E]: 0 for the first chunk, then C(Z*) of the thought before each chunk."""
    B, K, _ = batch.thoughts.shape
    states = model.compress(batch.thoughts.flatten(0, 1), batch.lengths.flatten())
    states = states.unflatten(0, (B, K))  # [B, K, c, E]
    none = torch.zeros_like(states[:, :1])
    return torch.cat([none, states[:, :-1]], dim=1).flatten(1, 2)


def teacher_forced(
    model: ThinkingStates, batch: Batch, cache: KVCache | None = None
) -> tuple[Tensor, Tensor]:
    """(H, final normed vectors), [B, L, E] each, over X + S* (equation 5); fills a given cache."""
    frame = model.frame(in_order(*batch.ids.shape, batch.ids.device), cache)
    X = model.lower(batch.ids, frame)
    S = gold_states(model, batch) if model.thinks else 0.0
    H = model.middle(X + S, frame)
    return H, model.upper(H, frame)


def thought_logits(model: ThinkingStates, H: Tensor, batch: Batch) -> Tensor:
    """T's logits [B, K, n, V] for every token of the gold thoughts.

    T reads the c vectors of its chunk's H, then the tokens before the one that it predicts.
    """
    (B, K, n), c = batch.thoughts.shape, model.config.chunk_size
    before = model.backbone.model.embed_tokens(batch.thoughts[..., :-1])  # [B, K, n - 1, E]
    h = H.unflatten(1, (K, c))
    x = torch.cat([h, before], dim=2).flatten(0, 1)  # [B * K, c + n - 1, E]
    frame = model.frame(in_order(B * K, c + n - 1, H.device))
    out = model.thinking_block(x, frame, last=n)  # [B * K, n, E]
    return model.thinking_block.lm_head(out).unflatten(0, (B, K))


def losses(model: ThinkingStates, batch: Batch) -> Losses:
    """The summed cross-entropies of answers and thoughts."""
    H, out = teacher_forced(model, batch)
    lm = cross_entropy(model.backbone.lm_head(out), batch.labels)
    places = torch.arange(batch.thoughts.shape[-1], device=H.device)
    real = places < batch.lengths[..., None]  # [B, K, n]
    thought = torch.zeros_like(lm)
    if model.thinks:
        labels = batch.thoughts.where(real, IGNORED)
        thought = cross_entropy(thought_logits(model, H, batch), labels)
    return Losses(lm, thought, (batch.labels != IGNORED).sum(), real.sum())


def loss(sums: Losses, w: float = 1.0) -> Tensor:
    """L = L_LM + w L_T (equation 6): means over tokens, so that w does not depend on length.

    The paper writes a sum over chunks, and no w.
    """
    L_LM = sums.lm / sums.lm_tokens.clamp(min=1)
    L_T = sums.thought / sums.thought_tokens.clamp(min=1)
    return L_LM + w * L_T


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Summed cross-entropy (nats) of logits [..., V] and labels [...], IGNORED ones left out."""
    flat = logits.flatten(0, -2)
    return F.cross_entropy(flat, labels.flatten(), ignore_index=IGNORED, reduction="sum")
