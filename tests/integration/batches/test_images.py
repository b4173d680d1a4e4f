"""Images that a batch draws: their bytes in the file of answers, or where they lie."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from PIL import Image

from kit.batches import Batches, line
from system import System

pytestmark = [pytest.mark.slow, pytest.mark.model]

URL = "/v1/images/generations"
SMALL = {"model": "painter", "prompt": "a cat", "size": "32x32", "penstock": {"inference_steps": 2}}


def test_a_batch_draws(make_system: Callable[..., System]) -> None:
    folder = pytest.importorskip("penstock.cli.assets").prepare_model("tiny-image-generation", print)
    painter = {"id": "painter", "source": str(folder), "engine": "diffusers", "tasks": ["image_generation"]}
    system = make_system(models=[painter])
    system.worker().wait_ready()
    gateway = system.gateway().wait_ready()
    batches = Batches.at(gateway)
    bodies: list[dict[str, Any]] = [
        {**SMALL, "response_format": "b64_json", "n": 2},
        {**SMALL, "response_format": "url"},
        {**SMALL, "size": "none"},
    ]
    ended = batches.wait(batches.begin([line(n, URL, **body) for n, body in enumerate(bodies)], URL), 240)
    counts = ended.request_counts
    assert (ended.status, counts.completed, counts.failed) == ("completed", 2, 1), ended
    answers = {one["custom_id"]: one["response"]["body"]["data"] for one in batches.lines(ended.output_file_id)}
    drawn = [base64.b64decode(one["b64_json"]) for one in answers["line-0"]]
    drawn += [httpx.get(one["url"], timeout=30).raise_for_status().content for one in answers["line-1"]]
    assert [Image.open(io.BytesIO(content)).size for content in drawn] == [(32, 32)] * 3
    (error,) = batches.lines(ended.error_file_id)
    assert (error["custom_id"], error["response"]["status_code"]) == ("line-2", 400)
    assert error["response"]["body"]["error"]["param"] == "size"
