"""One optimizer step: losses, gradients, clipping, AdamW."""
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from inspect import signature

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from minits.fast.flat_batch import FlatBatch
from minits.fast.training_graph import StepGraphs
from minits.methods.method import Method, Stage
from minits.qwen import DecoderLayer
from minits.teacher_forcing import Losses
from minits.thinking import ThinkingStates
from minits.training import distributed
from minits.training.recipe import TrainSettings

# torch 2.11 calls this argument `broadcast_buffers`; newer torch takes that name too, but warns.
SYNC_BUFFERS = "forward_sync_buffers"
if SYNC_BUFFERS not in signature(DistributedDataParallel).parameters:
    SYNC_BUFFERS = "broadcast_buffers"


class LossModule(nn.Module):
    """A method's losses of a model as a module's forward pass, which is what DDP wraps."""

    def __init__(self, model: ThinkingStates, method: Method) -> None:
        super().__init__()
        self.model, self.method = model, method

    def forward(self, batch: FlatBatch) -> Losses:
        """The summed losses of `batch`."""
        return self.method.losses(self.model, batch)


class OptimizerStep:
    """Takes steps, without waiting for the device.

    Once a loss or gradient was not finite, no step changes anything any more (`stopped`): whoever
    reads the figures later still finds the weights from before.
    """

    def __init__(self, model: ThinkingStates, method: Method, settings: TrainSettings) -> None:
        self.settings, self.loss_module = settings, LossModule(model, method)
        self.device, self.cuda = model.device, model.device.type == "cuda"
        self.parameters = list(model.parameters())
        self.optimizer = make_optimizer(model, settings)
        self.loss_weights = torch.tensor([1.0, settings.thought_weight], device=self.device)
        self.stopped = torch.zeros((), device=self.device)
        alone = distributed.world() == 1
        self.wrapped = self.loss_module if alone else self.in_ddp()
        self.graphs = None
        if self.cuda and alone:
            self.graphs = StepGraphs(
                self.step, self.without_effect, several_widths=settings.layout == "rows"
            )
        if settings.compile:
            if not alone:  # else each layer of 0.5B becomes three graphs, of no use to DDP
                torch._dynamo.config.optimize_ddp = False
            for layer in decoder_layers(model):
                # For the first shape, the backbone's; then once more for all others, T's and C's.
                layer.compile()

    def in_ddp(self) -> DistributedDataParallel:
        """The loss module in DDP, which averages its gradients over the processes."""
        return DistributedDataParallel(
            self.loss_module,
            device_ids=[self.device.index] if self.cuda else None,
            gradient_as_bucket_view=True,  # no gradient twice
            **{SYNC_BUFFERS: False},  # the only buffer is a constant
        )

    def begin_stage(self, stage: Stage) -> None:
        """The optimizer's state and the graphs as `stage` wants them; before its steps."""
        self.optimizer.zero_grad(set_to_none=True)
        if stage.resets:  # in place, for graphs know these tensors
            for state in self.optimizer.state.values():
                for tensor in state.values():
                    tensor.zero_()
        if self.graphs is not None and stage.fresh:
            self.graphs.captured.clear()

    def release(self) -> None:
        """Frees the memory of steps; none can follow.

        The graphs refer to this object and it refers to them: only Python's collector frees such a
        cycle, and it may be frozen. DDP holds the group of processes.
        """
        self.wrapped, self.graphs = self.loss_module, None
        self.optimizer.zero_grad(set_to_none=True)
        if self.cuda:
            torch.cuda.empty_cache()

    def __call__(self, parts: Sequence[FlatBatch], rate: float) -> Tensor:
        """One step on `parts` at that learning rate.

        [3]: mean answer loss, mean thought loss, gradient norm before clipping; perhaps still being
        computed.
        """
        parts = [part.map(lambda x: x.to(self.device, non_blocking=True)) for part in parts]
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        return self.step(parts) if self.graphs is None else self.graphs.replay(parts)

    def step(self, parts: Sequence[FlatBatch]) -> Tensor:
        """The step on batches that lie on the device, at the rate that is set."""
        return self.update(self.gradients(parts))

    def gradients(self, parts: Sequence[FlatBatch]) -> Tensor:
        """Leaves the gradients with the parameters; [2]: mean answer loss, mean thought loss.

        Losses are means over all supervised tokens of the step: the sums of each part, on each
        rank, are divided by the counts of the whole. A mean of means would weigh tokens by the part
        that they fell into.
        """
        counts = distributed.total(sum(part.counts for part in parts)).clamp(min=1)
        losses = torch.zeros(2, device=self.device)
        self.optimizer.zero_grad(set_to_none=True)
        half = self.settings.dtype == "bfloat16"
        for part in parts:
            # Over the ranks gradients are averaged once a step, with those of its last part.
            averages = self.wrapped is self.loss_module or part is parts[-1]
            with nullcontext() if averages else self.wrapped.no_sync():
                with torch.autocast(self.device.type, torch.bfloat16, enabled=half):
                    found = self.wrapped(part)
                means = torch.stack([found.lm, found.thought]) / counts
                # L = L_LM + w L_T; summed over the ranks, though DDP averages.
                loss = (means * self.loss_weights).sum() * distributed.world()
                loss.backward()
            losses = losses + means.detach()
        return distributed.total(losses)

    def update(self, losses: Tensor) -> Tensor:
        """Changes the weights, unless a figure is not finite; [3]: `losses`, gradient norm."""
        used = [p for p in self.parameters if p.grad is not None]
        norm = get_total_norm([p.grad for p in used])
        figures = torch.cat([losses, norm[None]])
        failed = ~figures.isfinite().all()
        self.stopped.copy_(torch.maximum(self.stopped, failed.float()))
        if self.cuda:
            # The fused kernel divides gradients by grad_scale as it reads them, and looks at
            # found_inf itself: clipping without a pass over the gradients or a look from the host.
            self.optimizer.grad_scale = (norm / self.settings.clip).clamp(min=1.0).float()
            self.optimizer.found_inf = self.stopped
            self.optimizer.step()
        elif not self.stopped:
            clip_grads_with_norm_(used, self.settings.clip, norm)
            self.optimizer.step()
        return figures

    @contextmanager
    def without_effect(self) -> Iterator[None]:
        """Within, steps change nothing, and afterwards there are no gradients.

        So a training can go on after an error in between (out of memory, say).
        """
        before = self.stopped.clone()
        self.stopped.fill_(1.0)
        try:
            yield
        finally:
            self.optimizer.zero_grad(set_to_none=True)
            self.stopped.copy_(before)


def decoder_layers(model: nn.Module) -> list[DecoderLayer]:
    """All of them: the backbone's, T's and C's."""
    return [module for module in model.modules() if isinstance(module, DecoderLayer)]


def make_optimizer(model: nn.Module, settings: TrainSettings) -> torch.optim.Optimizer:
    """AdamW; on CUDA the fused one, with all that changes kept on the card.

    Weight decay is for matrices: norms and biases are left alone.
    """
    cuda = settings.device.startswith("cuda")
    rate = torch.tensor(settings.lr, device=settings.device) if cuda else settings.lr
    groups = [{"params": list(model.parameters())}]
    if settings.weight_decay:
        matrices, vectors = [], []
        for parameter in model.parameters():
            (matrices if parameter.dim() > 1 else vectors).append(parameter)
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        groups,
        lr=rate,
        betas=(0.9, 0.99),
        weight_decay=settings.weight_decay,
        fused=cuda,
        capturable=cuda,
    )
