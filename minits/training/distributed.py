"""Several processes that train one model together (`torchrun`); alone, nothing here acts."""
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor


def rank() -> int:
    """This process's number; 0 alone."""
    return int(os.environ["RANK"]) if "LOCAL_RANK" in os.environ else 0


def world() -> int:
    """Number of processes; 1 alone."""
    return int(os.environ["WORLD_SIZE"]) if "LOCAL_RANK" in os.environ else 1


def own_device(device: str) -> str:
    """The card of this process where `device` is one and there are several processes."""
    if device.startswith("cuda") and world() > 1:
        return f"cuda:{os.environ['LOCAL_RANK']}"
    return device


def join(device: str) -> None:
    """Joins the group of processes: NCCL for CUDA tensors, gloo for those of the CPU.

    They wait for one another up to two hours, for the first one evaluates and saves meanwhile.
    """
    if world() > 1 and not dist.is_initialized():
        # Imported before there is a group, which its default arguments would keep: see `leave`.
        import torch.distributed.nn

        backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
        dist.init_process_group(backend, timeout=timedelta(hours=2))


def total(values: Tensor) -> Tensor:
    """`values` itself, now the sum over all processes."""
    if world() > 1:
        dist.all_reduce(values)
    return values


def anyone(flag: bool) -> bool:
    """Whether `flag` is set in any process; all of them must ask."""
    return bool(total(torch.tensor(int(flag))))


def leave() -> None:
    """Leaves the group of processes. Let go of all that uses it (DDP) before.

    Gloo's threads end with the last reference to the group; a thread that lets go of a tensor while
    Python exits aborts the process.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
