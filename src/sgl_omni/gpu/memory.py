"""Memory of a GPU: budgets that a process is held to."""

from __future__ import annotations


def cap_allocator(device: int, *, fraction: float, size: int) -> int:
    """Limits what torch's allocator of this process may take of a GPU; more is an out-of-memory error here.

    Args:
        fraction: of the card's total memory, to which `size` bytes are added.

    Returns:
        The cap in bytes.
    """
    import torch

    total = torch.cuda.get_device_properties(device).total_memory
    share = min(fraction + size / total, 1.0)
    torch.cuda.set_per_process_memory_fraction(share, device)
    return int(total * share)
