"""Files of pictures to pixels."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sgl_omni.errors import InvalidRequest

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile

MAX_PIXELS = 64 << 20
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """What the beginning of a file says. ``is_animated``: there are more frames than the one that is decoded."""

    width: int
    height: int
    is_animated: bool

    @property
    def pixels(self) -> int:
        return self.width * self.height


def image_facts(data: bytes | memoryview, *, param: str, max_pixels: int = MAX_PIXELS) -> ImageFacts:
    """Reads a file's header and no pixels. Raises ``InvalidRequest`` as ``decode_image`` does."""
    with _opened(data, param, max_pixels) as image:
        return ImageFacts(image.width, image.height, bool(getattr(image, "is_animated", False)))


def decode_image(data: bytes | memoryview, *, param: str, max_pixels: int = MAX_PIXELS) -> NDArray[np.uint8]:
    """A file to uint8 [height, width, 3], transparency on white, turned as its EXIF data says.

    Raises ``InvalidRequest`` that names ``param`` for a file that is no picture of ``FORMATS``, is broken, or has more
    than ``max_pixels``, which is known before they are decoded.
    """
    from PIL import Image, ImageOps

    with _opened(data, param, max_pixels) as image:
        turned = ImageOps.exif_transpose(image)
        if turned.mode in ("RGBA", "LA", "PA") or "transparency" in turned.info:
            white = Image.new("RGBA", turned.size, "white")
            turned = Image.alpha_composite(white, turned.convert("RGBA"))
        return np.asarray(turned.convert("RGB"))


@contextmanager
def _opened(data: bytes | memoryview, param: str, max_pixels: int) -> Iterator[ImageFile]:
    """The picture, not decoded yet. What goes wrong with it inside is the caller's mistake."""
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit below is ours
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                if image.width * image.height > max_pixels:
                    raise InvalidRequest(
                        f"the image has {image.width} x {image.height} pixels; the limit is {max_pixels}", param
                    )
                yield image
    except UnidentifiedImageError as error:
        raise InvalidRequest(f"the image is none of {', '.join(FORMATS)}", param) from error
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InvalidRequest(f"the image cannot be read: {error}", param) from error
