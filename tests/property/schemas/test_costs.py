"""The cost of requests: it grows with everything that makes a run longer, and adds up."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from penstock.schemas.costs import (
    IMAGE_TOKENS,
    OPERATION_TOKENS,
    OUTPUT_TOKENS,
    PIXEL_STEPS_PER_TOKEN,
    UPSCALE_TOKENS,
    drawing_cost,
    estimated_cost,
)
from penstock.schemas.image_bodies import MAX_SIDE
from penstock.schemas.records import InferenceRequest
from penstock.schemas.requests import parse_request

SIDES = st.integers(1, MAX_SIDE)
DRAWINGS = st.fixed_dictionaries(
    {},
    optional={
        "width": SIDES | st.none(),
        "height": SIDES | st.none(),
        "inference_steps": st.integers(1, 1_000) | st.none(),
        "n": st.integers(1, 16) | st.none(),
        "strength": st.floats(0.01, 1) | st.none(),
    },
)
GROWING = {"width": MAX_SIDE, "height": MAX_SIDE, "inference_steps": 1_000, "n": 16}


@given(payload=DRAWINGS, name=st.sampled_from(sorted(GROWING)), data=st.data())
def test_more_never_costs_less(payload: dict[str, Any], name: str, data: st.DataObject) -> None:
    few = data.draw(st.integers(1, GROWING[name]))
    more = data.draw(st.integers(few, GROWING[name]))
    assert 1 <= drawing_cost({**payload, name: few}) <= drawing_cost({**payload, name: more})


@given(payload=DRAWINGS, n=st.integers(1, 16))
def test_so_many_images_cost_what_they_cost_alone(payload: dict[str, Any], n: int) -> None:
    """But for rounding up once in place of n times."""
    alone, together = drawing_cost({**payload, "n": 1}), drawing_cost({**payload, "n": n})
    assert n * (alone - 1) <= together <= n * alone


@given(width=SIDES, height=SIDES, steps=st.integers(1, 1_000))
def test_a_cost_is_pixels_times_steps(width: int, height: int, steps: int) -> None:
    found = drawing_cost({"width": width, "height": height, "inference_steps": steps})
    assert (found - 1) * PIXEL_STEPS_PER_TOKEN < width * height * (steps + 1) <= found * PIXEL_STEPS_PER_TOKEN


@given(payload=DRAWINGS, low=st.floats(0.01, 1), high=st.floats(0.01, 1))
def test_a_weaker_edit_runs_fewer_steps(payload: dict[str, Any], low: float, high: float) -> None:
    low, high = min(low, high), max(low, high)
    whole = drawing_cost({**payload, "strength": None})
    assert drawing_cost({**payload, "strength": low}) <= drawing_cost({**payload, "strength": high}) <= whole


def test_what_the_page_says() -> None:
    """Four large images in many steps weigh more than a thousand thumbnails."""
    assert 950 <= drawing_cost({}) <= 1_050
    large = drawing_cost({"width": 1024, "height": 1024, "inference_steps": 50, "n": 4})
    assert 26_000 <= large <= 28_000
    assert large > 1_000 * drawing_cost({"width": 128, "height": 128, "inference_steps": 4})


def request(task: str, **payload: Any) -> InferenceRequest:
    return parse_request({"task": task, "payload": payload}, now_ms=1)


def test_other_tasks() -> None:
    image = {"artifact_id": "a"}
    shown = [{"type": "text", "text": "four"}, {"type": "image", "image": image}, {"type": "image", "image": image}]
    chat = request("text_generation", messages=[{"role": "user", "content": shown}], max_tokens=9)
    assert estimated_cost(chat) == 1 + 9 + 2 * IMAGE_TOKENS
    assert estimated_cost(request("image_to_text", image=image, prompt="eight ch", max_tokens=5)) == 1_000 + 2 + 5
    operations = [{"op": "strip_metadata"}, {"op": "upscale", "factor": 4}]
    processing = request("image_processing", image=image, operations=operations)
    assert estimated_cost(processing) == IMAGE_TOKENS + OPERATION_TOKENS + UPSCALE_TOKENS
    assert estimated_cost(request("summarization", text="x" * 4_000)) == 1_000 + OUTPUT_TOKENS
    half = request("image_editing", image=image, prompt="p", strength=0.5, inference_steps=50)
    assert estimated_cost(half) == drawing_cost({"inference_steps": 25})
