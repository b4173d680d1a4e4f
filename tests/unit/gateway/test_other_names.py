"""Bodies of POST /v1/requests under the names of other services."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from hostile_images import picture
from penstock.gateway.limits.callers import Caller
from penstock.gateway.routes.native import submission
from penstock.schemas.errors import PenstockError

EDIT = {"type": "image2image", "prompt": "snow", "parameters": {"steps": 4}}
DATA = f"data:image/png;base64,{base64.b64encode(picture(Random(1))).decode()}"
MESSAGE = json.loads((Path(__file__).parents[2] / "messages" / "image_editing_000.json").read_bytes())


@pytest.mark.parametrize("name", ["image", "inputImage", "input_image", "image_url"])
@pytest.mark.parametrize("wrap", [lambda body: body, lambda body: {"payload": body}], ids=["plain", "wrapped"])
def test_an_image_that_came_as_text_is_kept(name: str, wrap: Any) -> None:
    request, (image,), _ = submission(wrap({**EDIT, name: DATA}), Caller(tenant="acme"))
    assert request.payload["image"] == {"artifact_id": image.artifact_id}
    assert (request.task, request.payload["inference_steps"]) == ("image_editing", 4)


def test_a_message_of_another_service() -> None:
    request, images, given = submission(MESSAGE, Caller(tenant="acme"))
    assert (request.tenant, request.priority, request.conversation_id, images) == ("acme", 10, "789", [])
    assert request.payload["image"] == {"url": MESSAGE["payload"]["image"]}
    assert given["model"] == "payload.model"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"taskId": "t"}, "taskId"),
        ({"id": 5}, "id"),
        ({"payload": {"tenant": "other"}}, "payload.tenant"),
        ({"deadline": "9999999999"}, "deadline"),
        ({"inputImage": "data:image/png;base64,x"}, "inputImage"),
        ({"parameters": {"steps": 0}}, "parameters.steps"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_what_is_refused_is_named_as_the_body_has_it(change: dict[str, Any], param: str) -> None:
    with pytest.raises(PenstockError) as caught:
        submission({**EDIT, **change}, Caller(tenant="acme"))
    assert caught.value.param == param
    assert param in caught.value.message
