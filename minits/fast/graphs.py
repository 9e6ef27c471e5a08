"""CUDA graphs: work that always has the same shape, captured once and replayed from then on."""
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor


@cache
def side_stream(device: int) -> torch.cuda.Stream:
    """The stream of `device` on which all is warmed up and captured.

    One for all, so that a pool's memory serves all of its graphs.
    """
    return torch.cuda.Stream(device)


@contextmanager
def own_workspaces() -> Iterator[None]:
    """Within, cuBLAS has no scratch memory but what it is given there; no one else is given that.

    torch keeps a piece (32 MB on an H100) for every stream and thread that multiplied, and a graph
    knows the piece that it found by its address alone. Put around a capture and nothing else, this
    makes it a piece of the graph's pool, which lives as long as the graph. A piece from before, of
    a warming up on the same stream, say, would be freed on leaving; one that is kept is freed, from
    torch 2.12 on, with whichever graph of that stream ends first (PyTorch's issue 193402).
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


def capture(
    run: Callable[[], object],
    pool: Any,  # which graphs share: what is made in `run` lasts until another one of them runs
    restore: Callable[[], None] = lambda: None,  # undoes `run`
) -> torch.cuda.CUDAGraph:
    """Runs twice to warm up (kernels are chosen and compiled then), undone, then captures `run`.

    Other threads of the program may go on allocating meanwhile, hence the error mode.
    """
    stream = side_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
            restore()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    mode = {"capture_error_mode": "thread_local"}
    with own_workspaces(), torch.cuda.graph(graph, pool=pool, stream=stream, **mode):
        run()
    return graph


class Graphs:
    """Functions of fixed-shape tensors, each captured once and replayed from then on.

    A `key` must name all that its function depends on besides the values of its tensors.
    """

    def __init__(self) -> None:
        self.captured: dict[tuple, tuple] = {}
        # Shared: graphs run one after another, and results are kept elsewhere.
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, key: tuple, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """function(*inputs), as a tensor of the caller's own."""
        key = (*key, *(tuple(x.shape) for x in inputs))
        if key not in self.captured:
            statics = [x.clone() for x in inputs]
            out = torch.empty_like(function(*statics))
            graph = capture(lambda: out.copy_(function(*statics)), self.pool)
            self.captured[key] = graph, statics, out
        graph, statics, out = self.captured[key]
        for static, x in zip(statics, inputs):
            static.copy_(x)
        graph.replay()
        return out.clone()

    def change(self, key: tuple, function: Callable[..., None], *tensors: Tensor) -> None:
        """function(*tensors), which changes them in place.

        Nothing is copied, so `key` always comes with the same tensors.
        """
        if key not in self.captured:
            before = [x.clone() for x in tensors]

            def restore() -> None:
                for x, value in zip(tensors, before):
                    x.copy_(value)

            self.captured[key] = (capture(lambda: function(*tensors), self.pool, restore),)
        self.captured[key][0].replay()
