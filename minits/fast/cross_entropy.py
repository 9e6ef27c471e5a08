"""Cross-entropy of an unembedding without ever holding all logits: value and gradients in one pass over slices."""
from __future__ import annotations

from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

LOGIT_SLICE = 4096  # positions whose logits exist at once: 1.2 GB in bfloat16 for Qwen2.5's vocabulary
IGNORED = -100  # the label of a place that only fills up a batch


def cross_entropy_sum(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Summed cross-entropy (nats) of hidden [M, E] @ weight.T [E, V] against labels [M]; `IGNORED` ones count nothing."""
    return LinearCrossEntropy.apply(hidden, weight, labels)


class LinearCrossEntropy(torch.autograd.Function):
    """The gradients are made while the logits of a slice exist, so the backward pass only scales them.

    152k logits a position are most of a training step's memory otherwise, and recomputing them costs a third more.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """As `cross_entropy_sum`; computes in the autocast type, where there is one."""
        device = hidden.device.type
        kind = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        total, by_hidden, by_weight = hidden.new_zeros((), dtype=torch.promote_types(kind, torch.float32)), [], None
        with torch.autocast(device, enabled=False):
            w = weight.to(kind)
            for h, y in zip(hidden.to(kind).split(LOGIT_SLICE), labels.split(LOGIT_SLICE)):
                loss, gradient = loss_and_gradient(F.linear(h, w), y)
                total = total + loss
                by_hidden.append(gradient @ w)
                part = gradient.T @ h
                by_weight = part if by_weight is None else by_weight.to(weight.dtype) + part
        ctx.save_for_backward(torch.cat(by_hidden), by_weight)
        ctx.kinds = hidden.dtype, weight.dtype
        return total

    @staticmethod
    def backward(ctx, scale: Tensor) -> tuple[Tensor, Tensor, None]:
        """The gradients by hidden and weight, times that of the loss."""
        scale = scale.reshape(1)  # with a dimension it widens a bfloat16 gradient; without, it would be rounded itself
        by_hidden, by_weight = ((saved * scale).to(kind) for saved, kind in zip(ctx.saved_tensors, ctx.kinds))
        return by_hidden, by_weight, None


def loss_and_gradient(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(summed cross-entropy, its gradient by the logits [M, V]) of one slice; may overwrite the logits."""
    if logits.is_cuda and logits.dtype != torch.float64 and find_spec("triton"):
        from minits.fast.kernels import cross_entropy  # one pass to read, one to write; the plain lines below take a dozen
        losses = torch.empty(len(labels), device=logits.device)
        cross_entropy[(len(labels),)](logits, labels, losses, logits.shape[1], 4096, num_warps=8)
        return losses.sum(), logits
    logs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    real, rows = labels != IGNORED, torch.arange(len(labels), device=logits.device)
    target = labels.clamp(min=0)
    loss = -(logs[rows, target] * real).sum()
    gradient = logs.exp_()
    gradient[rows, target] -= 1
    return loss, gradient.mul_(real[:, None]).to(logits.dtype)
