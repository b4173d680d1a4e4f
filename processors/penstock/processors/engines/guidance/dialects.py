"""How models ask for tools: the forms that chat templates teach, and what a template without tools gets. Pure.

`hermes` is what Qwen, SmolLM2, Hermes and many others write; it is also used where a template knows no tools.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.schemas.errors import InvalidRequest
from penstock.schemas.finite_json import object_of

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialect:
    """Calls begin at `marker` ("": only an answer that is JSON as a whole is one) and end at `end` ("": with the text).

    A call that is forced is written behind `prefix`, which the prompt ends with then; `separator` is between two
    calls ("": it writes only one), `suffix` after the last. `bare`: models are taught calls without the marker.
    """

    name: str
    marker: str = ""
    end: str = ""
    prefix: str = ""
    separator: str = ""
    suffix: str = ""
    arguments: str = "arguments"
    bare: bool = False


HERMES = Dialect(
    name="hermes",
    marker="<tool_call>",
    end="</tool_call>",
    prefix="<tool_call>\n",
    separator="\n</tool_call>\n<tool_call>\n",
    suffix="\n</tool_call>",
)
MISTRAL = Dialect(name="mistral", marker="[TOOL_CALLS]", prefix="[TOOL_CALLS][", separator=", ", suffix="]")
LLAMA = Dialect(name="llama", marker="<|python_tag|>", separator="; ", arguments="parameters", bare=True)
JSON = Dialect(name="json", bare=True)
DIALECTS = {dialect.name: dialect for dialect in (HERMES, MISTRAL, LLAMA, JSON)}


def knows_tools(template: str | None) -> bool:
    """Whether a chat template does something with tools."""
    return template is not None and "tools" in template


def dialect_of(template: str | None, chosen: str | None) -> Dialect:
    """The one that an option `tool_parser` names, else the one that the template shows. Raises InvalidRequest."""
    if chosen is not None:
        if chosen not in DIALECTS:
            raise InvalidRequest(f"tool_parser must be one of {', '.join(DIALECTS)}", param="models")
        return DIALECTS[chosen]
    if not knows_tools(template) or template is None:
        return HERMES
    shown = (dialect for dialect in DIALECTS.values() if dialect.marker and dialect.marker in template)
    return next(shown, JSON)


# -- for templates that know tools


def for_template(messages: Sequence[Json]) -> list[Json]:
    """Messages as templates have them: a call's arguments are an object there, not its text."""
    return [
        {**message, "tool_calls": [_with_object(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _with_object(call: Json) -> Json:
    function = call["function"]
    return {**call, "function": {**function, "arguments": object_of(function["arguments"])}}


# -- for templates that do not

_BLOCK = """You may call functions. These are there, as JSON, one a line:
<tools>
{tools}
</tools>
To call one, answer with its name and its arguments in this form, once for each call:
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument": "its value"}}}}
</tool_call>
Functions answer in <tool_response></tool_response>."""


def without_template(messages: Sequence[Json], tools: Sequence[Json]) -> list[Json]:
    """Messages in which tools, calls and their answers are text: a system block, and text in the form of hermes."""
    plain = [_plain(message) for message in messages]
    if not tools:
        return plain
    block = _BLOCK.format(tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools))
    if plain and plain[0]["role"] == "system":
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{block}"}, *plain[1:]]
    return [{"role": "system", "content": block}, *plain]


def _plain(message: Json) -> Json:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls: Sequence[Json] = message.get("tool_calls") or ()
    if not calls:
        return message
    written = [
        json.dumps(
            {"name": call["function"]["name"], "arguments": object_of(call["function"]["arguments"])},
            ensure_ascii=False,
        )
        for call in calls
    ]
    texts = [message.get("content") or "", *(f"<tool_call>\n{one}\n</tool_call>" for one in written)]
    return {"role": message["role"], "content": "\n".join(filter(None, texts))}
