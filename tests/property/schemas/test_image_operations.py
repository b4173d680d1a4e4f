"""Operations of image_processing: two forms, one normal form; what is wrong is refused with its number and field."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.schemas.errors import InvalidRequest, PenstockError, TooLarge, UnsupportedParameter
from penstock.schemas.image_operations import (
    MAX_OPERATIONS,
    MAX_SIDE,
    OPERATIONS,
    normal_operations,
    typed,
    wants_model,
)

SIDES = st.integers(1, MAX_SIDE)
PLACES = st.integers(-MAX_SIDE, MAX_SIDE)
IMAGE = {"artifact_id": "a"}

FLAT: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.fixed_dictionaries(
        {"op": st.just("resize"), "width": SIDES, "height": SIDES},
        optional={"fit": st.sampled_from(["exact", "contain", "cover"])},
    ),
    st.fixed_dictionaries({"op": st.just("resize"), "width": SIDES}),
    st.fixed_dictionaries(
        {"op": st.just("crop"), "width": SIDES, "height": SIDES},
        optional={"left": st.integers(0, MAX_SIDE), "top": st.integers(0, MAX_SIDE)},
    ),
    st.fixed_dictionaries(
        {"op": st.just("rotate"), "degrees": st.floats(-360, 360) | st.integers(-360, 360)},
        optional={"expand": st.booleans()},
    ),
    st.fixed_dictionaries({"op": st.just("flip"), "axis": st.sampled_from(["horizontal", "vertical", "Vertical"])}),
    st.fixed_dictionaries({"op": st.just("convert"), "format": st.sampled_from(["png", "jpg", "JPEG", "webp"])}),
    st.fixed_dictionaries({"op": st.just("convert"), "format": st.just("webp"), "quality": st.integers(1, 100)}),
    st.fixed_dictionaries({"op": st.just("thumbnail"), "width": SIDES, "height": SIDES}),
    st.fixed_dictionaries(
        {"op": st.just("composite"), "image": st.just(IMAGE)},
        optional={"left": PLACES, "top": PLACES, "opacity": st.floats(0, 1)},
    ),
    st.just({"op": "strip_metadata"}),
    st.fixed_dictionaries({"op": st.just("upscale")}, optional={"factor": st.sampled_from([2, 4, "2", "4"])}),
)


def as_texts(flat: dict[str, Any]) -> dict[str, Any]:
    """The same as the Avro record has it."""
    arguments = {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in flat.items()
        if name not in ("op", "image")
    }
    return {"op": flat["op"], "arguments": arguments, "image": flat.get("image")}


@given(st.lists(FLAT, min_size=1, max_size=MAX_OPERATIONS))
def test_both_forms_become_one_that_is_its_own_normal_form(flat: list[dict[str, Any]]) -> None:
    normal = normal_operations(flat)
    assert normal == normal_operations([as_texts(operation) for operation in flat]) == normal_operations(normal)
    for given_, found in zip(flat, normal, strict=True):
        assert all(isinstance(value, str) for value in found["arguments"].values())
        assert typed(found) == typed(given_)
        for name in given_.keys() & {"width", "height", "left", "top", "quality", "degrees", "opacity", "expand"}:
            assert typed(found)[name] == given_[name]


@given(
    st.dictionaries(
        st.sampled_from(["op", "width", "height", "left", "degrees", "image", "arguments", "factor", "unknown"]),
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text(max_size=8)
        | st.sampled_from(sorted(OPERATIONS))
        | st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2),
    )
)
def test_anything_is_either_read_or_refused_with_its_place(operation: dict[str, Any]) -> None:
    refused: PenstockError | None = None
    try:
        normal_operations([{"op": "strip_metadata"}, operation])
    except PenstockError as error:
        refused = error
    if refused is not None:
        assert (refused.param or "").startswith("payload.operations[1]")
        assert refused.message


@pytest.mark.parametrize(
    ("operation", "kind", "field"),
    [
        ({"op": "resize", "width": 0, "height": 3}, InvalidRequest, "width"),
        ({"op": "resize", "width": "ten"}, InvalidRequest, "width"),
        ({"op": "resize", "arguments": {"width": "1_0"}}, InvalidRequest, "width"),
        ({"op": "resize", "width": True}, InvalidRequest, "width"),
        ({"op": "resize", "width": 5.5}, InvalidRequest, "width"),
        ({"op": "resize", "width": MAX_SIDE + 1}, InvalidRequest, "width"),
        ({"op": "resize"}, InvalidRequest, "width"),
        ({"op": "resize", "width": 5, "fit": "cover"}, InvalidRequest, "height"),
        ({"op": "resize", "width": 5, "height": 5, "fit": "stretch"}, InvalidRequest, "fit"),
        ({"op": "resize", "width": 5, "arguments": {"width": "6"}}, InvalidRequest, "width"),
        ({"op": "crop", "width": 5}, InvalidRequest, "height"),
        ({"op": "crop", "width": 5, "height": 5, "left": -1}, InvalidRequest, "left"),
        ({"op": "rotate", "degrees": "nan"}, InvalidRequest, "degrees"),
        ({"op": "rotate", "degrees": 361}, InvalidRequest, "degrees"),
        ({"op": "rotate", "degrees": 1, "expand": "yes"}, InvalidRequest, "expand"),
        ({"op": "flip", "axis": "diagonal"}, InvalidRequest, "axis"),
        ({"op": "convert", "format": "gif"}, InvalidRequest, "format"),
        ({"op": "convert", "format": "png", "quality": 50}, UnsupportedParameter, "quality"),
        ({"op": "composite"}, InvalidRequest, "image"),
        ({"op": "flip", "axis": "vertical", "image": IMAGE}, UnsupportedParameter, "image"),
        ({"op": "upscale", "factor": 3}, InvalidRequest, "factor"),
        ({"op": "upscale", "strength": 3}, UnsupportedParameter, "strength"),
        ({"op": "sharpen"}, InvalidRequest, "op"),
        ({"op": None}, InvalidRequest, "op"),
        ({"op": "crop", "arguments": "width=5"}, InvalidRequest, "arguments"),
    ],
)
def test_what_is_wrong_is_named(operation: dict[str, Any], kind: type[PenstockError], field: str) -> None:
    fine = {"op": "flip", "axis": "vertical"}
    with pytest.raises(kind) as caught:
        normal_operations([fine, fine, operation])
    assert type(caught.value) is kind
    assert caught.value.param == f"payload.operations[2].{field}"
    assert str(caught.value.param) in caught.value.message


def test_how_many() -> None:
    with pytest.raises(InvalidRequest):
        normal_operations([])
    with pytest.raises(TooLarge):
        normal_operations([{"op": "strip_metadata"}] * (MAX_OPERATIONS + 1))
    with pytest.raises(InvalidRequest) as caught:
        normal_operations(["flip"])
    assert caught.value.param == "payload.operations[0]"
    assert wants_model(normal_operations([{"op": "strip_metadata"}, {"op": "upscale"}])) == 1
    assert wants_model(normal_operations([{"op": "strip_metadata"}])) is None
