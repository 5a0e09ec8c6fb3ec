"""Device memory that torch did not allocate, as a torch tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sgl_omni.errors import WeightShareError


class _Memory:
    """Speaks the CUDA array interface. torch refuses to import memory that is declared read-only, so the mapping
    alone protects it."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


def bytes_at(address: int, size: int, device: torch.device) -> Tensor:
    """A tensor uint8 [size] over device memory; nothing is copied, and nothing is freed with it."""
    tensor = torch.as_tensor(_Memory(address, size), device=device)
    if tensor.data_ptr() != address:
        raise WeightShareError("torch copied the weights instead of using them where they are")
    return tensor


def enter_context(device: torch.device) -> None:
    """Makes the device's primary context, which torch uses, current in this thread."""
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)
    torch.cuda.synchronize(device)
