"""Memory of a GPU: budgets that a process is held to."""

from __future__ import annotations

from sgl_omni.errors import StartupError


def total_memory(device: int) -> int:
    """Bytes of a GPU, those in use included."""
    import torch

    return int(torch.cuda.get_device_properties(device).total_memory)


def cap_allocator(device: int, *, fraction: float, size: int, beside: int = 0) -> int:
    """Limits what torch's allocator of this process may take of a GPU; more is an out-of-memory error here.

    Args:
        fraction: of the card's total memory, to which `size` bytes are added.
        beside: bytes of that budget which this process has from elsewhere, as shared weights are.

    Returns:
        The cap in bytes.

    Raises:
        StartupError: what is held beside takes the whole budget.
    """
    import torch

    total = total_memory(device)
    share = min(fraction + size / total, 1.0) - beside / total
    if share <= 0:
        raise StartupError(
            f"GPU {device}: weights of {beside / 2**30:.2f} GiB leave nothing of a budget of "
            f"{(fraction * total + size) / 2**30:.2f} GiB; give the stage a larger one"
        )
    torch.cuda.set_per_process_memory_fraction(share, device)
    return int(total * share)
