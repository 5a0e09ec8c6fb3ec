"""What a way of sharing memory between processes has to offer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Handle:
    """By what another process finds the memory: a descriptor, or bytes that only the driver understands."""

    fd: int | None = None
    data: bytes = b""


class Allocation(Protocol):
    """Memory that is being filled: ``bytes`` is a writable tensor uint8 [size]."""

    @property
    def bytes(self) -> Tensor: ...

    def seal(self) -> tuple[Tensor, Handle]:
        """Ends writing. Gives the same memory as this process may use it from now on, and its handle.

        The caller holds no view of ``bytes`` any more, and closes the handle's descriptor.

        Raises:
            WeightShareError: a writable view is still in use.
        """
        ...


class Backend(Protocol):
    """One of the ways: ``shm``, ``vmm`` or ``ipc``."""

    @property
    def name(self) -> str: ...

    @property
    def outlives_leader(self) -> bool:
        """Whether the memory stays when the process that made it has ended."""
        ...

    def create(self, size: int, device: torch.device) -> Allocation: ...

    def attach(self, handle: Handle, size: int, device: torch.device) -> Tensor:
        """The memory behind a handle as a tensor uint8 [size], read-only where the backend can.

        The caller closes the handle's descriptor.
        """
        ...
