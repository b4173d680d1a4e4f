"""Pages of another origin in a real browser: the how-to's example, and its function that follows a request."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingTCPServer
from threading import Thread
from typing import Any

import httpx
import pytest

from penstock.cli.paths import free_port, port_in_use
from penstock.gateway.edge.keys import create_key, revoke_key
from stock_clients import tool
from support import in_background, wait_until
from system import Process, System, running
from worker_requests import engine

EXAMPLE = Path(__file__).parents[3] / "examples" / "browser"
STARTS = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
PAGE = """<script>
let text = "", tickets = [], closed = false, asked = 1
const close = EventSource.prototype.close
EventSource.prototype.close = function () { closed = true; close.call(this) }
const newTicket = async () => tickets.pop(), pause = () => 1000
const onFrame = (frame) => text = frame.type === "chunk" ? text + frame.text : frame.text ?? text, say = () => {}
%s
let state
// Its state: open, and once the browser has given it up, what the answer to the same call says to this page.
function tries(url) {
  const events = new EventSource(url)
  state = "connecting"
  events.onopen = () => state = "open"
  events.onerror = async () => {
    if (events.readyState === EventSource.CLOSED) state = (await (await fetch(url)).json()).error.code
  }
}
</script>"""


class Relay(ThreadingTCPServer):
    """Passes connections on to a gateway, and cuts them. Keeps the head of each request."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), Passing)
        self.port, self.refuses = port, False
        self.heads: list[str] = []
        self.open: list[socket.socket] = []

    def cut(self) -> None:
        for one in self.open:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


class Passing(BaseRequestHandler):
    server: Relay  # pyright: ignore[reportIncompatibleVariableOverride]

    def handle(self) -> None:
        if not (head := self.request.recv(65_536)):
            return  # the browser has connected in advance
        self.server.heads.append(head.decode("latin-1"))
        if self.server.refuses:
            self.request.sendall(STARTS)
            return
        with socket.create_connection(("127.0.0.1", self.server.port)) as gateway:
            self.server.open += [self.request, gateway]
            gateway.sendall(head)
            Thread(target=self.copy, args=(self.request, gateway), daemon=True).start()
            self.copy(gateway, self.request)

    @staticmethod
    def copy(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while piece := source.recv(65_536):
                target.sendall(piece)
            target.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The application's own server, at a port."""
    folder = tmp_path_factory.mktemp("site")
    (script,) = re.findall(r"^function follow.*?^}", (EXAMPLE / "page.js").read_text(), re.S | re.M)
    (folder / "index.html").write_text(PAGE % script)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(folder)))
    with in_background(server):
        yield server.server_port


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    return path, {"authorization": f"Bearer {create_key(path, tenant='app')}"}


@pytest.fixture(scope="module")
def gateway(place: Any, key: tuple[Path, dict[str, str]], site: int) -> Any:
    auth = {"keys_file": key[0], "ticket_key": "shared", "allowed_origins": [f"http://127.0.0.1:{site}"]}
    return place.gateway("browsed", auth=auth)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=tool("chromium"), args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def page(browser: Any, site: int) -> Iterator[Any]:
    with browser.new_page() as page:
        page.goto(f"http://127.0.0.1:{site}/")
        yield page


def ticket(gateway: Any, key: tuple[Path, dict[str, str]], **asked: Any) -> str:
    answer = gateway.http.post("/v1/tickets", json={"use": "read", **asked}, headers=key[1])
    assert answer.status_code == 200, answer.text
    return str(answer.json()["ticket"])


def test_a_page_whose_connection_breaks_shows_the_whole_text(
    gateway: Any, scribe: Any, key: tuple[Path, dict[str, str]], page: Any
) -> None:
    request = scribe.request(tenant="app")
    mine, renewed = (ticket(gateway, key, request_id=request.id) for _ in range(2))
    with Relay(gateway.port) as relay, in_background(relay):

        def shown(text: str) -> None:
            wait_until(lambda: page.evaluate("text") == text, 20, lambda: f"{page.evaluate('text')}, {relay.heads}")

        question = {"gateway": f"http://127.0.0.1:{relay.server_address[1]}", "request_id": request.id}
        page.evaluate(f"() => {{ tickets = ['{renewed}']; follow({json.dumps(question)}, '{mine}', 1) }}")
        request.chunk("abc", 0)
        shown("abc")
        relay.cut()
        request.chunk("def", 3)
        shown("abcdef")
        first, second = relay.heads
        assert second.splitlines()[0] == first.splitlines()[0], "the browser asks with the same URL"
        assert "last-event-id: " in second.lower()
        relay.refuses = True
        relay.cut()
        wait_until(lambda: len(relay.heads) == 3, 20, "the browser came again")
        relay.refuses = False
        request.chunk("ghi", 6)
        shown("abcdefghi")
        assert f"ticket={renewed}" in relay.heads[-1]
        request.end("abcdefghi")
        page.wait_for_function("closed")
    assert page.evaluate("text") == "abcdefghi"


def test_a_page_reads_nothing_else_and_nothing_after_the_tickets_end(
    gateway: Any, scribe: Any, key: tuple[Path, dict[str, str]], page: Any, site: int
) -> None:
    mine, other = (scribe.request(tenant="app").id for _ in range(2))
    secret = create_key(key[0], tenant="app")
    wait_until(lambda: gateway.get("/v1/requests", headers={"x-api-key": secret}).status_code == 200, 20, "the key")
    answer = gateway.http.post("/v1/tickets", json={"use": "read", "request_id": mine}, headers={"x-api-key": secret})

    def tries(request_id: str, state: str) -> None:
        url = f"{gateway.url}/v1/requests/{request_id}/events?ticket={answer.json()['ticket']}"
        page.evaluate("tries", url)
        page.wait_for_function("wanted => state === wanted", arg=state)

    tries(other, "not_found")
    tries(mine, "open")
    assert revoke_key(key[0], secret.split("_")[1])
    page.wait_for_function("state === 'unauthenticated'")  # the ticket ends with its key: the stream, and a reconnect
    page.goto(f"http://localhost:{site}/")
    tries(mine, "forbidden")  # auth.allowed_origins does not list this page


@dataclass
class Example:
    """The example's site, with a relay between its page and the gateway."""

    url: str
    relay: Relay
    gateway: Process
    key: str

    def newest(self) -> dict[str, Any]:
        headers = {"x-api-key": self.key}
        found = httpx.get(f"{self.gateway.url}/v1/requests?limit=1", headers=headers, timeout=30).json()["data"]
        return found[0]


@pytest.fixture(scope="module")
def example(kafka: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Example]:
    folder, port = tmp_path_factory.mktemp("example"), free_port()
    url, keys = f"http://127.0.0.1:{port}", folder / "keys.json"
    key = create_key(keys, tenant="app", scopes=["read", "submit"])
    auth = {"keys_file": str(keys), "allowed_origins": [url]}
    models = [engine(tokens=40, delay_ms=50)]
    with running(System(kafka.bootstrap_servers, "example-", folder, models=models, auth=auth)) as system:
        gateway = system.start_all(["w1", "g1"]).process("g")
        with Relay(gateway.port) as relay, in_background(relay):
            env = {"PENSTOCK_URL": f"http://127.0.0.1:{relay.server_address[1]}", "PENSTOCK_API_KEY": key}
            server = subprocess.Popen([sys.executable, EXAMPLE / "server.py", str(port)], env={**os.environ, **env})
            try:
                wait_until(lambda: port_in_use(port), 20, "the site listens")
                yield Example(url, relay, gateway, key)
            finally:
                server.terminate()
                server.wait(10)


@pytest.mark.parametrize(("way", "path"), [("EventSource", "/events?"), ("WebSocket", "/v1/ws?")])
def test_the_example_shows_the_whole_answer_over_a_cut_connection(
    example: Example, browser: Any, way: str, path: str
) -> None:
    with browser.new_page() as page:
        page.goto(example.url)
        page.get_by_role("button", name=way).click()
        page.wait_for_function("document.getElementById('answer').textContent.length > 20")
        assert not example.newest()["done"]
        example.relay.cut()
        page.wait_for_function("document.getElementById('state').textContent === 'completed'")
        made = example.newest()
        assert page.locator("#answer").text_content() == made["result"]["text"]
        assert made["user_id"] == "ann"
        assert len([head for head in example.relay.heads if path in head.splitlines()[0]]) == 2, "it came again"


def test_the_example_shows_the_newest_answer_alone(example: Example, browser: Any) -> None:
    with browser.new_page() as page:
        page.goto(example.url)
        page.get_by_role("textbox").press("Enter")
        page.wait_for_function("document.getElementById('answer').textContent.length > 20")
        page.get_by_role("button", name="WebSocket").click()
        page.wait_for_function("document.getElementById('state').textContent === 'completed'")
        assert page.locator("#answer").text_content() == example.newest()["result"]["text"]
        assert page.url == f"{example.url}/", "the page was not loaded again"


def test_the_example_says_what_is_wrong(example: Example, browser: Any) -> None:
    with browser.new_page() as page:
        page.goto(example.url)
        example.relay.refuses = True
        try:
            page.get_by_role("button", name="EventSource").click()
            page.wait_for_function("document.getElementById('state').textContent.includes('503')")
        finally:
            example.relay.refuses = False
        page.goto(example.url.replace("127.0.0.1", "localhost"))
        page.get_by_role("button", name="WebSocket").click()
        page.wait_for_function("document.getElementById('state').textContent.includes('allowed_origins')")
        assert page.locator("#answer").text_content() == ""


def test_an_answer_that_comes_late_is_not_shown_under_a_newer_question(example: Example, browser: Any) -> None:
    held: list[Any] = []
    with browser.new_page() as page:
        page.route("**/questions", lambda route: route.continue_() if held else held.append(route))
        page.goto(example.url)
        page.get_by_role("button", name="EventSource").click()
        wait_until(lambda: page.evaluate("asked") == 1 and bool(held), 20, "the first question is held back")
        page.get_by_role("button", name="EventSource").click()
        page.wait_for_function("document.getElementById('state').textContent === 'completed'")
        shown, newest = page.locator("#answer").text_content(), example.newest()
        with page.expect_response("**/tickets/read"):
            held[0].continue_()
        wait_until(lambda: example.newest()["request_id"] != newest["request_id"], 20, "the first question is asked")
        wait_until(lambda: example.newest()["done"], 20, "and answered")
        assert page.locator("#answer").text_content() == shown


def test_a_refused_question_says_why(example: Example, browser: Any) -> None:
    with browser.new_page() as page:
        page.goto(example.url)
        page.get_by_role("textbox").fill("")
        page.get_by_role("button", name="EventSource").click()
        assert page.evaluate("asked") == 0, "an empty question is not asked"
        page.evaluate("byEvents(7)")
        page.wait_for_function("document.getElementById('state').textContent.includes('payload.messages[0].content')")
