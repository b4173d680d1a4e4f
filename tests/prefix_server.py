"""An OpenAI-compatible server that makes the same text for the same question, and can go on from a prefix as vLLM does.

Its tokens are characters with the white space before them; one that is not ASCII takes two tokens, of which only the
second gives text. It counts what it makes.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kit.http_server import Answer, Call, serving_http

Json = dict[str, Any]

COUNTED = "One, two, three, four, five, six, seven, eight, nine, ten."
STORY = "".join(f"  {number}. Das Café «Zum Löwen» öffnet früh.\n\n" for number in range(12)).strip()
TEMPLATE_TOKENS = 5
"""Of an opened or a closed turn."""


def tokens_of(text: str) -> list[str]:
    """The text of each token."""
    found: list[str] = []
    for piece in re.findall(r"\s*\S|\s+\Z", text):
        found += [piece] if piece.isascii() else ["", piece]
    return found


@dataclass
class PrefixServer:
    """`kind`: continues | ignores | refuses | closes | leaves_open | counts_nothing | echoes | thinks | strips."""

    kind: str = "continues"
    delay_s: float = 0.0
    asked: list[Json] = field(default_factory=list[Json])
    headers: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    """Of each of `asked`, by lower-case names."""
    made: list[int] = field(default_factory=list[int])
    """Tokens made for each of `asked`."""
    away: bool = False
    breaks: int = 0
    """So often it breaks off after a hundred tokens."""
    holds_at: int | None = None
    """So many tokens of an answer without a prefix are made until `may_end` is set."""
    may_end: threading.Event = field(default_factory=threading.Event)
    may_count: threading.Event = field(default_factory=threading.Event)
    """While this is not set, nobody is told how many tokens a prompt has."""
    url: str = ""

    def __post_init__(self) -> None:
        self.may_count.set()

    def answer(self, body: Json) -> tuple[int, Iterator[Json]]:
        """(status, events) of a chat or a completion."""
        self.asked.append(body)
        self.made.append(0)
        index = len(self.asked) - 1
        if self.away:
            return 503, iter([{"error": {"message": "loading"}}])
        flag = bool(body.get("continue_final_message"))
        if flag and self.kind == "refuses":
            return 400, iter([{"error": {"message": "unknown field continue_final_message"}}])
        if flag and body.get("add_generation_prompt", True):
            return 400, iter([{"error": {"message": "Cannot set both"}}])
        prompt, prefix = self._read(body)
        return 200, self._say(index, body, prompt, prefix)

    def _read(self, body: Json) -> tuple[int, str]:
        """The prompt's tokens, and the text from which it goes on."""
        if "prompt" in body:
            question, _, prefix = body["prompt"].partition("\n")
            return len(tokens_of(question)) + len(tokens_of(prefix)), prefix
        messages = body["messages"]
        said = messages[-1]["content"].rstrip() if messages[-1]["role"] == "assistant" else None
        prompt = sum(TEMPLATE_TOKENS + len(tokens_of(one["content"])) for one in messages)
        if said is None:
            return prompt + TEMPLATE_TOKENS, ""
        opens = self.kind == "leaves_open" or (body.get("continue_final_message") and self.kind != "ignores")
        if opens and self.kind != "closes":
            return prompt, said
        return prompt + TEMPLATE_TOKENS, ""

    def _say(self, index: int, body: Json, prompt: int, prefix: str) -> Iterator[Json]:
        asked = body.get("prompt") or body["messages"][0]["content"]
        text = COUNTED if asked.startswith("Count") else STORY
        if not text.startswith(prefix):
            prefix, text = "", "This is not what I said before."
        rest = tokens_of(text[len(prefix) :])
        if self.kind == "strips" and rest:
            rest[0] = rest[0].lstrip()
        if self.kind == "echoes" and prefix:
            yield _delta(body, prefix)
        if self.kind == "thinks":
            yield {"choices": [{"index": 0, "delta": {"reasoning_content": "Hm."}, "finish_reason": None}]}
        most = body.get("max_tokens", len(rest))
        if most == 1:
            self.may_count.wait(60)
        for token in rest[:most]:
            if self.delay_s and most > 1:
                time.sleep(self.delay_s)
            if self.made[index] == self.holds_at and not prefix:
                self.may_end.wait(120)
            if self.breaks and self.made[index] == 100:
                self.breaks -= 1
                return
            self.made[index] += 1
            if token:
                yield _delta(body, token)
        yield {"choices": [{"index": 0, "delta": {}, "finish_reason": "length" if most < len(rest) else "stop"}]}
        made = self.made[index]
        if self.kind != "counts_nothing":
            usage = {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
            yield {"choices": [], "usage": usage}

    @contextmanager
    def listening(self, port: int = 0) -> Iterator[PrefixServer]:
        with serving_http(self._heard, port) as server:
            self.url = server.url
            yield self

    def _heard(self, call: Call) -> Answer:
        self.headers.append({**call.headers})
        status, events = self.answer(call.json)
        if status != 200:
            return status, next(events)
        lines = (f"data: {json.dumps(event)}\n\n".encode() for event in events)
        return status, lines, {"content-type": "text/event-stream"}


def _delta(body: Json, text: str) -> Json:
    said = {"text": text} if "prompt" in body else {"delta": {"content": text}}
    return {"choices": [{"index": 0, **said, "finish_reason": None}]}
