"""Image operations: each makes the size that was planned for it; what cannot work is refused before; metadata."""

from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms

from kit.examples import examples
from penstock.processors.images.decoder import decode
from penstock.processors.images.operations import Picture, apply, encode
from penstock.processors.images.planning import plan
from penstock.schemas.errors import InvalidRequest, TooLarge, UnsupportedParameter
from penstock.schemas.image_operations import normal_operations

SIDES = st.integers(1, 40)
MODES = st.sampled_from(["L", "RGB", "RGBA"])
IMAGES = st.builds(lambda mode, size: Image.effect_noise(size, 90).convert(mode), MODES, st.tuples(SIDES, SIDES))

STEPS: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.fixed_dictionaries(
        {
            "op": st.just("resize"),
            "width": SIDES,
            "height": SIDES,
            "fit": st.sampled_from(["exact", "contain", "cover"]),
        }
    ),
    st.fixed_dictionaries({"op": st.just("resize"), "height": SIDES}),
    st.fixed_dictionaries({"op": st.just("thumbnail"), "width": SIDES, "height": SIDES}),
    st.fixed_dictionaries(
        {
            "op": st.just("rotate"),
            "degrees": st.floats(-360, 360) | st.sampled_from([0, 90, -90, 180, 270, 360, 45]),
            "expand": st.booleans(),
        }
    ),
    st.fixed_dictionaries({"op": st.just("flip"), "axis": st.sampled_from(["horizontal", "vertical"])}),
    st.fixed_dictionaries(
        {"op": st.just("convert"), "format": st.sampled_from(["jpeg", "webp"]), "quality": st.integers(1, 100)}
    ),
    st.just({"op": "convert", "format": "png"}),
    st.just({"op": "strip_metadata"}),
)


def run(image: Image.Image, *given_: dict[str, Any], further: tuple[Image.Image, ...] = (), **facts: Any) -> Picture:
    """All operations on an image, each held to its planned size."""
    places = (f"operations[{n}].image" for n, operation in enumerate(given_) if operation["op"] == "composite")
    images = {"image": image, **dict(zip(places, further, strict=True))}
    sizes = {place: one.size for place, one in images.items()}
    picture = Picture(image=image, **facts)
    for step in plan(normal_operations(given_), sizes, upscales=False):
        picture = apply(picture, step, images)
        assert picture.image.size == step.size
    return picture


def opened(picture: Picture) -> Image.Image:
    found = Image.open(io.BytesIO(encode(picture).data))
    found.load()
    return found


@given(IMAGES, st.lists(STEPS, min_size=1, max_size=5))
@settings(max_examples=examples(150))
def test_sizes_come_out_as_planned_and_every_picture_can_be_written(
    image: Image.Image, operations: list[dict[str, Any]]
) -> None:
    picture = run(image, *operations)
    encoded = encode(picture)
    found = Image.open(io.BytesIO(encoded.data))
    assert (encoded.width, encoded.height) == found.size == picture.image.size
    assert encoded.media_type == f"image/{picture.format}" == Image.MIME[found.format or ""]


@given(st.tuples(SIDES, SIDES), SIDES, SIDES)
def test_fits(size: tuple[int, int], width: int, height: int) -> None:
    def sized(fit: str) -> tuple[int, int]:
        return run(Image.new("L", size), {"op": "resize", "width": width, "height": height, "fit": fit}).image.size

    assert sized("exact") == sized("cover") == (width, height)
    contained = sized("contain")
    assert contained[0] <= width
    assert contained[1] <= height
    assert contained[0] == width or contained[1] == height
    # In proportion, as far as whole pixels allow.
    assert abs(contained[0] * size[1] - contained[1] * size[0]) <= max(*size, *contained)
    thumbnail = run(Image.new("L", size), {"op": "thumbnail", "width": width, "height": height}).image.size
    assert thumbnail == (size if size[0] <= width and size[1] <= height else contained)


@given(st.tuples(SIDES, SIDES), st.integers(0, 50), st.integers(0, 50), st.integers(1, 50), st.integers(1, 50))
def test_a_crop_gives_its_pixels_or_is_refused(
    size: tuple[int, int], left: int, top: int, width: int, height: int
) -> None:
    image = Image.effect_noise(size, 90)
    crop = {"op": "crop", "left": left, "top": top, "width": width, "height": height}
    if left + width <= size[0] and top + height <= size[1]:
        found = run(image, crop).image
        assert found.size == (width, height)
        assert found.getpixel((width - 1, height - 1)) == image.getpixel((left + width - 1, top + height - 1))
        return
    with pytest.raises(InvalidRequest) as caught:
        run(image, {"op": "strip_metadata"}, crop)
    across = "left" if left >= size[0] else "width" if left + width > size[0] else None
    down = "top" if top >= size[1] else "height"
    assert caught.value.param == f"payload.operations[1].{across or down}"


def quarters() -> Image.Image:
    """Red, green over blue, white."""
    image = Image.new("RGB", (40, 40), "white")
    for colour, place in (("red", (0, 0)), ("lime", (20, 0)), ("blue", (0, 20))):
        image.paste(colour, (*place, place[0] + 20, place[1] + 20))
    return image


def corner(picture: Picture) -> Any:
    return picture.image.convert("RGB").getpixel((3, 3))


def test_directions() -> None:
    red, lime, blue = (255, 0, 0), (0, 255, 0), (0, 0, 255)
    assert corner(run(quarters(), {"op": "rotate", "degrees": 90})) == blue  # clockwise: what was left is on top
    assert corner(run(quarters(), {"op": "rotate", "degrees": -90})) == lime
    assert corner(run(quarters(), {"op": "rotate", "degrees": 360})) == red
    assert corner(run(quarters(), {"op": "flip", "axis": "horizontal"})) == lime
    assert corner(run(quarters(), {"op": "flip", "axis": "vertical"})) == blue
    # A third of a turn: corners that were never there are transparent, and white without alpha.
    turned = run(quarters(), {"op": "rotate", "degrees": 30})
    assert turned.image.getpixel((0, 0))[3] == 0  # type: ignore[index]
    flat = opened(run(quarters(), {"op": "rotate", "degrees": 30}, {"op": "convert", "format": "jpeg"}))
    assert min(flat.getpixel((0, 0))) > 240  # type: ignore[type-var]


def test_composite() -> None:
    ground, layer = Image.new("RGB", (10, 10), "black"), Image.new("RGB", (10, 10), "white")

    def put(**values: Any) -> Image.Image:
        return run(ground, {"op": "composite", "image": {"url": "x"}, **values}, further=(layer,)).image

    whole = put()
    assert whole.mode == "RGB"
    assert whole.getpixel((9, 9)) == (255, 255, 255)
    cut = put(left=-5, top=8)
    assert cut.getpixel((4, 9)) == (255, 255, 255)
    assert cut.getpixel((5, 9)) == (0, 0, 0)
    assert put(opacity=0.5).getpixel((0, 0)) == pytest.approx((128, 128, 128), abs=1)
    assert put(opacity=0).getpixel((0, 0)) == (0, 0, 0)
    for values, field in (({"left": 10}, "left"), ({"left": -10}, "left"), ({"top": -10}, "top")):
        with pytest.raises(InvalidRequest) as caught:
            put(**values)
        assert caught.value.param == f"payload.operations[0].{field}"
    # Each composition takes the next image.
    second = Image.new("RGB", (2, 2), "red")
    both = run(ground, *[{"op": "composite", "image": {"url": "x"}}] * 2, further=(layer, second)).image
    assert both.getpixel((0, 0)) == (255, 0, 0)
    assert both.getpixel((5, 5)) == (255, 255, 255)


def test_too_large_and_no_model() -> None:
    with pytest.raises(TooLarge) as caught:
        plan(
            normal_operations([{"op": "resize", "width": 16_000, "height": 16_000}]),
            {"image": (10, 10)},
            upscales=False,
        )
    assert caught.value.param == "payload.operations[0]"
    with pytest.raises(UnsupportedParameter) as refused:
        plan(normal_operations([{"op": "strip_metadata"}, {"op": "upscale"}]), {"image": (10, 10)}, upscales=False)
    assert refused.value.param == "payload.operations[1].op"
    (step,) = plan(normal_operations([{"op": "upscale"}]), {"image": (10, 10)}, upscales=True)
    assert step.size == (40, 40)


@pytest.mark.parametrize("name", ["png", "jpeg", "webp"])
@pytest.mark.parametrize("strip", [False, True])
def test_what_an_image_came_with_is_applied_and_goes_no_further(name: str, *, strip: bool) -> None:
    """Its orientation and its colours are those of the pixels; a place or a camera is in no file that is made."""
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    exif[0x010E] = "where we live"
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    sent = io.BytesIO()
    Image.new("RGB", (30, 20), "red").save(sent, "jpeg", exif=exif.tobytes(), icc_profile=profile)
    came = decode(sent.getvalue(), "JPEG", 10_000, 1_000)
    assert came.size == (20, 30)
    image = Image.frombytes(came.mode, came.size, came.tobytes())  # as it crosses to the worker
    operations = [{"op": "convert", "format": name}, *([{"op": "strip_metadata"}] if strip else [])]
    made = opened(run(image, *operations))
    assert made.size == (20, 30)
    assert not made.getexif()
    assert not {"exif", "icc_profile", "xmp", "comment"} & set(made.info)
    assert corner(Picture(image=made)) == pytest.approx((254, 0, 0), abs=12)
