"""Cross-entropy of an unembedding without ever holding all logits.

Value and gradients come in one pass over slices. 152k logits a position are most of a training
step's memory otherwise, and recomputing them costs a third more.
"""
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minits.tensors import IGNORED

# Positions whose logits exist at once: 1.2 GB in bfloat16 for Qwen2.5's vocabulary.
LOGIT_SLICE = 4096


def cross_entropy_sum(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Summed cross-entropy (nats) of hidden [N, E] @ weight.T [E, V] against labels [N].

    `IGNORED` ones count nothing.
    """
    return LinearCrossEntropy.apply(hidden, weight, labels)


class LinearCrossEntropy(torch.autograd.Function):
    """Makes the gradients while a slice's logits exist, so the backward pass only scales them."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """As `cross_entropy_sum`; computes in the autocast type, where there is one."""
        device = hidden.device.type
        casts = torch.is_autocast_enabled(device)
        kind = torch.get_autocast_dtype(device) if casts else weight.dtype
        total = hidden.new_zeros((), dtype=torch.promote_types(kind, torch.float32))
        by_hidden, by_weight = [], None
        with torch.autocast(device, enabled=False):
            w = weight.to(kind)
            slices = hidden.to(kind).split(LOGIT_SLICE)
            for h, y in zip(slices, labels.split(LOGIT_SLICE)):
                loss, gradient = loss_and_gradient(F.linear(h, w), y)
                total = total + loss
                by_hidden.append(gradient @ w)
                part = gradient.T @ h
                by_weight = part if by_weight is None else by_weight.to(weight.dtype) + part
        ctx.save_for_backward(torch.cat(by_hidden), by_weight)
        ctx.kinds = hidden.dtype, weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, Tensor, None]:
        """The gradients by hidden and weight, times that of the loss."""
        # With a dimension the scale widens a bfloat16 gradient; without, it would be rounded.
        scale = scale.reshape(1)
        saved = zip(ctx.saved_tensors, ctx.kinds)
        by_hidden, by_weight = ((gradient * scale).to(kind) for gradient, kind in saved)
        return by_hidden, by_weight, None


def loss_and_gradient(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(summed cross-entropy, its gradient by the logits [N, V]); may overwrite the logits."""
    if logits.is_cuda and logits.dtype != torch.float64 and find_spec("triton"):
        # One pass to read, one to write; the plain lines below take a dozen.
        from minits.fast.kernels import cross_entropy

        losses = torch.empty(len(labels), device=logits.device)
        grid = (len(labels),)
        cross_entropy[grid](logits, labels, losses, logits.shape[1], 4096, num_warps=8)
        return losses.sum(), logits
    logs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    rows, real = torch.arange(len(labels), device=logits.device), labels != IGNORED
    target = labels.clamp(min=0)
    loss = -(logs[rows, target] * real).sum()
    gradient = logs.exp_()
    gradient[rows, target] -= 1
    return loss, gradient.mul_(real[:, None]).to(logits.dtype)
