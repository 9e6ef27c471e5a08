"""One optimizer step: losses, gradients, clipping, AdamW. On CUDA it runs as one graph for each shape of batch.

A step of Qwen2.5-0.5B launches some 4,000 kernels, 110 ms and more, for 45 ms of work on an H100; a graph launches once.
"""
from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from inspect import signature

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from minits.training import distributed
from minits.training.recipe import TrainConfig
from minits.fast.graphs import capture
from minits.thinking import Batch, ThinkingStates

# torch 2.11 calls this argument `broadcast_buffers`; newer torch still takes that name, but warns.
SYNC_BUFFERS = ("forward_sync_buffers" if "forward_sync_buffers" in signature(DistributedDataParallel).parameters
                else "broadcast_buffers")


class Update:
    """Takes steps: `update(parts, rate)`. A step does not wait for the device.

    Once a loss or gradient was not finite, no step changes anything any more (`stopped`): whoever reads the metrics
    later still finds the weights from before.
    """

    def __init__(self, model: ThinkingStates, config: TrainConfig, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.config, self.optimizer = model, config, optimizer
        self.cuda, alone = model.device.type == "cuda", distributed.world() == 1
        self.wrapped = model if alone else DistributedDataParallel(
            model, device_ids=[model.device.index] if self.cuda else None, gradient_as_bucket_view=True,
            **{SYNC_BUFFERS: False})  # no gradient twice; the only buffer is a constant
        self.weights = torch.tensor([1.0, config.thought_weight], device=model.device)
        self.stopped = torch.zeros((), device=model.device)
        self.graphs: dict[int, tuple] | None = {} if self.cuda and alone and config.accumulate == 1 else None
        self.pool = None  # of the graphs' memory; see make_room
        if config.compile:
            if not alone:  # else each layer of 0.5B becomes three graphs, for which DDP has no use
                torch._dynamo.config.optimize_ddp = False
            for layer in model.decoder_layers:
                layer.compile()  # for the first shape, the backbone's; then once more for all others, those of T and C

    def leave(self) -> None:
        """Parts from the other processes and gives back the memory of the steps, of which none can follow."""
        self.wrapped, self.graphs = self.model, None
        self.optimizer.zero_grad(set_to_none=True)
        if self.cuda:
            torch.cuda.empty_cache()
        distributed.leave()

    def __call__(self, parts: Sequence[Batch], rate: float) -> Tensor:
        """One step on the samples in `parts`; [3]: mean answer loss, mean thought loss, gradient norm before clipping.

        Nothing is waited for: who reads the figures does that.
        """
        parts = [part.map(lambda x: x.to(self.model.device, non_blocking=True)) for part in parts]
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        return self.step(parts) if self.graphs is None else self.replay(parts[0])

    def step(self, parts: Sequence[Batch]) -> Tensor:
        """The step itself; [3]: the figures."""
        return self.descend(self.gradients(parts))

    def gradients(self, parts: Sequence[Batch]) -> Tensor:
        """Leaves the gradients with the parameters; [2]: mean answer loss, mean thought loss.

        Losses are means over all supervised tokens of the step: the sums of each part, on each rank, are divided by
        the counts of the whole (a mean of means would weigh tokens by the part they fell into).
        """
        counts = distributed.total(sum(part.counts for part in parts)).clamp(min=1)
        losses = torch.zeros(2, device=counts.device)
        self.optimizer.zero_grad(set_to_none=True)
        for part in parts:
            averages = self.wrapped is self.model or part is parts[-1]  # over the ranks, once a step
            with nullcontext() if averages else self.wrapped.no_sync():
                with torch.autocast(counts.device.type, torch.bfloat16, enabled=self.config.dtype == "bfloat16"):
                    found = self.wrapped(part)
                means = torch.stack([found.lm, found.thought]) / counts
                (means * self.weights).sum().mul(distributed.world()).backward()  # gradients are averaged over the ranks
            losses = losses + means.detach()
        return distributed.total(losses)

    def descend(self, losses: Tensor) -> Tensor:
        """Changes the weights, unless a figure is not finite; [3]: the figures, `losses` and the gradient norm."""
        norm = get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        metrics = torch.cat([losses, norm[None]])
        self.stopped.copy_(torch.maximum(self.stopped, (~metrics.isfinite().all()).float()))
        self.apply(norm)
        return metrics

    def apply(self, norm: Tensor) -> None:
        """Clips the gradients to a norm of `clip` and takes AdamW's step, unless training has stopped."""
        if self.cuda:  # the fused kernel divides by grad_scale as it reads the gradients, and looks at found_inf itself
            self.optimizer.grad_scale = (norm / self.config.clip).clamp(min=1.0).float()
            self.optimizer.found_inf = self.stopped
            self.optimizer.step()
        elif not self.stopped:
            clip_grads_with_norm_([p for p in self.model.parameters() if p.grad is not None], self.config.clip, norm)
            self.optimizer.step()

    def replay(self, batch: Batch) -> Tensor:
        """`step` as a graph, captured when this shape of batch comes for the first time.

        One graph for each width of rows, where a row is a sample, else one: all other sizes only grow (`Roomy`), so an
        outgrown shape never comes again.
        """
        width, shapes = batch.ids.shape[1], [x.shape for x in batch.tensors]
        if width not in self.graphs or self.graphs[width][0] != shapes:
            self.make_room(width)
            self.graphs[width] = shapes, *self.capture(batch)
        _, graph, static, metrics = self.graphs[width]
        for ours, given in zip(static.tensors, batch.tensors):
            ours.copy_(given)
        graph.replay()
        return metrics.clone()

    def make_room(self, width: int) -> None:
        """Lets go of the graphs that one of `width` replaces, before it is warmed up: beside each other they need twice the
        memory. Rows of several samples only grow in width, so there it replaces all.

        While graphs of other widths live, what one leaves stays in their pool, for the next recording. Once none is left,
        that memory is given back, and the next ones get a pool of their own: torch does not take up one again whose graphs
        have all ended (use_count > 0 INTERNAL ASSERT FAILED).
        """
        torch.cuda.synchronize()  # the last step may still run in that memory
        if self.config.layout == "rows":
            self.graphs.pop(width, None)
        else:
            self.graphs.clear()
        if not self.graphs:
            self.pool = torch.cuda.graph_pool_handle()
            torch.cuda.empty_cache()

    def capture(self, batch: Batch) -> tuple[torch.cuda.CUDAGraph, Batch, Tensor]:
        """The graph, the batch it reads and the figures it leaves.

        The steps that warm up change nothing, for training is `stopped` meanwhile; but they make AdamW's state and the
        rotary table, which must not lie in the graphs' memory. Gradients do lie there, free for the next graph.
        """
        static, before, metrics = batch.map(torch.clone), self.stopped.clone(), torch.zeros(3, device=self.stopped.device)
        self.stopped.fill_(1.0)
        try:
            graph = capture(lambda: metrics.copy_(self.step([static])), self.pool)
        finally:  # who goes on after an error (out of memory, say) trains on
            self.optimizer.zero_grad(set_to_none=True)
            self.stopped.copy_(before)
        return graph, static, metrics


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW; on CUDA the fused one, with all that changes kept on the card."""
    cuda = config.device.startswith("cuda")
    rate = torch.tensor(config.lr, device=config.device) if cuda else config.lr
    return torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.99), weight_decay=config.weight_decay,
                             fused=cuda, capturable=cuda)
