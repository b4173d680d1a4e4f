"""What the client commands share: options, HTTP with errors told in one line, output for people or as JSON."""

from __future__ import annotations

import json
import shlex
import sys
import textwrap
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

import httpx
import typer
from rich.console import Console
from rich.table import Column, Table

from penstock.cli import instances
from penstock.cli.commands.api_paths import Route
from penstock.cli.failures import CliFailure, ExitCode
from penstock.cli.state import SystemState
from penstock.schemas.sse import DONE, SseLines, field_value
from penstock.schemas.texts import shortened

DEFAULT_URL = "http://127.0.0.1:8000"
ARTIFACTS: Final = "/v1/artifacts"

Url = Annotated[
    str,
    typer.Option(
        "--url",
        envvar="PENSTOCK_URL",
        help="The gateway (default: that of the running `penstock up`, else http://127.0.0.1:8000).",
    ),
]
Key = Annotated[
    str | None, typer.Option("--key", envvar="PENSTOCK_API_KEY", help="An API key, when the gateway asks for one.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, one document or one line per record.")]


class BuiltTask(StrEnum):
    """Tasks that `penstock submit PROMPT` asks for; the others have commands of their own."""

    TEXT_GENERATION = "text_generation"
    EMBEDDING = "embedding"


Row = Callable[[Any], Sequence[Any]]
"""The cells of one item."""

console = Console()
PIPED_WIDTH = 100_000
errors = Console(stderr=True)


@dataclass
class Gateway:
    """A gateway over HTTP; every failure becomes one line and the exit code that DESIGN gives it.

    As a parameter of a command it is the options --url and --key.
    """

    url: Url = ""
    key: Key = None

    def __post_init__(self) -> None:
        if self.url:
            checked_url(self.url)

    @cached_property
    def _instance(self) -> SystemState | None:
        """Looked for at the first use: some commands need no gateway."""
        return None if self.url else instances.serving()

    @cached_property
    def base_url(self) -> str:
        """Raises CliFailure."""
        return checked_url(self.url or (DEFAULT_URL if self._instance is None else self._instance.url))

    @cached_property
    def _http(self) -> httpx.Client:
        # A proxy of the environment is for the outside; what it would do to streams on loopback is not wanted.
        return httpx.Client(base_url=self.base_url, headers=auth_headers(self.key), timeout=30, trust_env=False)

    @property
    def _keys_file(self) -> str | None:
        return None if self._instance is None else self._instance.keys_file

    def __enter__(self) -> Gateway:
        return self

    def __exit__(self, *_: object) -> None:
        if "_http" in vars(self):
            self._http.close()

    def send_always(self, name: str, value: str) -> None:
        """Sends this header with every call from here on."""
        self._http.headers[name] = value

    def call(self, method: str, path: Route, *, body: Any = None, timeout_s: float | None = None, **query: Any) -> Any:
        """The decoded answer, or None for an empty one. Raises CliFailure."""
        return self._request(method, path, query, json=body, timeout=timeout_s or httpx.USE_CLIENT_DEFAULT)

    def upload(
        self, content: bytes | Iterator[bytes], headers: Mapping[str, str], timeout: httpx.Timeout, **query: Any
    ) -> Any:
        """The artifact that is made of the content. Raises CliFailure."""
        return self._request("POST", ARTIFACTS, query, content=content, headers=headers, timeout=timeout)

    def answer(self, method: str, path: Route, **options: Any) -> httpx.Response:
        """The answer, of any status. Raises CliFailure (unreachable, timed out)."""
        try:
            return self._http.request(method, path, **options)
        except httpx.HTTPError as error:
            raise unreachable(self.base_url, error) from error

    def _request(self, method: str, path: Route, query: Mapping[str, Any], **options: Any) -> Any:
        answer = self.answer(method, path, params=given(query), **options)
        raise_for_error(answer, self._keys_file)
        try:
            return answer.json() if answer.content else None
        except ValueError as error:
            text = f"what answers at {self.base_url} is no gateway of Penstock: name it with --url"
            raise CliFailure(text) from error

    @contextmanager
    def stream(
        self,
        method: str,
        path: Route,
        *,
        headers: Mapping[str, str] | None = None,
        timeout: httpx.Timeout | None = None,
        **query: str | None,
    ) -> Generator[httpx.Response]:
        """An open answer whose lines come as they are sent. Raises CliFailure."""
        try:
            with self._http.stream(
                method, path, params=given(query), headers=dict(headers or {}), timeout=timeout
            ) as answer:
                if answer.is_error:
                    answer.read()
                raise_for_error(answer, self._keys_file)
                yield answer
        except httpx.HTTPError as error:
            raise unreachable(self.base_url, error) from error

    def pages(self, path: Route, limit: int, **query: Any) -> list[dict[str, Any]]:
        """Items of a list over all its pages, at most `limit`.

        All are read before the first is returned: what reads the output may write to the list.
        """
        found: list[dict[str, Any]] = []
        after: str | None = None
        while len(found) < limit:
            page = self.call("GET", path, limit=min(limit - len(found), 100), after=after, **query)
            found += page["data"]
            if not page["has_more"] or page["last_id"] is None:
                break
            after = page["last_id"]
        return found[:limit]

    def first(self, path: Route, limit: int, **query: Any) -> list[dict[str, Any]]:
        """As `pages`. On stderr it says when the list goes on."""
        return at_most(limit, self.pages(path, limit + 1, **query))


def at_most(limit: int, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first `limit`. On stderr it says that there are more."""
    if len(found) > limit:
        errors.print(f"there are more than these {limit}: --limit shows them", style="dim", highlight=False)
    return found[:limit]


def given(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def checked_url(url: str) -> str:
    """A gateway's URL without the slash at its end. Raises CliFailure (usage)."""
    try:
        parts = urlsplit(url)
        well_formed = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 80) > 0
    except ValueError:
        well_formed = False
    if not well_formed:
        raise CliFailure(f"--url {url}: write it as http://127.0.0.1:8000", exit_code=ExitCode.USAGE)
    return url.rstrip("/")


def auth_headers(key: str | None) -> dict[str, str]:
    """Raises CliFailure (usage) for a key that cannot be one."""
    if not key:
        return {}
    if not (key.isascii() and key.isprintable()):
        raise CliFailure("--key has characters that no key of Penstock has", exit_code=ExitCode.USAGE)
    return {"authorization": f"Bearer {key}"}


def unreachable(url: str, error: httpx.HTTPError) -> CliFailure:
    if isinstance(error, httpx.TimeoutException):
        return CliFailure(
            f"{url} did not answer in time; is it overloaded? `penstock status`", exit_code=ExitCode.TIMED_OUT
        )
    return no_gateway(url, error)


def no_gateway(url: str, error: Exception) -> CliFailure:
    return CliFailure(
        f"no gateway at {url} ({error}); start one with `penstock up` or name it with --url",
        exit_code=ExitCode.UNREACHABLE,
    )


def raise_for_error(answer: httpx.Response, keys_file: str | None = None) -> None:
    """Raises CliFailure. `keys_file`: that of the gateway, if it is known."""
    if not answer.is_error:
        return
    try:
        error = answer.json()["error"]
        text = f"{error['message']} ({error['code']}{', ' + error['param'] if error.get('param') else ''})"
    except (ValueError, KeyError, TypeError):
        text = f"HTTP {answer.status_code}: {shortened(answer.text, 200)}"
    if answer.status_code == 401 and keys_file is not None:
        creates = f"`penstock keys create --file {shlex.quote(keys_file)}` creates one"
        text += f": give it by --key or PENSTOCK_API_KEY; {creates}"
    code = {503: ExitCode.UNREACHABLE, 504: ExitCode.TIMED_OUT}.get(answer.status_code, ExitCode.FAILED)
    raise CliFailure(text, exit_code=code, forbidden=answer.status_code == 403)


def sse_frames(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    """The data of each server-sent event, decoded; comments and the closing [DONE] are left out."""
    lines = SseLines()
    for piece in answer.iter_bytes():
        for line in lines.feed(piece):
            data = field_value(line, b"data")
            if data is not None and data != DONE:
                yield json.loads(data)


def say_unknown_model(gateway: Gateway, model: str | None) -> None:
    """Of a list that is empty: say that the model of its filter does not exist, as one that is mistyped."""
    if model is None:
        return
    known = gateway.call("GET", "/v1/models", task="all")["data"]
    if not any(model in (one["id"], *one.get("aliases", ())) for one in known):
        errors.print(f"there is no model {model}; `penstock models list` shows those that there are", highlight=False)


def confirm(question: str) -> None:
    """Raises CliFailure (usage) where nobody can be asked, and Abort if the answer is no."""
    if not sys.stdin.isatty():
        raise CliFailure("nobody can be asked here: add --yes", exit_code=ExitCode.USAGE)
    typer.confirm(question, abort=True)


def waiting_text(facts: Mapping[str, Any]) -> str:
    """A request's status for people: with its place in the queue, and why it waits when the gateway says so."""
    status = str(facts["status"]).replace("_", " ")
    position, detail = facts.get("position"), facts.get("detail")
    waits_for = facts.get("waiting_for")
    if not detail and isinstance(waits_for, dict) and waits_for.get("reason"):
        detail = f"waits for {str(waits_for['reason']).replace('_', ' ')}"
    place = f" (position {position})" if position is not None else ""
    return f"{status}{place}: {detail}" if detail else f"{status}{place}"


def outcome_text(outcome: Mapping[str, Any]) -> str:
    """The text of a request that has ended, or its output as JSON when it has none."""
    output = outcome.get("result") or {}
    return output["text"] if "text" in output else json.dumps(output, ensure_ascii=False)


def print_json(value: Any, *, indented: bool = False) -> None:
    """One line for programs; `indented` for people."""
    typer.echo(json.dumps(value, ensure_ascii=False, indent=2 if indented else None))


def print_list(items: Iterable[Any], *, as_json: bool, columns: Sequence[str], row: Row, empty: str) -> None:
    """A line of JSON for each item, or a table with a `row` for each."""
    if as_json:
        for item in items:
            print_json(item)
    else:
        print_table(columns, [row(item) for item in items], empty)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], empty: str) -> None:
    """A line for each row. On a terminal that is too narrow for that, a few lines for each row."""
    if not rows:
        console.print(empty, style="dim", highlight=False)
        return
    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    table = Table(*(Column(name, no_wrap=True) for name in columns), box=None, pad_edge=False, header_style="bold")
    for row in cells:
        table.add_row(*row)
    # Other programs read piped output: it is never wrapped, whatever width COLUMNS gives the terminal.
    whole = Console(width=PIPED_WIDTH)
    if not console.is_terminal:
        whole.print(table)
    elif whole.measure(table).maximum <= console.width:
        console.print(table)
    else:
        for row in cells:
            typer.echo("\n".join(stacked(columns, row, console.width)))


def stacked(columns: Sequence[str], row: Sequence[str], width: int) -> list[str]:
    """A row in lines of at most `width`: its first cell, whole, then each other cell behind its column's name."""
    lines = [row[0]]
    for name, cell in zip(columns[1:], row[1:], strict=True):
        one = f"{name} {cell}"
        if not cell:
            continue
        if len(lines) > 1 and len(lines[-1]) + len(one) + 2 <= width:
            lines[-1] += f"  {one}"
        else:
            lines += textwrap.wrap(one, width, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
    return lines
