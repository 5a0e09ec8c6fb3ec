"""Keys and values of causal codecs: rotated, and put where this piece and those after it look for them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_omni.engine.kernels.elementwise import need_contiguous


@triton.jit
def _rotate_and_keep(
    qkv,
    rotation,
    writes,
    known,
    kept,
    steps,
    known_steps,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    kind = tl.program_id(1)  # q, k or v
    at = tl.arange(0, 2 * BLOCK)
    inside = at < WIDTH
    source = qkv + (row * 3 + kind) * WIDTH + at
    value = tl.load(source, mask=inside, other=0.0)
    if kind < 2:
        a, b = tl.split(tl.reshape(value.to(tl.float32), [BLOCK, 2]))
        turn = tl.load(rotation + row * 2 * HALF + at % (2 * HALF))
        c, s = tl.split(tl.reshape(turn, [BLOCK, 2]))
        value = tl.reshape(tl.join(a * c - b * s, a * s + b * c), [2 * BLOCK]).to(value.dtype)
    if kind == 0:
        tl.store(source, value, mask=inside)
    else:
        place = (row // steps) * known_steps + known_steps - steps + row % steps
        target = (kind - 1) * WIDTH + at
        tl.store(known + place * 2 * WIDTH + target, value, mask=inside)
        tl.store(kept + tl.load(writes + row) * 2 * WIDTH + target, value, mask=inside)


def rotate_and_keep(qkv: Tensor, rotation: Tensor, writes: Tensor, known: Tensor, kept: Tensor) -> None:
    """Rotates q in place, and writes the rotated k and v to the ends of ``known`` and to the places ``writes``.

    qkv [batch, steps, 3 * heads, head_dim], ``rotation`` complex64 [batch, steps, head_dim / 2] of neighbouring pairs,
    ``writes`` int64 [batch * steps], known [batch, at least steps, 2 * heads, head_dim], kept [places, 2 * heads *
    head_dim]. Of several that are written to one place, any may stay there.
    """
    need_contiguous(qkv=qkv, rotation=rotation, writes=writes, known=known, kept=kept)
    batch, steps, heads, head_dim = qkv.shape
    width = heads // 3 * head_dim
    _rotate_and_keep[(batch * steps, 3)](
        qkv,
        torch.view_as_real(rotation),
        writes,
        known,
        kept,
        steps,
        known.shape[1],
        width,
        head_dim // 2,
        triton.next_power_of_2(width // 2),
        num_warps=4,
    )
