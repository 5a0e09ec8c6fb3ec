"""Rotary position embeddings, along one axis or several."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sgl_omni.engine.rope_config import RopeConfig
from sgl_omni.errors import StartupError


class Rope:
    """Cosines and sines of the positions asked for."""

    def __init__(self, config: RopeConfig, head_dim: int, device: torch.device | str) -> None:
        self.num_axes = config.num_axes
        self._frequencies = frequencies(config, head_dim).to(device)
        self._axes = axes(config, head_dim).to(device)
        self._tables: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}
        self._amplitude = config.amplitude

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions int64 [axes, n] -> cosine and sine, each [n, 1, head_dim / 2] and contiguous, as kernels need."""
        by_pair = positions[self._axes].T.contiguous() if self.num_axes > 1 else positions[0, :, None]
        angles = (by_pair.float() * self._frequencies).unsqueeze(1)
        cosines, sines = angles.cos(), angles.sin()
        if self._amplitude != 1:
            cosines, sines = cosines * self._amplitude, sines * self._amplitude
        return cosines.to(dtype), sines.to(dtype)

    def table(self, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The same of positions 0 to ``length`` along all axes, made once."""
        found = self._tables.get((length, dtype))
        if found is None:
            positions = torch.arange(length, device=self._frequencies.device)
            found = self._tables[length, dtype] = self(positions.expand(self.num_axes, -1), dtype)
        return found


def frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians a position, one a pair: float32 [head_dim / 2]."""
    powers = rope.theta ** (torch.arange(0, head_dim, 2, device="cpu", dtype=torch.float32) / head_dim)
    plain = 1.0 / powers
    if rope.scaling == "default":
        return plain
    if rope.scaling == "linear":
        return plain / rope.factor
    if rope.scaling == "yarn":
        kept = 1 - _passage(rope, head_dim)
        return 1.0 / (rope.factor * powers) * (1 - kept) + plain * kept
    turns = rope.original_positions * plain / (2 * math.pi)
    kept = ((turns - rope.low) / (rope.high - rope.low)).clamp(0, 1)
    return kept * plain + (1 - kept) * plain / rope.factor


def _passage(rope: RopeConfig, head_dim: int) -> Tensor:
    """How far each pair is stretched by ``yarn``: 0, gradually, 1; float32 [head_dim / 2]."""

    def pair(turns: float) -> float:
        """Which pair turns so often within the original positions."""
        return head_dim * math.log(rope.original_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = pair(rope.high), pair(rope.low)
    if rope.whole_pairs:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001
    pairs = torch.arange(head_dim // 2, device="cpu", dtype=torch.float32)
    return ((pairs - first) / (last - first)).clamp(0, 1)


def axes(rope: RopeConfig, head_dim: int) -> Tensor:
    """Which axis turns each pair: int64 [head_dim / 2]."""
    pairs = head_dim // 2
    if not rope.sections:
        return torch.zeros(pairs, dtype=torch.int64, device="cpu")
    if sum(rope.sections) != pairs:
        raise StartupError(f"rope sections {[*rope.sections]} do not sum to the {pairs} pairs of a head")
    if not rope.interleaved:
        return torch.arange(len(rope.sections), device="cpu").repeat_interleave(
            torch.tensor(rope.sections, device="cpu")
        )
    found = torch.zeros(pairs, dtype=torch.int64, device="cpu")
    for axis, count in enumerate(rope.sections[1:], 1):
        found[axis : count * len(rope.sections) : len(rope.sections)] = axis
    return found


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """x [n, heads, head_dim]: element i of a head and element i + head_dim / 2 are a pair."""
    cosine, sine = rotation
    first, second = x.chunk(2, -1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)
