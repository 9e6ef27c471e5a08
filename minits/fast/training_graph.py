"""A whole optimizer step as one CUDA graph for each shape of batches; training/step.py defines it.

A step of Qwen2.5-0.5B launches some 4,000 kernels, 110 ms and more, for 45 ms of work on an H100; a
graph launches once.
"""
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from minits.fast.flat_batch import FlatBatch
from minits.fast.graphs import capture


class StepGraphs:
    """`replay(parts)` does what `step(parts)` does."""

    def __init__(
        self,
        step: Callable[[Sequence[FlatBatch]], Tensor],  # of its parts; leaves its figures [3]
        without_effect: Callable[[], AbstractContextManager],  # within, a step changes nothing
        *,
        several_widths: bool,  # whether parts of different row widths take turns
    ) -> None:
        self.step, self.without_effect, self.several_widths = step, without_effect, several_widths
        self.captured: dict[tuple[int, ...], tuple] = {}  # by the width of rows in each part
        self.pool = None  # of the graphs' memory

    def replay(self, parts: Sequence[FlatBatch]) -> Tensor:
        """The step; captured when parts of these shapes come for the first time.

        One graph for each tuple of widths, where widths take turns, else one: all other sizes only
        grow (`BucketedSizes`), so an outgrown shape never comes again.
        """
        widths = tuple(part.ids.shape[1] for part in parts)
        shapes = [x.shape for x in tensors_of(parts)]
        if widths not in self.captured or self.captured[widths][0] != shapes:
            self.make_room(widths)
            self.captured[widths] = shapes, *self.record(parts)
        _, graph, static, figures = self.captured[widths]
        for ours, given in zip(tensors_of(static), tensors_of(parts)):
            ours.copy_(given)
        graph.replay()
        return figures.clone()

    def make_room(self, widths: tuple[int, ...]) -> None:
        """Lets go of the graphs that one of `widths` replaces, before it is warmed up.

        Beside each other they would need twice the memory. While graphs of other widths live, what
        one leaves stays in their pool, for the next recording. Once none is left that memory is
        given back, and the next ones get a pool of their own: torch does not take up one again
        whose graphs have all ended (use_count > 0 INTERNAL ASSERT FAILED).
        """
        torch.cuda.synchronize()  # the last step may still run in that memory
        if self.several_widths:
            self.captured.pop(widths, None)
        else:
            self.captured.clear()
        if not self.captured:
            self.pool = torch.cuda.graph_pool_handle()
            torch.cuda.empty_cache()

    def record(
        self, parts: Sequence[FlatBatch]
    ) -> tuple[torch.cuda.CUDAGraph, list[FlatBatch], Tensor]:
        """The graph, the parts that it reads and the figures that it leaves.

        The steps that warm up make AdamW's state and the rotary table, which must not lie in the
        graphs' memory. Gradients do lie there, free for the next graph.
        """
        static = [part.map(torch.clone) for part in parts]
        figures = torch.zeros(3, device=parts[0].ids.device)
        with self.without_effect():
            graph = capture(lambda: figures.copy_(self.step(static)), self.pool)
        return graph, static, figures


def tensors_of(parts: Sequence[FlatBatch]) -> list[Tensor]:
    """The fields of all parts, in order."""
    return [x for part in parts for x in part.tensors]
