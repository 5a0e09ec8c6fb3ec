"""One allocation with all of a model's tensors in it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from sgl_omni.errors import WeightShareError
from sgl_omni.gpu.weights.manifest import Manifest


def views(manifest: Manifest, memory: Tensor) -> dict[str, Tensor]:
    """Every tensor of the manifest as a view into `memory`, uint8 [manifest.size]."""
    tensors: dict[str, Tensor] = {}
    for entry in manifest.entries:
        run = memory[entry.offset : entry.end].view(entry.torch_dtype)
        tensors[entry.name] = run.as_strided(entry.shape, entry.strides)
    return tensors


class Arena:
    """The weights as a replica uses them: shared tensors in place, private ones as copies of its own."""

    def __init__(self, manifest: Manifest, memory: Tensor) -> None:
        """Raises ``WeightShareError`` where the memory is smaller than the manifest says."""
        if memory.nbytes < manifest.size:
            raise WeightShareError(f"the shared weights have {memory.nbytes} bytes of {manifest.size}")
        self.manifest = manifest
        self._memory = memory

    def tensors(self) -> dict[str, Tensor]:
        private = {entry.name for entry in self.manifest.entries if entry.private}
        found = views(self.manifest, self._memory)
        return {name: tensor.clone() if name in private else tensor for name, tensor in found.items()}

    def verify(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises ``WeightShareError`` naming the ``tensors`` in use that are not where the manifest puts them.

        A shared one must lie at its own place, a private one anywhere but in the arena.
        """
        entries = {entry.name: entry for entry in self.manifest.entries}
        start = self._memory.data_ptr()
        moved: list[str] = []
        for name, tensor in tensors.items():
            entry = entries.get(name)
            if entry is None:
                moved.append(f"{name} is not among the weights")
            elif entry.private and start <= tensor.data_ptr() < start + self.manifest.size:
                moved.append(f"{name} is private, but lies in the shared memory")
            elif not entry.private and (
                tensor.data_ptr() != start + entry.offset
                or tuple(tensor.shape) != entry.shape
                or tensor.stride() != entry.strides
                or tensor.dtype != entry.torch_dtype
            ):
                moved.append(f"{name} is no longer in the shared memory")
        if moved:
            more = f" and {len(moved) - 8} more" if len(moved) > 8 else ""
            raise WeightShareError(f"{self.manifest.architecture}: {'; '.join(moved[:8])}{more}")
