"""Fills parts of the Higgs audio tokenizer from a checkpoint, with or without weight norm on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from sgl_omni.engine.checkpoint import Checkpoint, Slot
from sgl_omni.engine.weights import tensors_of
from sgl_omni.models.higgs_audio_v2.codec_shapes import UNREAD, on_disk


class CodecWeights:
    """Collects what is wanted of the tensors below ``prefix``, and reads it at once."""

    def __init__(self, checkpoint: Checkpoint, prefix: str) -> None:
        self._checkpoint = checkpoint
        self._prefix = prefix
        self._names = set(checkpoint.names(prefix))
        self._slots: list[Slot] = []
        self._folds: list[Callable[[], None]] = []

    def module(self, name: str, module: nn.Module, *, norm_dim: int = 0) -> None:
        """All tensors of a module. ``norm_dim``: the dimension that keeps its lengths where weights are normalised."""
        for key, tensor in tensors_of(module).items():
            self.tensor(f"{name}.{key}", tensor, norm_dim=norm_dim)

    def tensor(self, name: str, target: Tensor, *, norm_dim: int = 0) -> None:
        full = self._prefix + name
        pair = on_disk(self._prefix, name, self._names)
        if pair is None:
            self._slots.append(Slot(full, target, tuple(target.shape)))
            return
        length = [size if dim == norm_dim else 1 for dim, size in enumerate(target.shape)]
        lengths, directions = torch.empty(length), torch.empty(target.shape)
        self._slots += [Slot(pair[0], lengths, tuple(length)), Slot(pair[1], directions, tuple(target.shape))]
        others = [dim for dim in range(target.dim()) if dim != norm_dim]

        def fold() -> None:
            target.copy_(directions * (lengths / directions.norm(dim=others, keepdim=True)))

        self._folds.append(fold)

    def load(self, others: Sequence[str]) -> None:
        """Raises ``CheckpointError`` that names what is missing or unknown; ``others``: parts that are not wanted."""
        ignored = [self._prefix + pattern for pattern in (*UNREAD, *others)]
        self._checkpoint.load(self._slots, prefix=self._prefix, ignore=ignored)
        with torch.no_grad():
            for fold in self._folds:
                fold()
