"""CUDA graphs: work that always has the same shape, recorded once and launched as one from then on."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor


@cache
def side_stream(device: int) -> torch.cuda.Stream:
    """The stream of `device` on which all is warmed up and recorded, so that a pool's memory serves all of its graphs."""
    return torch.cuda.Stream(device)


@contextmanager
def own_workspaces() -> Iterator[None]:
    """Within, cuBLAS has no scratch memory but what it is given there; no one else is given that.

    torch keeps a piece (32 MB on an H100) for every stream and thread that multiplied, and a graph knows the piece it found
    by its address alone. Put around a recording and nothing else, this makes it a piece of the graph's pool, which lives
    as long as the graph. A piece from before the recording, of a warming up on the same stream, say, would be freed on
    leaving; one that is kept is freed, from torch 2.12 on, with whichever graph of that stream ends first (PyTorch's issue
    193402).
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


def capture(run: Callable[[], object], pool, restore: Callable[[], None] = lambda: None) -> torch.cuda.CUDAGraph:
    """Runs twice to warm up (kernels are chosen and compiled then), undoing it with `restore`, then records `run`.

    Whatever is made within `run` lives in `pool`, which graphs share: it lasts until another one of them runs. Other
    threads of the program may go on allocating meanwhile, hence the error mode.
    """
    stream = side_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
            restore()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with own_workspaces(), torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        run()
    return graph


class Graphs:
    """Functions of fixed-shape tensors, each captured once as a CUDA graph and replayed from then on.

    A `key` must name all that its function depends on besides the values of its tensors.
    """

    def __init__(self) -> None:
        self.captured: dict[tuple, tuple] = {}
        self.pool = torch.cuda.graph_pool_handle()  # shared: graphs run one after another, results are kept elsewhere

    def __call__(self, key: tuple, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """function(*inputs), as a tensor of the caller's own."""
        key = (*key, *(tuple(x.shape) for x in inputs))
        if key not in self.captured:
            statics = [x.clone() for x in inputs]
            out = torch.empty_like(function(*statics))
            self.captured[key] = capture(lambda: out.copy_(function(*statics)), self.pool), statics, out
        graph, statics, out = self.captured[key]
        for static, x in zip(statics, inputs):
            static.copy_(x)
        graph.replay()
        return out.clone()

    def change(self, key: tuple, function: Callable[..., None], *tensors: Tensor) -> None:
        """function(*tensors), which changes them in place: nothing is copied, so `key` always comes with the same ones."""
        if key not in self.captured:
            before = [x.clone() for x in tensors]

            def restore() -> None:
                for x, value in zip(tensors, before):
                    x.copy_(value)
            self.captured[key] = (capture(lambda: function(*tensors), self.pool, restore),)
        self.captured[key][0].replay()
