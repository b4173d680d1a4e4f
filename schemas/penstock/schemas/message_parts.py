"""Messages with images: the parts that callers write, in the one form that the records carry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, cast

from penstock.schemas.errors import InvalidRequest, UnsupportedParameter
from penstock.schemas.limits import MAX_ID_CHARS, MAX_URL_CHARS

Part = dict[str, Any]

SEEN_ROLES = frozenset({"user", "system"})
"""Who may show images to a model: what an assistant or a tool said is text."""
KEPT_ROLES = SEEN_ROLES | {"assistant"}
DETAILS = ("auto", "low", "high", "original")
"""What a caller may say of how closely an image is to be looked at. Each is looked at in full."""
"""Whose images a conversation may be given to keep: assistants make some."""


def content_of(
    value: Sequence[Mapping[str, Any]], message: dict[str, Any], param: str, roles: Set[str] = SEEN_ROLES
) -> str:
    """The text of a list of parts. If images are among them, the message gets `parts`, all of them in order.

    `roles`: whose messages may have images.

    An image is {"type": "image", "image": {artifact_id} or {url}}, or OpenAI's {"type": "image_url", "image_url":
    {url}}.
    Raises InvalidRequest, UnsupportedParameter.
    """
    parts = [_part(part, f"{param}[{number}]") for number, part in enumerate(value)]
    if any(part["type"] == "image" for part in parts):
        if message["role"] not in roles:
            raise InvalidRequest(f"{param}: only {_words(roles)} show images", param=param)
        message["parts"] = parts
    return "".join(part["text"] for part in parts if part["type"] == "text")


def _words(roles: Set[str]) -> str:
    *others, last = sorted(roles, reverse=True)
    return f"{', '.join(others)} and {last}"


def image_parts(payload: Mapping[str, Any]) -> Iterator[str]:
    """Where in a payload in its normal form the images of messages stand, as callers write it."""
    for number, message in enumerate(cast("list[Part]", payload.get("messages") or ())):
        for place, part in enumerate(cast("list[Part]", message.get("parts") or ())):
            if part.get("image") is not None:
                yield f"payload.messages[{number}].content[{place}]"


def _part(part: Mapping[str, Any], param: str) -> Part:
    given = {name: value for name, value in part.items() if value is not None}
    match given.pop("type"):
        case "text":
            if not isinstance(given.get("text"), str):
                raise InvalidRequest(f"{param}: a part of type text has no text", param=param)
            return {"type": "text", "text": given["text"]}
        case "image":
            return {"type": "image", "image": _image(given, f"{param}.image")}
        case "image_url":
            url = given.get("image_url")
            if isinstance(url, Mapping):
                _check_detail(cast("Mapping[str, Any]", url), f"{param}.image_url")
                url = cast("Mapping[str, Any]", url).get("url")
            if isinstance(url, str) and url[:5].lower() == "data:":
                raise InvalidRequest(
                    f"{param}: only a gateway takes an image's bytes; elsewhere it is referred to", param=param
                )
            if not isinstance(url, str) or not 0 < len(url) <= MAX_URL_CHARS:
                raise InvalidRequest(
                    f"{param}.image_url must have a url of 1 to {MAX_URL_CHARS} characters", param=f"{param}.image_url"
                )
            return {"type": "image", "image": {"url": url}}
        case _:
            raise UnsupportedParameter(f"{param}: only parts of type text and image are supported", param=param)


def _image(given: Mapping[str, Any], param: str) -> dict[str, str]:
    image: Any = given.get("image")
    if not isinstance(image, Mapping):
        raise InvalidRequest(f"{param} must be an object", param=param)
    named = {name: value for name, value in cast("Mapping[str, Any]", image).items() if value is not None}
    if len(named) != 1 or named.keys() - {"artifact_id", "url"}:
        raise InvalidRequest(f"{param} must have artifact_id or url, one of the two", param=param)
    ((name, text),) = named.items()
    most = MAX_URL_CHARS if name == "url" else MAX_ID_CHARS
    if not isinstance(text, str) or not 0 < len(text) <= most:
        raise InvalidRequest(f"{param}.{name} must be text of 1 to {most} characters", param=param)
    return named


def _check_detail(image: Mapping[str, Any], param: str) -> None:
    """Raises UnsupportedParameter."""
    if image.get("detail") not in (None, *DETAILS):
        raise UnsupportedParameter(f"{param}.detail must be one of {', '.join(DETAILS)}", param=f"{param}.detail")
    for name in image.keys() - {"url", "detail"}:
        raise UnsupportedParameter(f"{param}.{name[:100]} is not supported", param=f"{param}.{name[:100]}")
