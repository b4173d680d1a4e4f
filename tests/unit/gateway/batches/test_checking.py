"""Lines of batches: read in pieces of any size, checked before any runs; each ends by itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import from_json

from kit.records import new_batch
from kit.refusals import refused
from penstock.gateway.batches import checking
from penstock.gateway.batches.checking import MAX_LINES, Checking, LineError, parse_line
from penstock.gateway.batches.line_runs import LineEnd, LineRuns
from penstock.gateway.batches.records import Stop
from penstock.gateway.limits.allowances import Allowances
from penstock.gateway.limits.callers import Caller
from penstock.gateway.routes.line_reader import Line, LineReader
from penstock.gateway.service.submitting import Checked
from penstock.gateway.service.subscriptions import Subscription
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.view.frames import ResultFrame
from penstock.gateway.view.hub import Hub
from penstock.schemas.errors import Overloaded, PenstockError
from penstock.schemas.ids import idempotent_request_id
from penstock.schemas.records import InferenceRequest
from support import wait_until_async

CHAT = "/v1/chat/completions"


def line(custom_id: Any = "a", **fields: Any) -> bytes:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": CHAT, "body": {}, **fields}).encode()


def read(text: bytes, size: int, max_bytes: int = 1_000) -> list[Line]:
    reader = LineReader(max_bytes)
    found = [one for at in range(0, len(text), size) for one in reader.feed(text[at : at + size])]
    return [*found, *reader.close()]


@given(st.lists(st.binary(max_size=20).map(lambda one: one.replace(b"\n", b" "))), st.integers(1, 30))
def test_lines_come_whole_whatever_the_pieces(lines: list[bytes], size: int) -> None:
    text = b"\n".join(lines)
    found = read(text, size)
    expected = [(number, one) for number, one in enumerate(text.split(b"\n"), 1) if one.strip()]
    assert [(one.number, one.content) for one in found] == expected
    assert all(text[one.start :].startswith(one.content or b"") for one in found)


@given(st.integers(1, 40))
def test_a_line_too_long_is_told_and_not_kept(size: int) -> None:
    lines = read(b"short\n" + b"x" * 100 + b"\nshort too", size, max_bytes=10)
    found = [(one.number, one.start, one.content) for one in lines]
    assert found == [(1, 0, b"short"), (2, 6, None), (3, 107, b"short too")]


@pytest.mark.parametrize(
    ("content", "code", "param"),
    [
        (None, "line_too_large", None),
        (b"{", "invalid_json_line", None),
        (b"[1]", "invalid_json_line", None),
        (b"[" * 100_000, "invalid_json_line", None),
        (line(None), "missing_required_parameter", "custom_id"),
        (line(7), "invalid_custom_id", "custom_id"),
        (line(""), "invalid_custom_id", "custom_id"),
        (line("x" * 513), "invalid_custom_id", "custom_id"),
        (line("\ud800"), "invalid_custom_id", "custom_id"),
        (line(float("nan")), "invalid_custom_id", "custom_id"),
        (line(method="GET"), "invalid_method", "method"),
        (line(url="/v1/embeddings"), "mismatched_endpoint", "url"),
        (line(priority=1), "unsupported_parameter", "priority"),
        (line(body=None), "missing_required_parameter", "body"),
        (line(body="text"), "missing_required_parameter", "body"),
    ],
)
def test_what_a_line_may_not_be(content: bytes | None, code: str, param: str | None) -> None:
    with refused(LineError, code=code, param=param):
        parse_line(content, CHAT)


def check(text: bytes, size: int = 10_000) -> Checking:
    checked, reader, until = Checking(CHAT), LineReader(10_000), 0
    for at in range(0, len(text), size):
        until = min(at + size, len(text))
        checked.add(reader.feed(text[at:until]), until)
    checked.add(reader.close(), until)
    checked.close()
    return checked


def test_all_errors_are_told_with_their_lines() -> None:
    errors = check(b"\n".join([line("a"), b"", b"no", line("a"), line("b", method="PUT")])).errors
    told = [(one["line"], one["code"]) for one in errors]
    assert told == [(3, "invalid_json_line"), (4, "duplicate_custom_id"), (5, "invalid_method")]


def test_an_empty_file_and_one_too_long() -> None:
    assert [one["code"] for one in check(b"\n \n").errors] == ["empty_file"]
    assert check(b"\n".join(line(f"{n}") for n in range(MAX_LINES))).errors == []
    many = check(b"\n".join(line(f"{n}") for n in range(MAX_LINES + 1)))
    assert [(one["code"], one["line"]) for one in many.errors] == [("too_many_tasks", None)]


def test_a_thousand_errors_are_not_all_told() -> None:
    assert len(check(b"\n".join([b"no"] * 1_000)).errors) == checking.MOST_ERRORS


@given(st.integers(1, 40), st.integers(1, 7), st.integers(30, 400), st.integers(1, 500), st.booleans())
def test_parts_hold_all_lines_and_can_be_read_alone(
    lines: int, most_lines: int, most_bytes: int, size: int, ended: bool
) -> None:
    text = b"\n".join(line(f"{n}", body={"x": "y" * (n * 7 % 50)}) + b"\n" * (n % 3 == 0) for n in range(lines))
    text += b"\n" if ended else b""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checking, "PART_LINES", most_lines)
        patch.setattr(checking, "PART_BYTES", most_bytes)
        checked = check(text, size)
    assert checked.errors == []
    assert (checked.parts[0].start, checked.parts[-1].end) == (0, len(text))
    again: list[Line] = []
    for part in checked.parts:
        reader = LineReader(part.end - part.start, number=part.number, start=part.start)
        found = [*reader.feed(text[part.start : part.end]), *reader.close()]
        assert 0 < len(found) <= most_lines
        again += found
    assert again == read(text, len(text), 10_000)


# -- lines with unforeseen content or failures


BATCH = "b" * 32
HI = {"input": "hi"}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


class Service:
    """What lines ask of a gateway: every request that is submitted completes at once."""

    def __init__(self, failures: Sequence[Exception] = ()) -> None:
        """`failures`: of the first checks."""
        self.settings = GatewaySettings()
        self.submitting = self.subscriptions = self.lookups = self
        self.submitted: list[list[str]] = []
        self._failures = list(failures)
        self._hub = Hub()

    def open(self, most_frames: int) -> Subscription:
        return Subscription(self._hub, single=False, most_frames=most_frames)

    async def check(self, caller: Caller, request: InferenceRequest) -> Checked:
        if self._failures:
            raise self._failures.pop(0)
        return Checked(caller, request, request.model)

    async def submit_together(self, many: Sequence[Checked], batch_id: str) -> list[PenstockError | None]:
        self.submitted.append([checked.request.request_id for checked in many])
        return [None] * len(many)

    async def catch_up(self) -> None:
        pass

    def peek(self, tenant: str, request_id: str) -> object | None:
        return request_id if any(request_id in together for together in self.submitted) else None

    def follow_outcome(self, subscription: Subscription, tenant: str, request_id: str) -> None:
        result = {"text": "x", "finish_reason": "stop", "usage": {}}
        frame = ResultFrame(
            request_id=request_id, cursor=None, status="completed", result=result, error=None, model="m"
        )
        subscription.push([frame])

    def unfollow_outcome(self, subscription: Subscription, tenant: str, request_id: str) -> None:
        pass


async def ended(
    service: Any, bodies: Sequence[dict[str, Any]], stop: Stop | None = None, *, resumed: bool = False
) -> dict[int, LineEnd]:
    """The end of each line, by its number."""
    made = new_batch(batch_id=BATCH, endpoint="/v1/responses")
    runs = LineRuns(made, service, Allowances(), lambda: Caller(tenant="default"), lambda: stop, resumed=resumed)
    asked = {"method": "POST", "url": made.endpoint}
    lines = [
        Line(number, 0, json.dumps({**asked, "custom_id": str(number), "body": {"model": "m", **body}}).encode())
        for number, body in enumerate(bodies)
    ]
    ends: dict[int, LineEnd] = {}
    following = asyncio.create_task(runs.follow())
    try:
        await runs.submit(lines, lambda line, end: ends.update({line.number: end}))
        await wait_until_async(lambda: len(ends) == len(lines) or following.done())
    finally:
        following.cancel()
        runs.close()
    assert not runs.flying
    return ends


async def test_an_answer_that_says_back_what_was_asked_is_written_if_json_can_hold_it() -> None:
    schemas = (nested(95), nested(130), {"type": "object", "description": "\ud800"}, {"maximum": float("nan")})
    bodies = [{**HI, "tools": [{"type": "function", "name": "f", "parameters": schema}]} for schema in schemas]
    ends = await ended(Service(), bodies)
    found = [from_json(ends[number].content, allow_inf_nan=False)["response"] for number in range(4)]
    assert found[0]["body"]["tools"][0]["parameters"] == schemas[0]
    told = [(one["status_code"], one["body"]["error"]["param"]) for one in found[1:]]
    place = "tools[0].parameters"
    assert told == [(400, None), (400, f"{place}.description"), (400, f"{place}.maximum")]


async def test_a_line_that_nobody_foresaw_is_an_error_of_that_line() -> None:
    ends = await ended(Service([RuntimeError("unforeseen")]), [HI, HI])
    found = json.loads(ends[0].content)["response"]
    assert (ends[0].completed, ends[0].counts.failed, found["status_code"]) == (False, 1, 500)
    assert found["body"]["error"]["code"] == "internal"
    assert "unforeseen" not in ends[0].content.decode()
    assert ends[1].completed


async def test_what_the_machine_fails_at_is_no_error_of_the_line() -> None:
    with pytest.raises(OSError, match="no space"):
        await ended(Service([OSError("no space")]), [HI])


async def test_a_group_is_submitted_together_but_for_what_is_refused() -> None:
    service = Service()
    ends = await ended(service, [HI, {"input": 5}, HI, {**HI, "stream": True}, {**HI, "background": True}, HI])
    assert [end.completed for _, end in sorted(ends.items())] == [True, False, True, False, False, True]
    codes = [json.loads(ends[number].content)["response"]["status_code"] for number in (1, 3, 4)]
    assert (codes, [len(together) for together in service.submitted]) == ([400, 400, 400], [3])


async def test_what_is_refused_for_now_is_submitted_later_and_once() -> None:
    service = Service([Overloaded("full", retry_after_s=0.01)] * 3)
    ends = await ended(service, [HI, HI, HI])
    assert all(end.completed for end in ends.values())
    assert sorted(len(together) for together in service.submitted if together) == [3]


@pytest.mark.parametrize("stop", [None, Stop.CANCELLED])
async def test_whoever_takes_a_batch_over_submits_only_what_is_not_there(stop: Stop | None) -> None:
    service = Service()
    first = idempotent_request_id("default", f"batch/{BATCH}/0")
    service.submitted.append([first])
    ends = await ended(service, [HI, HI], stop, resumed=True)
    assert (ends[0].completed, ends[1].completed) == (True, stop is None)
    sent = [one for together in service.submitted[1:] for one in together]
    assert sent == ([] if stop else [idempotent_request_id("default", f"batch/{BATCH}/1")])
