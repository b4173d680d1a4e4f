"""Images and large texts that a caller brings along with a request: kept as artifacts of its tenant, to which the
request then refers.

In the body an image is `{data, media_type}` with its bytes in base64, `{file}` with the name of a part of a multipart
body, or in a chat OpenAI's `image_url` with a `data:` URL. Records carry references alone.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

from penstock.common.artifacts import ArtifactStore
from penstock.common.artifacts.inputs import keep_input
from penstock.gateway.limits.allowances import Allowances
from penstock.gateway.limits.callers import Caller
from penstock.gateway.service.reached_artifacts import check_references
from penstock.gateway.service.service import GatewayService
from penstock.gateway.service.submitting import Checked, Keep
from penstock.schemas.errors import InvalidRequest, TooLarge, UnsupportedParameter
from penstock.schemas.ids import input_artifact_id
from penstock.schemas.image_formats import MEDIA_TYPES, sniff
from penstock.schemas.image_payloads import image_references
from penstock.schemas.large_inputs import MEDIA_TYPE as TEXT_MEDIA_TYPE
from penstock.schemas.large_inputs import take_text
from penstock.schemas.message_parts import DETAILS
from penstock.schemas.records import InferenceRequest

MAX_IMAGES = 64
"""So many images may come with one request."""

_WRITERS = 8
Json = dict[str, Any]
Slot = tuple[Json, str, str]
"""Where an image stands: an object, the name in it, and how a caller writes that place."""


@dataclass(frozen=True, slots=True)
class BroughtInput:
    """Bytes that become an artifact. The id follows from tenant and bytes: a repeat is the same request."""

    artifact_id: str
    media_type: str
    data: bytes = field(repr=False)


class BroughtImage(BroughtInput):
    """An image."""

    __slots__ = ()


def take_images(body: Any, tenant: str, files: Mapping[str, bytes] | None = None) -> list[BroughtImage]:
    """Take the images out of a request's JSON form, and leave references to the artifacts that they will be.

    `files` are the parts of a multipart body by name. The body is changed; whatever else is wrong with it is left to
    the checks that follow. Raises InvalidRequest, UnsupportedParameter, TooLarge, each with the field in `param`.
    """
    brought: dict[str, BroughtImage] = {}
    named: set[str] = set()
    for holder, name, param in _slots(body):
        value = holder[name]
        if isinstance(value, str):  # a URL of a chat's part
            data = _of_data_url(value, param)
        elif isinstance(value, dict):
            data = _of_object(cast("Json", value), param, files, named)
        else:
            continue
        if data is None:
            continue
        image = _image(data, tenant, param)
        brought[image.artifact_id] = image
        if len(brought) > MAX_IMAGES:
            raise TooLarge(f"more than {MAX_IMAGES} images came with the request", param=param)
        reference = {"artifact_id": image.artifact_id}
        if isinstance(value, str):
            holder.clear()
            holder.update({"type": "image", "image": reference})
        else:
            holder[name] = reference
    for name in (files or {}).keys() - named:
        raise InvalidRequest(
            f'the part {name[:100]} is named nowhere in the request as {{"file": …}}', param=name[:100]
        )
    return list(brought.values())


def image_of_url(url: Any, tenant: str, param: str) -> BroughtImage | None:
    """The image that a `data:` URL has in it; None for any other. Raises InvalidRequest."""
    data = _of_data_url(url, param) if isinstance(url, str) else None
    return None if data is None else _image(data, tenant, param)


def with_inputs(
    checked: Checked, images: Sequence[BroughtImage], allowances: Allowances, service: GatewayService
) -> tuple[Checked, Keep | None]:
    """What can be submitted: a text that is too large for a record is taken out of the request.

    With it comes what stores that text and the images, as inputs of the request with the given id; None if there are
    none. It also refuses what the request names and the caller's ticket does not reach.
    """
    caller, whole = checked.caller, checked.request
    request, text = take_text(checked.request)
    inputs: list[BroughtInput] = [*images]
    if text is not None and request.input_artifact is not None:
        checked = replace(checked, request=request)
        inputs.append(BroughtInput(request.input_artifact.artifact_id, TEXT_MEDIA_TYPE, text))
    keep = partial(_keep_inputs, inputs, caller, allowances, service) if inputs else None
    if caller.is_narrowed and (named := _references(whole, {one.artifact_id for one in images})):
        return checked, partial(_keep_reached, named, caller, service, keep)
    return checked, keep


def _references(request: InferenceRequest, brought: Set[str]) -> dict[str, str]:
    """The artifacts that a request names and did not bring, and where."""
    found = {
        artifact_id: f"payload.{place}.artifact_id"
        for place, image in image_references(request.payload)
        if (artifact_id := image.get("artifact_id")) is not None and artifact_id not in brought
    }
    if request.input_artifact is not None:
        found[request.input_artifact.artifact_id] = "input_artifact"
    return found


async def _keep_reached(
    references: dict[str, str], caller: Caller, service: GatewayService, keep: Keep | None, request_id: str
) -> None:
    """Raises as `check_references` and `_keep_inputs`."""
    await check_references(service, caller, references)
    if keep is not None:
        await keep(request_id)


async def _keep_inputs(
    inputs: Sequence[BroughtInput], caller: Caller, allowances: Allowances, service: GatewayService, request_id: str
) -> None:
    """Raises TenantLimit when the tenant may not keep as much, and what the store raises."""
    size = sum(len(one.data) for one in inputs)
    if allowances.limits_artifacts(caller):
        used = await allowances.artifacts.used(
            caller.tenant, lambda: service.stored(caller.tenant, lambda store: store.used_bytes(caller.tenant))
        )
        allowances.artifact_room(caller, used, size)

    def keep(store: ArtifactStore) -> None:
        def keep_one(one: BroughtInput) -> None:
            keep_input(
                store, caller.tenant, request_id, one.data, artifact_id=one.artifact_id, media_type=one.media_type
            )

        with ThreadPoolExecutor(min(_WRITERS, len(inputs)), "inputs") as writers:
            list(writers.map(keep_one, inputs))

    with allowances.artifacts.adding(caller.tenant, size):
        await service.stored(caller.tenant, keep)


# --- where images stand


def _slots(body: Any) -> Iterator[Slot]:
    for payload in _payloads(body):
        for name in ("image", "mask"):
            if name in payload:
                yield payload, name, f"payload.{name}"
        for number, operation in enumerate(_objects(payload.get("operations"))):
            if "image" in operation:
                yield operation, "image", f"payload.operations[{number}].image"
        for number, message in enumerate(_objects(payload.get("messages"))):
            for place, part in enumerate(_objects(message.get("content"))):
                yield from _slots_of_part(part, f"payload.messages[{number}].content[{place}]")


def _slots_of_part(part: Json, param: str) -> Iterator[Slot]:
    if part.get("type") == "image" and "image" in part:
        yield part, "image", f"{param}.image"
    elif part.get("type") == "image_url":
        url = part.get("image_url")
        if isinstance(url, dict):
            if not _brings(cast("Json", url).get("url")):
                return
            if cast("Json", url).get("detail") not in (None, *DETAILS):
                return  # refused by name afterwards
            part["image_url"] = cast("Json", url)["url"]
        yield part, "image_url", f"{param}.image_url"


def _payloads(body: Any) -> Iterator[Json]:
    """The payload, under `payload` or under its task's name."""
    if isinstance(body, dict):
        fields = cast("Json", body)
        for name in ("payload", fields.get("task")):
            if isinstance(name, str) and isinstance(fields.get(name), dict):
                yield fields[name]


def _objects(value: Any) -> Iterator[Json]:
    if isinstance(value, list):
        for item in cast("list[Any]", value):
            yield cast("Json", item) if isinstance(item, dict) else {}


# --- their bytes


def _of_object(value: Json, param: str, files: Mapping[str, bytes] | None, named: set[str]) -> bytes | None:
    """None for what is a reference already."""
    if value.keys() == {"url"} and _brings(value["url"]):
        return _of_data_url(value["url"], param)
    if "data" in value:
        _only(value, {"data", "media_type"}, param)
        _check_media_type(value.get("media_type"), f"{param}.media_type")
        return _decoded(value["data"], f"{param}.data")
    if "file" in value:
        _only(value, {"file"}, param)
        name = value["file"]
        if not isinstance(name, str) or files is None or name not in files:
            raise InvalidRequest(f"{param}.file names no part of a multipart body", param=f"{param}.file")
        named.add(name)
        return files[name]
    return None


def _only(value: Json, names: set[str], param: str) -> None:
    for name in value.keys() - names:
        raise UnsupportedParameter(f"{param}.{name[:100]} does not go with its bytes", param=f"{param}.{name[:100]}")


def _check_media_type(value: Any, param: str) -> None:
    if value is not None and not (isinstance(value, str) and value.lower().startswith("image/")):
        raise InvalidRequest(f"{param} must be a type of images, as image/png", param=param)


def _brings(url: Any) -> bool:
    return isinstance(url, str) and url[:5].lower() == "data:"


def _of_data_url(url: str, param: str) -> bytes | None:
    """The bytes of a data: URL; None for a URL that lies elsewhere."""
    if not _brings(url):
        return None
    head, comma, data = url[5:].partition(",")
    media_type, *options = head.split(";")
    _check_media_type(media_type or None, param)
    if not comma or options[-1:] != ["base64"]:
        raise InvalidRequest(f"{param} must be a URL, or data:image/…;base64,…", param=param)
    return _decoded(data, param)


def _decoded(text: Any, param: str) -> bytes:
    if not isinstance(text, str):
        raise InvalidRequest(f"{param} must be text in base64", param=param)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"{param} is not base64", param=param) from error


def _image(data: bytes, tenant: str, param: str) -> BroughtImage:
    """What it is called is not looked at; whether it can be decoded, the worker finds out."""
    found = sniff(data)
    if found is None:
        raise InvalidRequest(f"{param} is not an image of a known format ({', '.join(MEDIA_TYPES)})", param=param)
    return BroughtImage(input_artifact_id(tenant, hashlib.sha256(data).hexdigest()), MEDIA_TYPES[found], data)
