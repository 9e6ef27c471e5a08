"""Cross-entropy of an unembedding without ever holding all logits: value and gradients in one pass over slices."""
from __future__ import annotations

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
        kind = torch.get_autocast_dtype(hidden.device.type) if torch.is_autocast_enabled(hidden.device.type) else weight.dtype
        total, by_hidden, by_weight = hidden.new_zeros((), dtype=torch.promote_types(kind, torch.float32)), [], None
        with torch.autocast(hidden.device.type, enabled=False):
            w = weight.to(kind)
            for h, y in zip(hidden.to(kind).split(LOGIT_SLICE), labels.split(LOGIT_SLICE)):
                loss, gradient = loss_and_gradient(F.linear(h, w), y)
                total = total + loss
                by_hidden.append(gradient @ w)
                part = gradient.T @ h
                by_weight = part if by_weight is None else by_weight.to(weight.dtype) + part
        if by_weight is None:
            by_hidden, by_weight = [torch.zeros_like(hidden)], torch.zeros_like(weight)
        ctx.save_for_backward(torch.cat(by_hidden), by_weight)
        ctx.kinds = hidden.dtype, weight.dtype
        return total

    @staticmethod
    def backward(ctx, scale: Tensor) -> tuple[Tensor, Tensor, None]:
        """The gradients by hidden and weight, times that of the loss."""
        return *((saved * scale).to(kind) if saved.dtype == kind else torch.mul(saved, scale, out=saved.new_empty(
            saved.shape, dtype=kind)) for saved, kind in zip(ctx.saved_tensors, ctx.kinds)), None


def loss_and_gradient(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(summed cross-entropy, its gradient by the logits [M, V]) of one slice; may overwrite the logits."""
    if logits.is_cuda and logits.dtype != torch.float64:
        from minits.kernels import cross_entropy  # one pass to read, one to write; the plain lines below take a dozen
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
