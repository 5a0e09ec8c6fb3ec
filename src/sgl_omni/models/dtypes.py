"""The type of weights and activations that a stage is asked for. Imports torch only when it is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sgl_omni.errors import StartupError

if TYPE_CHECKING:
    import torch

NAMES = ("float32", "bfloat16", "float16")


def dtype_of(asked: str | None, device: str, key: str = "dtype") -> torch.dtype:
    """float32 on a CPU and bfloat16 on a GPU, unless one of ``NAMES`` is asked for; else raises ``StartupError``."""
    import torch

    name = asked or ("float32" if device == "cpu" else "bfloat16")
    if name not in NAMES:
        raise StartupError(f"{key} {name!r} is not one of {', '.join(NAMES)}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype
