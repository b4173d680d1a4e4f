"""A fast check for the requests that are most common: 1.6 µs where the full validation takes 12.

It repeats rules of `bodies` and `payloads`; tests/property/schemas/test_plain.py holds it against them.
"""

from __future__ import annotations

from typing import Any, cast

from penstock.schemas.ids import is_conversation_id, is_request_id, is_tenant
from penstock.schemas.limits import LIMITS
from penstock.schemas.records import InferenceRequest

_LONG = 2**63 - 1
_ROLES = frozenset({"system", "user", "assistant"})


def text_bytes(text: str) -> int:
    """Its length in UTF-8. Raises UnicodeEncodeError for a lone surrogate."""
    return len(text) if str.isascii(text) else len(text.encode())


def is_plain(request: InferenceRequest) -> bool:
    """True if a request has only common fields, and all of them are valid and in their normal form.

    False decides nothing: the full validation does, and names the field at fault.
    """
    task, text, embedding = request.task, request.text_generation, request.embedding
    try:
        return (
            request.image_generation is None
            and request.image_editing is None
            and request.image_to_text is None
            and request.image_processing is None
            and request.summarization is None
            and request.conversation_items is None
            and request.input_artifact is None
            and request.callback_url is None
            and request.callback_statuses is None
            and request.output is None
            and request.context is None
            and request.requirements is None
            and not request.extra
            and not request.metadata
            and request.pool is None
            and request.user_id is None
            and request.session_id is None
            and request.execution_timeout_ms is None
            and type(request.stream) is bool
            and type(request.priority) is int
            and 0 <= request.priority <= 1_000
            and type(request.max_attempts) is int
            and 0 <= request.max_attempts <= LIMITS.max_attempts
            and ((ttl := request.ttl_ms) is None or (type(ttl) is int and 1 <= ttl <= LIMITS.max_ttl_ms))
            and ((model := request.model) is None or (0 < len(model) <= 200 and str.isascii(model)))
            and is_request_id(request.request_id)
            and is_tenant(request.tenant)
            and (
                (
                    task == "text_generation"
                    and text is not None
                    and embedding is None
                    and _plain_text(text, request.conversation_id)
                )
                or (
                    task == "embedding"
                    and embedding is not None
                    and text is None
                    and request.conversation_id is None
                    and _plain_embedding(embedding)
                )
            )
        )
    except (TypeError, AttributeError, ValueError, KeyError):
        return False


def _plain_text(payload: dict[str, Any], conversation_id: str | None) -> bool:
    get = payload.get
    messages, prompt, tokens, warmth = get("messages"), get("prompt"), get("max_tokens"), get("temperature")
    seed = get("seed")
    # What else is there, of twenty fields, is null: counted at once.
    looked_at = (messages is None) + (prompt is None) + (tokens is None) + (warmth is None) + (seed is None)
    if not (
        len(payload) - list(payload.values()).count(None) == 5 - looked_at
        and (seed is None or (type(seed) is int and -_LONG - 1 <= seed <= _LONG))
        and (tokens is None or (type(tokens) is int and 1 <= tokens <= LIMITS.max_tokens))
        and (warmth is None or (type(warmth) is float and 0 <= warmth <= 2))
        and (conversation_id is None or is_conversation_id(conversation_id))
    ):
        return False
    if messages is None:
        return conversation_id is None and type(prompt) is str and text_bytes(prompt) <= LIMITS.max_text_bytes
    if prompt is not None or type(messages) is not list or not 0 < len(messages) <= LIMITS.max_messages:
        return False
    size = 0
    for message in cast("list[dict[str, Any]]", messages):
        # As JSON has it (two fields) or as Avro (seven, five of them null).
        if message["role"] not in _ROLES or (
            len(message) != 2
            and (
                len(message) != 7
                or message["name"] is not None
                or message["tool_calls"] is not None
                or message["tool_call_id"] is not None
                or message["parts"] is not None
                or message["reasoning_content"] is not None
            )
        ):
            return False
        size += text_bytes(message["content"])
    return size <= LIMITS.max_text_bytes


def _plain_embedding(payload: dict[str, Any]) -> bool:
    inputs: Any = payload["input"]
    if len(payload) - list(payload.values()).count(None) != 1:
        return False
    if type(inputs) is not list or not 0 < len(inputs) <= LIMITS.max_inputs:
        return False
    size = 0
    for text in cast("list[str]", inputs):
        if not text:
            return False
        size += text_bytes(text)
    return size <= LIMITS.max_text_bytes
