"""Rotary position embeddings, along one axis or several."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sgl_omni.errors import StartupError


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """``sections``: pairs of each axis (time, height, width), empty for one axis; ``interleaved``: how they mix.

    ``factor`` above 1 stretches positions: all alike (``linear``), or (``llama3``) only the slow pairs, those that
    turn less than ``low`` times within ``original_positions``, passing over gradually up to ``high`` times.
    """

    theta: float
    scaling: str = "default"
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original_positions: int = 0
    sections: tuple[int, ...] = ()
    interleaved: bool = False

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> RopeConfig:
        """Reads ``rope_parameters``, or ``rope_theta`` and ``rope_scaling`` of older files."""
        values = config.get("rope_parameters") or config.get("rope_scaling") or {}
        scaling = values.get("rope_type", values.get("type", "default"))
        rope = cls(
            theta=float(values.get("rope_theta", config.get("rope_theta", 10000.0))),
            sections=tuple(values.get("mrope_section", ())),
            interleaved=bool(values.get("mrope_interleaved", values.get("interleaved", False))),
        )
        if float(values.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))) != 1.0:
            raise StartupError("rotary embeddings of a part of each head are not supported")
        if scaling in ("default", "mrope"):
            return rope
        if scaling == "linear":
            return replace(rope, scaling=scaling, factor=float(values["factor"]))
        if scaling == "llama3":
            return replace(
                rope,
                scaling=scaling,
                factor=float(values["factor"]),
                low=float(values["low_freq_factor"]),
                high=float(values["high_freq_factor"]),
                original_positions=int(values["original_max_position_embeddings"]),
            )
        raise StartupError(f"rope type {scaling!r} is not supported; use default, linear, llama3 or mrope")

    @property
    def num_axes(self) -> int:
        return len(self.sections) or 1

    def frequencies(self, head_dim: int) -> Tensor:
        """Radians a position, one a pair: float32 [head_dim / 2]."""
        plain = 1.0 / self.theta ** (torch.arange(0, head_dim, 2, device="cpu", dtype=torch.float32) / head_dim)
        if self.scaling == "default":
            return plain
        if self.scaling == "linear":
            return plain / self.factor
        turns = self.original_positions * plain / (2 * math.pi)
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return kept * plain + (1 - kept) * plain / self.factor

    def axes(self, head_dim: int) -> Tensor:
        """Which axis turns each pair: int64 [head_dim / 2]."""
        pairs = head_dim // 2
        if not self.sections:
            return torch.zeros(pairs, dtype=torch.int64, device="cpu")
        if sum(self.sections) != pairs:
            raise StartupError(f"rope sections {[*self.sections]} do not sum to the {pairs} pairs of a head")
        if not self.interleaved:
            return torch.arange(len(self.sections), device="cpu").repeat_interleave(
                torch.tensor(self.sections, device="cpu")
            )
        axes = torch.zeros(pairs, dtype=torch.int64, device="cpu")
        for axis, count in enumerate(self.sections[1:], 1):
            axes[axis : count * len(self.sections) : len(self.sections)] = axis
        return axes


class Rope:
    """Cosines and sines of the positions asked for."""

    def __init__(self, config: RopeConfig, head_dim: int, device: torch.device | str) -> None:
        self.num_axes = config.num_axes
        self._frequencies = config.frequencies(head_dim).to(device)
        self._axes = config.axes(head_dim).to(device)

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions int64 [axes, n] -> cosine and sine, each [n, 1, head_dim / 2]."""
        by_pair = positions[self._axes].T if self.num_axes > 1 else positions[0, :, None]
        angles = (by_pair.float() * self._frequencies).unsqueeze(1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """x [n, heads, head_dim]: element i of a head and element i + head_dim / 2 are a pair."""
    cosine, sine = rotation
    first, second = x.chunk(2, -1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)
