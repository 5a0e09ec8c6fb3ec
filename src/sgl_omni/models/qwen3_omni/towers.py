"""The encoders: patches of pixels and mel frames to rows of the thinker's prompt, many requests at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sgl_omni.models.qwen3_omni.loading import load_part, whole_config
from sgl_omni.models.qwen3_omni.patches import image_patches
from sgl_omni.models.qwen3_omni.positions import audio_tokens, token_count
from sgl_omni.models.qwen3_omni.prompt_spec import VisionSpec
from sgl_omni.models.rehearsal import SECONDS
from sgl_omni.runtime.stage import Payload

REHEARSED_SIDES = 256, 1024
"""Pixels of square pictures: libraries choose among kernels by how many patches there are."""

_MEL_RATE = 100
"""Mel frames a second."""

Item = tuple[int, Any]
"""The request that it belongs to, by its index in the batch, and one picture or recording."""


class ImageEncoder:
    """``pixels`` and ``grids`` of payloads to ``embeddings`` [tokens, hidden], ``layered`` [levels, tokens, hidden].

    Pictures of several requests run together, up to ``max_patches`` a pass; more only where one alone has more.
    """

    def __init__(self, folder: Path, spec: VisionSpec, device: str, dtype: torch.dtype, max_patches: int) -> None:
        from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeVisionEncoder

        config = whole_config(folder).thinker_config.vision_config
        self._tower = load_part(Qwen3OmniMoeVisionEncoder, config, folder, "thinker.visual.", device, dtype)
        self._device, self._dtype, self._merge, self._max_patches = device, dtype, spec.merge, max_patches
        values = spec.frames * spec.patch * spec.patch  # a patch has all values of a colour side by side
        self._spec = spec
        self._scale = spec.scale
        self._mean = torch.tensor(spec.mean, device=device).repeat_interleave(values)
        self._std = torch.tensor(spec.std, device=device).repeat_interleave(values)

    def __call__(self, payloads: list[Payload]) -> list[Payload]:
        items: list[Item] = []
        for owner, payload in enumerate(payloads):
            at = 0
            for grid in np.asarray(payload["grids"]).tolist():
                count = grid[0] * grid[1] * grid[2]
                items.append((owner, (payload["pixels"][at : at + count], grid)))
                at += count
        embeddings: list[list[Tensor]] = [[] for _ in payloads]
        layered: list[list[Tensor]] = [[] for _ in payloads]
        for group in within(items, lambda item: len(item[1][0]), self._max_patches):
            rows, levels = self._encode([item for _, item in group])
            counts = [token_count(grid, self._merge) for _, (_, grid) in group]
            for (owner, _), own, own_levels in zip(group, rows.split(counts), levels.split(counts, 1), strict=True):
                embeddings[owner].append(own)
                layered[owner].append(own_levels)
        return [
            {"embeddings": torch.cat(rows), "layered": torch.cat(levels, 1)}
            for rows, levels in zip(embeddings, layered, strict=True)
        ]

    def rehearse(self) -> None:
        for side in REHEARSED_SIDES:
            patches, grid = image_patches(np.zeros((side, side, 3), np.uint8), self._spec, "rehearsal")
            self([{"pixels": patches, "grids": np.asarray([grid])}])

    @torch.inference_mode()
    def _encode(self, pictures: Sequence[tuple[Any, Sequence[int]]]) -> tuple[Tensor, Tensor]:
        """Rows [tokens, hidden] and [levels, tokens, hidden] of all pictures, in host memory."""
        patches = np.concatenate([patches for patches, _ in pictures])
        pixels = torch.from_numpy(np.ascontiguousarray(patches)).to(self._device)
        values = (pixels.float() * self._scale - self._mean) / self._std
        grids = torch.tensor([grid for _, grid in pictures], device=self._device)
        found = self._tower(values.to(self._dtype), grid_thw=grids)
        rows, levels = found.pooler_output, found.deepstack_features
        stacked = torch.stack(list(levels)) if len(levels) else rows.new_zeros(0, *rows.shape)
        return rows.cpu(), stacked.cpu()


class AudioEncoder:
    """``mels`` and ``mel_lengths`` of each payload to ``embeddings`` [tokens, hidden], up to ``max_frames`` a pass."""

    def __init__(
        self, tower: Any, device: str, dtype: torch.dtype, max_frames: int, *, whole_chunks: bool = False
    ) -> None:
        """``tower``: transformers' ``Qwen3OmniMoeAudioEncoder``. It fills recordings up to the longest chunk of a pass,
        which its convolutions notice; with ``whole_chunks`` always to a whole one, whatever runs beside."""
        self._tower = tower
        self._whole_chunks = whole_chunks
        self._device, self._dtype, self._max_frames = device, dtype, max_frames
        self._window = tower.config.n_window

    @classmethod
    def load(cls, folder: Path, device: str, dtype: torch.dtype, max_frames: int) -> AudioEncoder:
        from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeAudioEncoder

        config = whole_config(folder).thinker_config.audio_config
        tower = load_part(Qwen3OmniMoeAudioEncoder, config, folder, "thinker.audio_tower.", device, dtype)
        return cls(tower, device, dtype, max_frames)

    def __call__(self, payloads: list[Payload]) -> list[Payload]:
        items: list[Item] = []
        for owner, payload in enumerate(payloads):
            ends = np.cumsum(np.asarray(payload["mel_lengths"]))
            items += [(owner, mel) for mel in np.split(np.asarray(payload["mels"]), ends[:-1], axis=1)]
        embeddings: list[list[Tensor]] = [[] for _ in payloads]
        for group in within(items, lambda item: item[1].shape[1], self._max_frames):
            for (owner, _), rows in zip(group, self._encode([mel for _, mel in group]), strict=True):
                embeddings[owner].append(rows)
        return [{"embeddings": torch.cat(rows)} for rows in embeddings]

    def rehearse(self) -> None:
        bins = self._tower.config.num_mel_bins
        for seconds in SECONDS:
            frames = round(seconds * _MEL_RATE)
            self([{"mels": np.zeros((bins, frames), np.float32), "mel_lengths": [frames]}])

    @torch.inference_mode()
    def _encode(self, mels: Sequence[np.ndarray[Any, Any]]) -> list[Tensor]:
        """Rows [tokens, hidden] of each recording, in host memory."""
        count, chunk = len(mels), 2 * self._window
        if self._whole_chunks and all(mel.shape[1] < chunk for mel in mels):
            mels = [*mels, np.zeros((len(mels[0]), chunk), mels[0].dtype)]
        frames = torch.from_numpy(np.ascontiguousarray(np.concatenate(mels, 1))).to(self._device, self._dtype)
        lengths = torch.tensor([mel.shape[1] for mel in mels], device=self._device)
        rows = self._tower(frames, feature_lens=lengths).last_hidden_state
        return list(rows.cpu().split([audio_tokens(mel.shape[1], self._window) for mel in mels]))[:count]


def within(items: Sequence[Item], size: Callable[[Item], int], most: int) -> Iterator[list[Item]]:
    """The items in order, in groups of ``most`` in all; one that is larger is a group of its own."""
    group: list[Item] = []
    total = 0
    for item in items:
        if group and total + size(item) > most:
            yield group
            group, total = [], 0
        group.append(item)
        total += size(item)
    if group:
        yield group
