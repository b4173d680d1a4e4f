"""The spans of a request, from what its worker knows when it ends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.common.tracing import Span, SpanContext
from penstock.processors.core.effects import Terminal
from penstock.processors.core.work.work import Body, Subject
from penstock.processors.engines.base import Finished
from penstock.processors.request_spans import EndedRequest, LostRun, StatusSeen, run_id, spans_of
from penstock.schemas.errors import EngineFailed, Expired
from penstock.schemas.records import Attempt, AttemptError, AttemptHistory, InferenceRequest, Origin, Timings

MS = 1_000_000
T0 = 1_700_000_000_000
"""Milliseconds: when it arrived. It waited for 40, its model loaded for 60, it was admitted in 10 and ran for 200."""
ORIGIN = Origin(topic="requests", partition=2, offset=7, append_time_ms=T0 - 1_000)
REQUEST = InferenceRequest(
    request_id="r",
    tenant="default",
    task="text_generation",
    created_at=T0 - 1_009,
    text_generation={"messages": [{"role": "user", "content": "secret"}]},
)
SUBJECT = Subject(
    ("requests", 2, 7),
    1,
    "r",
    "default",
    "text_generation",
    "m",
    None,
    3,
    5,
    ORIGIN,
    Body(REQUEST, b"", (), None),
)
TIMINGS = Timings(queued_ms=40, load_ms=60, admission_ms=10, run_ms=200, first_token_ms=130)
FINISHED = Finished(run_id="x", output={"text": "said"}, finish_reason="stop", usage={"prompt_tokens": 3})
DONE = Terminal(SUBJECT, "completed", "high", TIMINGS, 0.2, 0, finished=FINISHED, prepared_s=0.03)
PARENT = SpanContext(9, 8)
DIED = AttemptError(code="engine_failed", message="its worker died")


def ended(effect: Terminal = DONE, **facts: Any) -> dict[str, list[Span]]:
    known: dict[str, Any] = {
        "effect": effect,
        "status": effect.status,
        "worker_id": "w1",
        "group_id": "g",
        "result_topic": "results",
        "context": SpanContext(9, 10),
        "parent": PARENT,
        "ended_ns": (T0 + 310) * MS,
        "acknowledged_ns": (T0 + 315) * MS,
    }
    found: dict[str, list[Span]] = {}
    for span in spans_of(EndedRequest(**(known | facts))):
        found.setdefault(span.name, []).append(span)
    return found


def since(span: Span) -> tuple[int, int]:
    """Its times in milliseconds since the arrival."""
    return span.start_ns // MS - T0, span.end_ns // MS - T0


def with_history(*attempts: Attempt) -> Terminal:
    history = AttemptHistory(attempts=list(attempts))
    return replace(DONE, subject=replace(SUBJECT, history=history))


def test_each_phase_is_a_child_with_its_times() -> None:
    statuses = [
        StatusSeen((T0 + 5) * MS, "queued", "tenant_share"),
        StatusSeen((T0 + 10) * MS, "loading_model", "model_loading"),
        StatusSeen((T0 + 80) * MS, "waiting_for_memory", "memory"),
        StatusSeen((T0 + 120) * MS, "running", None),
    ]
    spans = ended(statuses=statuses)
    assert {name: since(one) for name, (one,) in spans.items()} == {
        "process requests": (0, 315),
        "queue": (0, 100),
        "load": (10, 70),
        "wait for memory": (80, 100),
        "prepare": (70, 100),
        "admission": (100, 110),
        "chat m": (110, 310),
        "send results": (310, 315),
    }
    (process,) = spans.pop("process requests")
    assert process.parent == PARENT
    assert {one.parent for (one,) in spans.values()} == {process.context}
    assert [(event.name, event.attributes) for event in spans["queue"][0].events] == [
        ("queued", {"penstock.waiting_reason": "tenant_share"}),
        ("loading_model", {"penstock.waiting_reason": "model_loading"}),
        ("waiting_for_memory", {"penstock.waiting_reason": "memory"}),
    ]
    (token,) = spans["chat m"][0].events
    assert token.at_ns // MS - T0 == 130
    assert "secret" not in repr(spans)
    assert "said" not in repr(spans)
    (run,) = ended(content=True)["chat m"]
    assert "secret" in str(run.attributes["gen_ai.input.messages"])
    assert "said" in str(run.attributes["gen_ai.output.messages"])


def test_what_never_ran_has_no_run() -> None:
    error, timings = Expired("late"), Timings(queued_ms=310, load_ms=0, admission_ms=0, run_ms=0)
    spans = ended(Terminal(SUBJECT, "expired", "low", timings, None, None, error=error))
    assert {name: since(one) for name, (one,) in spans.items()} == {
        "process requests": (0, 315),
        "queue": (0, 310),
        "send results": (310, 315),
    }
    assert (spans["process requests"][0].error, spans["process requests"][0].attributes["error.type"]) == (
        "expired",
        "expired",
    )


@pytest.mark.parametrize(
    ("attempts", "lost", "expected"),
    [
        pytest.param((), (LostRun(4, 1, "w0", T0 - 900, T0 - 500),), [(-900, -500, 1, True)], id="published"),
        pytest.param(
            (Attempt(attempt=1, worker_id="w1", started_at=T0 - 950, error=DIED),),
            (LostRun(4, 1, "w1", T0 - 900, T0 - 500),),
            [(-950, -500, 1, True)],
            id="published, and in the journal",
        ),
        pytest.param(
            (Attempt(attempt=1, worker_id="w1", started_at=T0 + 1, error=DIED),),
            (),
            [(1, 1, 1, True)],
            id="known by the journal alone",
        ),
        pytest.param(
            (
                Attempt(attempt=1, worker_id="w1", started_at=T0 + 10, ended_at=T0 + 20, error=DIED),
                Attempt(attempt=2, worker_id="w1", started_at=T0 + 30, ended_at=T0 + 60, error=DIED),
                Attempt(attempt=3, worker_id="w1", started_at=T0 + 110, ended_at=T0 + 310),
            ),
            (),
            [(10, 20, 1, False), (30, 60, 2, False)],
            id="failed here",
        ),
        pytest.param(
            (Attempt(attempt=1, worker_id="w9", started_at=T0 - 99_000, ended_at=T0 - 98_000, error=DIED),),
            (),
            [],
            id="of the request that this one repeats",
        ),
    ],
)
def test_attempts_before_the_last_have_spans_and_are_linked_in_a_row(
    attempts: tuple[Attempt, ...], lost: tuple[LostRun, ...], expected: list[tuple[int, int, int, bool]]
) -> None:
    spans = ended(with_history(*attempts), lost=lost)
    *earlier, last = spans["chat m"]
    assert [
        (*since(one), one.attributes["penstock.attempt"], one.attributes.get("penstock.lost", False)) for one in earlier
    ] == expected
    for one in earlier:
        assert one.error is not None
        assert one.parent == (PARENT if "penstock.lost" in one.attributes else spans["process requests"][0].context)
    chain = [*earlier, last]
    assert [[link.context for link in one.links] for one in chain] == [[], *([one.context] for one in chain[:-1])]


def test_a_run_that_fails_for_good_has_one_span() -> None:
    error = EngineFailed("broken")
    noted = Attempt(attempt=3, worker_id="w1", started_at=T0 + 110, ended_at=T0 + 310, error=DIED)
    effect = replace(with_history(noted), status="failed", error=error, finished=None)
    (run,) = ended(effect)["chat m"]
    assert (run.error, run.context.span_id) == ("engine_failed", run_id(SUBJECT, 5, 3))
