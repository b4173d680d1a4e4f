"""Transparency: models see white for what it hides, and a mask is transparent where the image changes."""

from __future__ import annotations

import io

import pytest
from PIL import Image

from kit.refusals import refused
from penstock.processors.engines.base import RunSpec
from penstock.processors.engines.image_messages import with_images
from penstock.processors.images.decoded import DecodedImage
from penstock.processors.images.files import encode
from penstock.processors.images.pictures import as_seen, mask_in_grey
from penstock.schemas.errors import InvalidRequest
from penstock.schemas.records import OutputSpec

SIZE = (4, 2)
HOLE = (2, 0, 4, 2)


def painted(mode: str, ground: object, hole: object) -> Image.Image:
    """The right half is `hole`."""
    image = Image.new(mode, SIZE, ground)  # pyright: ignore[reportArgumentType]
    image.paste(hole, HOLE)  # pyright: ignore[reportArgumentType]
    return image


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (painted("L", 0, 255), 255),
        (painted("RGB", "black", "white"), 255),
        (painted("RGBA", (0, 0, 0, 255), (0, 0, 0, 0)), 255),
        (painted("RGBA", (255, 255, 255, 255), (255, 255, 255, 0)), 255),
        (painted("RGBA", (9, 9, 9, 255), (0, 0, 0, 55)), 200),
    ],
)
def test_a_mask_changes_the_image_where_it_is_transparent_or_white(mask: Image.Image, expected: int) -> None:
    assert list(mask_in_grey(mask, Image.new("RGB", SIZE)).get_flattened_data()) == [0, 0, expected, expected] * 2


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (Image.new("L", (4, 3)), "payload.mask is 4 × 3 pixels and the image is 4 × 2: both must have one size"),
        (painted("RGBA", (0, 0, 0, 255), (255, 255, 255, 255)), "opaque everywhere"),
    ],
)
def test_a_mask_that_says_nothing_of_this_image_is_refused(mask: Image.Image, message: str) -> None:
    with refused(InvalidRequest, message, param="payload.mask"):
        mask_in_grey(mask, Image.new("RGB", SIZE))


def test_a_model_sees_transparent_pixels_white() -> None:
    hidden = DecodedImage(2, 1, "RGBA", b"\xff\0\0\0" + b"\xff\0\0\xff", "PNG", "0" * 64)
    spec = RunSpec(
        run_id="r", model="m", task="text_generation", payload={}, images={"messages[0].parts[0].image": hidden}
    )
    (message,) = with_images([{"role": "user", "content": "", "parts": [{"type": "image"}]}], spec, as_seen)
    seen = message["parts"][0]["image"]
    assert (seen.mode, list(seen.get_flattened_data())) == ("RGB", [(255, 255, 255), (255, 0, 0)])
    data, _ = encode(Image.new("RGBA", (8, 8), (255, 0, 0, 0)), OutputSpec(format="jpeg"), {})
    assert Image.open(io.BytesIO(data)).getpixel((4, 4)) == (255, 255, 255)
