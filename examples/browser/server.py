"""A site of your own whose page talks to Penstock. The server keeps the key; the page gets tickets.

PENSTOCK_URL=http://127.0.0.1:8000 PENSTOCK_API_KEY=pk_… python examples/browser/server.py 9000
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

GATEWAY = os.environ.get("PENSTOCK_URL", "http://127.0.0.1:8000")
KEY = os.environ.get("PENSTOCK_API_KEY", "")
USER = "ann"
"""A real site takes the user from its login."""


def penstock(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The gateway's answer to a POST with the key."""
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    with urlopen(Request(GATEWAY + path, json.dumps(body).encode(), headers), timeout=30) as answer:
        return json.load(answer)


def request(prompt: str) -> dict[str, Any]:
    payload = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 100}
    return {"task": "text_generation", "stream": True, "user_id": USER, "payload": payload}


class Site(SimpleHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        try:
            status, answer = 200, {**self.answer(body), "gateway": GATEWAY}
        except HTTPError as error:  # the page shows why; this terminal says where
            self.log_error("%s: %s", error.url, error)
            status, answer = 502, {"error": json.load(error)["error"]["message"]}
        except OSError as error:
            self.log_error("%s: %s", GATEWAY, error)
            status, answer = 502, {"error": "the gateway does not answer"}
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.path == "/questions":
            return penstock("/v1/requests", request(body["prompt"]))
        if self.path == "/tickets/read":  # for an EventSource: one request of this user
            asked = {"use": "read", "request_id": body["request_id"], "user_id": USER, "ttl_s": 600}
            return penstock("/v1/tickets", asked)
        # For a WebSocket: requests of this user, once.
        return penstock("/v1/tickets", {"use": "socket", "scopes": ["read", "submit"], "user_id": USER})


if __name__ == "__main__":
    if not KEY:
        sys.exit("PENSTOCK_API_KEY: give the key that `penstock keys create` printed")
    port = int(sys.argv[1])
    print(f"http://127.0.0.1:{port}", flush=True)
    site = partial(Site, directory=str(Path(__file__).parent))
    ThreadingHTTPServer(("127.0.0.1", port), site).serve_forever()
