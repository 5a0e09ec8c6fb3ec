"""Rotary positions in which neighbouring elements of a head are a pair."""

from __future__ import annotations

import torch
from torch import Tensor


def rotation_of(positions: Tensor, head_dim: int, theta: float) -> Tensor:
    """complex64 [..., n, head_dim / 2] of the unit circle, of positions [..., n]."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions.float()[..., None] * theta**-exponents
    return torch.complex(angles.cos(), angles.sin())


def rotate_pairs(x: Tensor, rotation: Tensor) -> Tensor:
    """x [..., n, heads, head_dim], turned by the rotation of each of the n positions, in float32."""
    return _turned(x, rotation).to(x.dtype)


def rotate_pairs_in_place(x: Tensor, rotation: Tensor) -> None:
    """The same where x lies, which may be between others."""
    x.copy_(_turned(x, rotation))


def _turned(x: Tensor, rotation: Tensor) -> Tensor:
    """One product of complex numbers: on a GPU each operation is a launch."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation.unsqueeze(-2)).flatten(-2)
