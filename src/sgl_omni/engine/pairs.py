"""Rotary positions in which neighbouring elements of a head are a pair."""

from __future__ import annotations

import torch
from torch import Tensor


def rotation_of(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine, float32 [..., n, head_dim / 2], of positions [..., n]."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions.float()[..., None] * theta**-exponents
    return angles.cos(), angles.sin()


def rotate_pairs(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """x [..., n, heads, head_dim], turned by the rotation of each of the n positions, in float32."""
    cosine, sine = (part.unsqueeze(-2) for part in rotation)
    first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([first * cosine - second * sine, first * sine + second * cosine], -1)
    return turned.flatten(-2).to(x.dtype)
