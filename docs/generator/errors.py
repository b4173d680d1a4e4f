"""errors.md, from the error tree of the schemas room."""

from __future__ import annotations

from collections.abc import Sequence

from generator.markdown import code, document, table
from penstock.gateway.document.error_codes import WHEN, tree
from penstock.schemas.errors import DecodeError, PenstockError, RetryKind

SOURCE = "schemas/penstock/schemas/errors.py"
INTRO = f"""\
Errors have one shape everywhere: over HTTP, in WebSocket and SSE frames, on the topics (as
[ErrorInfo](records.md#errorinfo), where `details` is JSON text) and in the client library, where each code is a class
of `penstock.schemas.errors`. The tree is [`{SOURCE}`](../../{SOURCE}).

```json
{{
  "error": {{
    "message": "payload.max_tokens must be an integer of at least 1 and at most 1000000",
    "type": "invalid_request_error",
    "code": "invalid",
    "param": "payload.max_tokens",
    "request_id": null,
    "retryable": false,
    "details": null
  }}
}}
```

Decide by `code`: it is stable. `message` is for people. `type` is the family, as OpenAI names them. `param` is the
field at fault. `request_id` is null where no request was accepted. `retryable` says whether asking again may help; a
request that has had its outcome keeps it, and asking again is a new request."""

HEADERS = [
    ["`x-request-id`", "Every error: the request's id, or `edge-…`, which names only this answer."],
    ["`retry-after`", "Retryable errors with status 429 or 503: seconds, at least 1."],
    [
        "`x-should-retry: false`",
        "What is not retryable, and each failed outcome on OpenAI routes, where clients would retry 409, 429 and 5xx.",
    ],
    ["`www-authenticate: Bearer`", "401."],
]
EDGE = """\
A path that does not exist answers 404 `not_found`, a method that it does not have 405 `method_not_allowed`, both in
this shape. The routes under `/registry/` answer in a registry's shape instead, see [HTTP](http.md#schema-registry)."""

KINDS: dict[RetryKind, str] = {
    RetryKind.PUT_BACK: (
        "What it needs is away or full: a store, the broker, a remote server (429, 503, not reached), memory of the"
        " device. It is tried again until its deadline, and no attempt is spent. Then it ends as *expired*, with the"
        " last cause."
    ),
    RetryKind.RETRIED: (
        "The engine failed, its process died, a remote server answered 5xx, or the run took too long. It runs again"
        " after a wait, and an attempt is spent. Without `max_attempts` this goes on as long as an attempt can start"
        " before the deadline. When none may start any more, it gets a dead letter."
    ),
    RetryKind.FINAL: "Running it again cannot help. It fails at once.",
}
IN_A_WORKER = """\
What a worker does when an attempt of an accepted request ends with an error of this kind. An engine that knows that
the same run cannot succeed makes any error final."""
WAITS = """\
Waits double from 0.1 s to 10 s, or are fixed: `worker.retries`, and `retries` of a model ([settings](settings.md)). Up
to half of each wait is left out, so that requests that failed together do not return together. A server's
`Retry-After` is waited for, up to a minute.

`max_attempts` bounds the attempts that were spent; a model's entry may set it for requests that name none. When three
engines or workers have died under a request, it gets a dead letter in any case.

`retryable` is for callers that receive an error: whether sending the request again may help."""

DEAD = """\
## Of records

A record on a request topic that cannot be read or checked goes to `inference.dlq` with its bytes; the code stands in
`reason_code`, see [DeadLetter](records.md#deadletter). It may be any code of a refusal above, or one of these, which
callers of a gateway never meet."""


def page() -> str:
    kinds = list(tree(PenstockError))
    callers = [kind for kind in kinds if not issubclass(kind, DecodeError)]
    records = [kind for kind in kinds if issubclass(kind, DecodeError)]
    headers = "\n\n".join(["## Headers", table(["header", "on"], HEADERS), EDGE])
    kinds_table = table(["kind", "then"], [[str(kind), then] for kind, then in KINDS.items()])
    in_a_worker = "\n\n".join(["## In a worker", IN_A_WORKER, kinds_table, WAITS])
    return document(
        "Errors", INTRO, "## Codes\n\n" + codes(callers), in_a_worker, DEAD + "\n\n" + codes(records), headers
    )


def codes(kinds: Sequence[type[PenstockError]]) -> str:
    rows = [
        [
            code(kind.code),
            str(kind.http_status),
            "yes" if kind.retryable else "no",
            str(kind.retry_kind),
            code(kind.type),
            code(kind.__name__),
            WHEN[kind.code],
        ]
        for kind in sorted(kinds, key=lambda kind: kind.http_status)
    ]
    return table(["code", "HTTP", "retryable", "in a worker", "type", "class", "when"], rows)
