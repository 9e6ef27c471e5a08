"""A whole optimizer step as one CUDA graph for each shape of batch; training/step.py defines it.

A step of Qwen2.5-0.5B launches some 4,000 kernels, 110 ms and more, for 45 ms of work on an H100; a
graph launches once.
"""
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from minits.fast.flat_batch import FlatBatch
from minits.fast.graphs import capture


class StepGraphs:
    """`replay(batch)` does what `step(batch)` does."""

    def __init__(
        self,
        step: Callable[[FlatBatch], Tensor],  # leaves its figures [3]
        without_effect: Callable[[], AbstractContextManager],  # within, a step changes nothing
        *,
        several_widths: bool,  # whether batches of different row widths take turns
    ) -> None:
        self.step, self.without_effect, self.several_widths = step, without_effect, several_widths
        self.captured: dict[int, tuple] = {}  # by the width of rows
        self.pool = None  # of the graphs' memory

    def replay(self, batch: FlatBatch) -> Tensor:
        """The step; captured when this shape of batch comes for the first time.

        One graph for each width, where widths take turns, else one: all other sizes only grow
        (`BucketedSizes`), so an outgrown shape never comes again.
        """
        width, shapes = batch.ids.shape[1], [x.shape for x in batch.tensors]
        if width not in self.captured or self.captured[width][0] != shapes:
            self.make_room(width)
            self.captured[width] = shapes, *self.record(batch)
        _, graph, static, figures = self.captured[width]
        for ours, given in zip(static.tensors, batch.tensors):
            ours.copy_(given)
        graph.replay()
        return figures.clone()

    def make_room(self, width: int) -> None:
        """Lets go of the graphs that one of `width` replaces, before it is warmed up.

        Beside each other they would need twice the memory. While graphs of other widths live, what
        one leaves stays in their pool, for the next recording. Once none is left that memory is
        given back, and the next ones get a pool of their own: torch does not take up one again
        whose graphs have all ended (use_count > 0 INTERNAL ASSERT FAILED).
        """
        torch.cuda.synchronize()  # the last step may still run in that memory
        if self.several_widths:
            self.captured.pop(width, None)
        else:
            self.captured.clear()
        if not self.captured:
            self.pool = torch.cuda.graph_pool_handle()
            torch.cuda.empty_cache()

    def record(self, batch: FlatBatch) -> tuple[torch.cuda.CUDAGraph, FlatBatch, Tensor]:
        """The graph, the batch that it reads and the figures that it leaves.

        The steps that warm up make AdamW's state and the rotary table, which must not lie in the
        graphs' memory. Gradients do lie there, free for the next graph.
        """
        static = batch.map(torch.clone)
        figures = torch.zeros(3, device=batch.ids.device)
        with self.without_effect():
            graph = capture(lambda: figures.copy_(self.step(static)), self.pool)
        return graph, static, figures
