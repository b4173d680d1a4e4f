"""An OpenAI-compatible server for `check.py`: calls the first tool, fills a JSON schema, else says hello.

python docs/clients/remote.py 9999
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Json = dict[str, Any]


def filled(schema: Json) -> str:
    """A JSON object that fits the properties of a schema."""
    values = {"string": "Paris", "integer": 42, "number": 42, "boolean": True}
    return json.dumps({name: values.get(one.get("type")) for name, one in schema.get("properties", {}).items()})


def deltas(body: Json) -> tuple[list[Json], str]:
    """What is said in pieces, and why it ends."""
    if body.get("tools") and body["messages"][-1]["role"] != "tool" and body.get("tool_choice") != "none":
        function = body["tools"][0]["function"]
        arguments = filled(function.get("parameters") or {})
        named = {"name": function["name"], "arguments": ""}
        first = {"tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": named}]}
        pieces = [arguments[at : at + 4] for at in range(0, len(arguments), 4)]
        more = [{"tool_calls": [{"index": 0, "function": {"arguments": piece}}]} for piece in pieces]
        return [first, *more], "tool_calls"
    form = body.get("response_format") or {"type": "text"}
    if form["type"] == "json_schema":
        return [{"content": filled(form["json_schema"]["schema"])}], "stop"
    return [{"content": word} for word in ("Hello ", "from ", "the ", "remote ", "model.")], "stop"


def events(body: Json) -> Iterator[Json]:
    said, reason = deltas(body)
    for index in range(body.get("n") or 1):
        for delta in said:
            choice: Json = {"index": index, "delta": delta, "finish_reason": None}
            if body.get("logprobs") and "content" in delta:
                choice["logprobs"] = {"content": [{"token": delta["content"], "logprob": -0.1, "top_logprobs": []}]}
            yield {"choices": [choice]}
        yield {"choices": [{"index": index, "delta": {}, "finish_reason": reason}]}
    yield {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14}}


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path.endswith("/embeddings"):
            data = [{"index": number, "embedding": [0.1, 0.2, 0.3]} for number in range(len(body["input"]))]
            self.answer("application/json", json.dumps({"data": data, "usage": {"prompt_tokens": 3}}))
        else:
            self.answer("text/event-stream", "".join(f"data: {json.dumps(event)}\n\n" for event in events(body)))

    def answer(self, media_type: str, text: str) -> None:
        self.send_response(200)
        self.send_header("content-type", media_type)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
