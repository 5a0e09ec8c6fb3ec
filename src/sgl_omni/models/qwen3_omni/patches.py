"""Pictures and frames to the patches that the vision encoder takes. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from sgl_omni.errors import InvalidRequest
from sgl_omni.models.qwen3_omni.prompt_spec import Pixels, VisionSpec

Pixels8 = NDArray[np.uint8]
Grid = tuple[int, ...]
"""Groups of frames, rows and columns of patches."""

_LONGEST_RATIO = 200


def fitting_size(height: int, width: int, factor: int, pixels: Pixels, param: str) -> tuple[int, int]:
    """Height and width that are multiples of ``factor``, of about the same ratio, within ``pixels``.

    Raises ``InvalidRequest`` for a picture that is longer than 200 times its other side.
    """
    if max(height, width) > _LONGEST_RATIO * min(height, width):
        raise InvalidRequest(
            f"a picture of {width} x {height} pixels is longer than {_LONGEST_RATIO} times its other side", param
        )
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if rows * columns > pixels.most:
        shrink = math.sqrt(height * width / pixels.most)
        rows = max(factor, math.floor(height / shrink / factor) * factor)
        columns = max(factor, math.floor(width / shrink / factor) * factor)
    elif rows * columns < pixels.least:
        grow = math.sqrt(pixels.least / (height * width))
        rows, columns = (math.ceil(side * grow / factor) * factor for side in (height, width))
    return rows, columns


def image_patches(image: Pixels8, spec: VisionSpec, param: str) -> tuple[Pixels8, Grid]:
    """A picture [height, width, 3] -> patches uint8 [n, 3 * frames * patch * patch] and the grid (1, rows, columns)."""
    return _patches([image], spec, spec.images, param)


def video_patches(frames: Iterable[Pixels8], spec: VisionSpec, param: str) -> tuple[Pixels8, Grid]:
    """Frames [height, width, 3] of one size -> patches, and the grid (frame groups, rows, columns).

    Each frame is made small before the next is taken. The last is repeated where they do not fill their last group.
    Raises ``InvalidRequest`` where their sizes differ.
    """
    return _patches(frames, spec, spec.videos, param)


def _patches(frames: Iterable[Pixels8], spec: VisionSpec, pixels: Pixels, param: str) -> tuple[Pixels8, Grid]:
    resized: list[Pixels8] = []
    shape: tuple[int, ...] = ()
    rows = columns = 0
    for frame in frames:
        if not resized:
            shape = frame.shape
            rows, columns = fitting_size(shape[0], shape[1], spec.patch * spec.merge, pixels, param)
        if frame.shape != shape:
            raise InvalidRequest("the frames of a video must be of one size", param)
        resized.append(_resized(frame, rows, columns))
    resized += [resized[-1]] * (-len(resized) % spec.frames)
    groups, down, across = len(resized) // spec.frames, rows // spec.patch, columns // spec.patch
    blocks = np.stack(resized).reshape(
        groups,
        spec.frames,
        down // spec.merge,
        spec.merge,
        spec.patch,
        across // spec.merge,
        spec.merge,
        spec.patch,
        3,
    )
    ordered = blocks.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)  # patches that become one token are neighbours
    return ordered.reshape(groups * down * across, -1), (groups, down, across)


def _resized(image: Pixels8, rows: int, columns: int) -> Pixels8:
    from PIL import Image

    if image.shape[:2] == (rows, columns):
        return image
    return np.asarray(Image.fromarray(image).resize((columns, rows), Image.Resampling.BICUBIC))
