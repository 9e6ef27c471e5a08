"""Several processes that train one model together (`torchrun`). Without torchrun everything here does nothing."""
from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor


def rank() -> int:
    """This process's number; 0 alone."""
    return int(os.environ.get("RANK", 0))


def world() -> int:
    """Number of processes; 1 alone."""
    return int(os.environ.get("WORLD_SIZE", 1))


def own_device(device: str) -> str:
    """The card of this process where `device` is one and there are several processes; else `device`."""
    return f"cuda:{os.environ['LOCAL_RANK']}" if device.startswith("cuda") and world() > 1 else device


def join(device: str) -> None:
    """Meets the other processes: NCCL for CUDA tensors, gloo for those of the CPU."""
    if world() > 1 and not dist.is_initialized():
        if device.startswith("cuda"):
            torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo")


def total(values: Tensor) -> Tensor:
    """The sum of `values` over all processes."""
    if world() > 1:
        dist.all_reduce(values)
    return values


def anyone(flag: bool) -> bool:
    """Whether `flag` is set in any process; all of them must ask."""
    return bool(total(torch.tensor(int(flag))))


def leave() -> None:
    """Parts from the other processes."""
    if dist.is_initialized():
        dist.destroy_process_group()
