"""Files of pictures to pixels."""

from __future__ import annotations

import io
import warnings

import numpy as np
from numpy.typing import NDArray

from sgl_omni.errors import InvalidRequest

MAX_PIXELS = 64 << 20
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


def decode_image(data: bytes | memoryview, *, param: str, max_pixels: int = MAX_PIXELS) -> NDArray[np.uint8]:
    """A file to uint8 [height, width, 3], transparency on white, turned as its EXIF data says.

    Raises ``InvalidRequest`` that names ``param`` for a file that is no picture of ``FORMATS``, is broken, or has more
    than ``max_pixels``, which is known before they are decoded.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit below is ours
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                if image.width * image.height > max_pixels:
                    raise InvalidRequest(
                        f"the image has {image.width} x {image.height} pixels; the limit is {max_pixels}", param
                    )
                turned = ImageOps.exif_transpose(image)
                if turned.mode in ("RGBA", "LA", "PA") or "transparency" in turned.info:
                    white = Image.new("RGBA", turned.size, "white")
                    turned = Image.alpha_composite(white, turned.convert("RGBA"))
                return np.asarray(turned.convert("RGB"))
    except UnidentifiedImageError as error:
        raise InvalidRequest(f"the image is none of {', '.join(FORMATS)}", param) from error
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InvalidRequest(f"the image cannot be read: {error}", param) from error
