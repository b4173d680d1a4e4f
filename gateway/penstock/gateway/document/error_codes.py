"""The codes of errors: when each is met, and the table of them on `/docs`, to which the console links."""

from __future__ import annotations

import re
from html import escape

from penstock.schemas.errors import PenstockError

# When a code is met. A code without its line here, and a line without its code, fail the tests.
WHEN: dict[str, str] = {
    "invalid": "A field is missing, has a wrong type or value or contradicts another; or the body is not JSON.",
    "unsupported_media_type": "The body is encoded in a way that is not supported: send it plain, or as gzip.",
    "unsupported_parameter": "A field that is unknown, or that would change the output and is not supported.",
    "unsupported_task": "A task of the schemas that is not built yet.",
    "context_length_exceeded": "The prompt does not fit the model's window, or an embedding's text its encoder's.",
    "invalid_cursor": "A cursor that no gateway gave out.",
    "model_not_found": "No worker offers a model of this name, or it does not do this task, or none does.",
    "unauthenticated": "No key or ticket where one is asked for, or one that is unknown, revoked, expired or used.",
    "forbidden": "The key lacks the scope or the urgency; or the Host or Origin is not allowed.",
    "not_found": "There is no such request, conversation or artifact among the caller's own.",
    "cancelled": "The request was cancelled.",
    "conflict": (
        "The request has not ended, so it cannot be erased; or a conversation's topic is not compacted; or a registry"
        " refuses a schema."
    ),
    "gone": "The request was erased.",
    "too_large": "A body, a record, a text or a list is over its limit.",
    "insufficient_capacity": (
        "What can never fit: more than any device has, or one conversation too many. `details` holds `need` and"
        " `capacity`."
    ),
    "idempotency_key_reused": "This Idempotency-Key was used with another body.",
    "tenant_limit": (
        "A [limit](http.md#limits) of the tenant, the key or the caller's address is reached: a rate, or a number of"
        " things at once. The message names it."
    ),
    "overloaded": "A limit of the gateway, the client library or a remote server is reached.",
    "broker_unavailable": "Kafka does not answer or did not acknowledge in time.",
    "broker_refused": "Kafka refuses the connections of this process: login, certificate or protocol.",
    "registry_unavailable": "The schema registry does not answer.",
    "store_unavailable": "The store of artifacts did not take or give something; the message names place and cause.",
    "source_unavailable": "Another server, from which an image was to be fetched, was not reached or did not answer.",
    "expired": "The request's deadline passed before it ran.",
    "execution_timeout": "The run took longer than `execution_timeout_ms`, or than `max_execution_s` allows.",
    "engine_failed": "The engine failed, its process died, or a remote server answered 5xx, at each attempt.",
    "dead_lettered": "The request was put aside, see `penstock dlq list`.",
    "webhook_undeliverable": "Nobody took a webhook: the reason of its dead letter. No caller is answered with it.",
    "stream_restarted": "An OpenAI stream was begun anew by another attempt with another text than was sent.",
    "internal": "An error that Penstock did not foresee. `details.incident` names it in the gateway's log.",
    "undecodable": "Bytes that are no record; the codes below say why.",
    "wrong_magic": "The value is not in the Confluent wire format, and no JSON object.",
    "unknown_schema": "The schema id is not one of ours, and not one of the registry.",
    "bad_avro": "The body does not fit the schema that its id names.",
    "bad_json": "A value that begins as a JSON object is none.",
}


def tree(root: type[PenstockError]) -> list[type[PenstockError]]:
    """One class of the tree per code, in the order of the source; of two the later, which is the one that is raised."""
    found = [root]
    for child in root.__subclasses__():
        found += tree(child)
    found = [kind for kind in found if kind.__module__ == PenstockError.__module__]
    by_code = {kind.code: kind for kind in found}
    return [kind for kind in found if by_code[kind.code] is kind]


def section() -> str:
    """The table; the id of a row is its code."""
    rows = [
        f"<tr id={kind.code}><td><code>{kind.code}</code><td>{kind.http_status}"
        f"<td>{'yes' if kind.retryable else 'no'}<td>{_html(WHEN[kind.code])}"
        for kind in sorted(tree(PenstockError), key=lambda kind: kind.http_status)
    ]
    return f"<h2>errors</h2><table><tr><th>code<th>HTTP<th>retryable<th>when{''.join(rows)}</table>"


def _html(markdown: str) -> str:
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", escape(markdown, quote=False))
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", text)
