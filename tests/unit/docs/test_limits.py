"""Each limit is one number: the reference names it, the code refuses beyond it, and the refusal names it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from penstock.gateway.batches import checking, keeping
from penstock.gateway.openai import previous_responses, several
from penstock.gateway.routes import bulk, commands, conversations, native, sockets
from penstock.gateway.service import brought_images, forking, submitting, subscriptions
from penstock.schemas.errors import PenstockError
from penstock.schemas.limits import LIMITS
from penstock.schemas.requests import parse_request

if TYPE_CHECKING:
    from .conftest import Page

NUMBER = r"([0-9][0-9,]*)"
PROMPT = {"prompt": "a"}
USER = {"role": "user", "content": "a"}
Body = dict[str, Any]


def text(**payload: Any) -> Body:
    return {"task": "text_generation", "payload": {**PROMPT, **payload}}


def request(**fields: Any) -> Body:
    return {**text(), **fields}


def embedding(**payload: Any) -> Body:
    return {"task": "embedding", "payload": {"input": "a", **payload}}


def number_in(page: Page, pattern: str) -> int:
    """The number at # of the pattern, which the page must have."""
    found = re.search(re.escape(pattern).replace(r"\#", NUMBER), page.text)
    assert found is not None, f"{page.name} has no such text: {pattern}"
    return int(found[1].replace(",", ""))


@pytest.mark.parametrize(
    ("pattern", "body"),
    [
        ("| `priority` | 0 (the most urgent) to #;", lambda n: request(priority=n)),
        ("| `model` | an id or alias, up to # characters", lambda n: request(model="a" * n)),
        ("| `ttl_ms` | 1 to #:", lambda n: request(ttl_ms=n)),
        ("| `execution_timeout_ms` | 1 to #:", lambda n: request(execution_timeout_ms=n)),
        ("| `max_attempts` | 1 to #:", lambda n: request(max_attempts=n)),
        (
            "| `callback_url` | an http or https URL, up to # ASCII",
            lambda n: request(callback_url="http://a/".ljust(n, "b")),
        ),
        ("| `user_id`, `session_id` | text, up to # characters", lambda n: request(user_id="a" * n)),
        ("| `user_id`, `session_id` | text, up to # characters", lambda n: request(session_id="a" * n)),
        ("| `metadata` | up to # texts", lambda n: request(metadata=dict.fromkeys(map(str, range(n)), ""))),
        ("| `metadata` | up to 64 texts by name, # bytes", lambda n: request(metadata={"a": "b" * (n - 1)})),
        (
            "| `messages` | 1 to # of",
            lambda n: {"task": "text_generation", "payload": {"messages": [{**USER} for _ in range(n)]}},
        ),
        ("| `max_tokens` | 1 to # |", lambda n: text(max_tokens=n)),
        ("| `temperature` | 0 to #;", lambda n: text(temperature=n)),
        ("| `top_p` | above 0, to # |", lambda n: text(top_p=n)),
        ("| `top_k` | 1 to # |", lambda n: text(top_k=n)),
        ("| `stop` | a text, or up to #, each", lambda n: text(stop=["a"] * n)),
        ("| `stop` | a text, or up to 16, each of 1 to # characters", lambda n: text(stop="a" * n)),
        ("| `min_p` | 0 to # |", lambda n: text(min_p=n)),
        ("| `presence_penalty`, `frequency_penalty` | -2 to # |", lambda n: text(presence_penalty=n)),
        ("| `presence_penalty`, `frequency_penalty` | -2 to # |", lambda n: text(frequency_penalty=n)),
        ("| `n` | 1 to # answers", lambda n: text(n=n)),
        ("| `logprobs`, `top_logprobs` | true; 0 to # candidates", lambda n: text(logprobs=True, top_logprobs=n)),
        ("tokens, with 0 to # candidates of each |", lambda n: text(prompt_logprobs=n)),
        ("| `tools` | up to # of", lambda n: text(tools=[{"function": {"name": "f"}} for _ in range(n)])),
        ("`input`, a text or 1 to # of them", lambda n: embedding(input=["a"] * n)),
        ("`dimensions`, 1 to #.", lambda n: embedding(dimensions=n)),
        ("of a payload together may have # bytes", lambda n: embedding(input="a" * n)),
    ],
)
def test_a_limit_of_a_request(reference: dict[str, Page], pattern: str, body: Callable[[int], Body]) -> None:
    limit = number_in(reference["http.md"], pattern)
    parse_request(body(limit), tenant="acme", now_ms=1)
    with pytest.raises(PenstockError) as caught:
        parse_request(body(limit + 1), tenant="acme", now_ms=1)
    assert str(limit) in re.findall(r"[0-9]+", caught.value.message)


@pytest.mark.parametrize(
    ("pattern", "limit"),
    [
        ("give up if it has not started by then | # |", LIMITS.default_ttl_ms),
        ("`?wait=30` (at most # seconds)", native.MAX_WAIT_S),
        ("a body of `POST /v1/requests`, at most # of them", bulk.MAX_LINES),
        ('`POST /v1/requests/cancel` takes `{"ids": […]}`, up to #,', commands.MOST_IDS),
        ("refused while more than # are under way", subscriptions.MOST_AWAITING_SNAPSHOT),
        ("a frame may have # characters", sockets.MAX_FRAME_BYTES),
        ("A socket can\nfollow # requests at once", sockets.MAX_SUBSCRIPTIONS),
        ("would read from more than # other conversations", forking.forks.MOST_ANCESTORS),
        ("`?limit=` (1 to #, the", conversations.REPLAY_RECORDS),
        ("one prompt or up to #, each as text or tokens", several.MOST_REQUESTS),
        ("refers to at most # answers", previous_responses.MOST_ANSWERS),
        ("A file has at most # lines", checking.MAX_LINES),
        ("A tenant may have # batches that have not ended", keeping.MOST_OPEN),
        ("With the header `Idempotency-Key` (1 to # characters)", submitting.MAX_KEY_CHARS),
        ("At most # images may bring their bytes along", brought_images.MAX_IMAGES),
        ("Frames are worked on side by side, up to #;", sockets.MAX_RUNNING),
    ],
)
def test_a_limit_of_a_route(reference: dict[str, Page], pattern: str, limit: int) -> None:
    assert number_in(reference["http.md"], pattern) == limit
