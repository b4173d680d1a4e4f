"""What a gateway says of itself on /readyz, told to people: which models no worker moves, why, and where the log is."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import httpx

from penstock.cli.paths import Progress, listens
from penstock.cli.state import PartState

LOOK_EVERY_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """Requests of one kind that wait because no live worker can run them; `since` is an RFC 3339 time."""

    task: str
    model: str | None
    pool: str | None
    requests: int
    since: str | None
    reason: str

    def text(self) -> str:
        """`2 request(s) for text_generation by far have waited since …: no live worker has far`."""
        by = f" by {self.model}" if self.model else ""
        where = f" in the pool {self.pool}" if self.pool else ""
        since = f" since {self.since}" if self.since else ""
        return f"{self.requests} request(s) for {self.task}{by}{where} have waited{since}: {self.reason}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Readiness:
    """`status` is ready, degraded, starting or unavailable; unreachable when nobody answers."""

    status: str
    reason: str | None = None
    models_without_worker: tuple[str, ...] = ()
    waiting: tuple[Waiting, ...] = ()

    @property
    def serves(self) -> bool:
        """Whether requests are taken; a degraded gateway takes them, and some wait or fail."""
        return self.status in ("ready", "degraded")

    def text(self) -> str:
        """One line: `degraded: no worker is alive; without a worker: smollm2-135m`."""
        text = f"{self.status}: {self.reason}" if self.reason else self.status
        unsaid = [model for model in self.models_without_worker if model not in (self.reason or "")]
        return f"{text}; without a worker: {', '.join(unsaid)}" if unsaid else text


def ask(url: str, timeout_s: float = 2.0, headers: Mapping[str, str] | None = None) -> Readiness:
    """The readiness of the gateway, or worker, at this URL (without /readyz).

    With an operator's key in the `headers` a gateway also says what made loads fail.
    """
    try:
        answer = httpx.get(f"{url.rstrip('/')}/readyz", headers=headers, timeout=timeout_s, trust_env=False)
    except httpx.HTTPError as error:
        return Readiness(status="unreachable", reason=str(error) or type(error).__name__)
    try:
        body = answer.json()
    except ValueError:
        body = None
    return readiness_of(answer.status_code, body)


def ask_problems(url: str, headers: Mapping[str, str]) -> list[dict[str, Any]] | None:
    """What is not well, as the gateway tells operators; None if it does not tell this caller."""
    return _ask_operators(url, "problems", headers)


def ask_processes(url: str, headers: Mapping[str, str]) -> str | None:
    """How many gateways, and processes beside them, are alive, and which are silent; None as `ask_problems`."""
    found = _ask_operators(url, "gateways", headers)
    if not found:
        return None
    alive = Counter(one["kind"] for one in found if one["alive"])
    silent = [one["id"] for one in found if not one["alive"]]
    text = ", ".join(f"{kind} {count}" for kind, count in sorted(alive.items())) or "none is alive"
    return f"{text}; silent: {', '.join(silent)}" if silent else text


def _ask_operators(url: str, what: str, headers: Mapping[str, str]) -> list[dict[str, Any]] | None:
    try:
        answer = httpx.get(f"{url.rstrip('/')}/v1/admin/{what}", headers=headers, timeout=2.0, trust_env=False)
        return answer.json()["data"] if answer.status_code == 200 else None
    except (httpx.HTTPError, ValueError):
        return None


def ask_process(pid: int, url: str) -> Readiness:
    """The readiness of this process. Another one that answers at its URL is not asked."""
    port = httpx.URL(url).port or 80
    if not listens(pid, port):
        return Readiness(status="unreachable", reason=f"its process (pid {pid}) does not listen on port {port}")
    return ask(url)


def not_running(cause: str | None) -> Readiness:
    """That of a part whose process ended by this cause."""
    return Readiness(status="unreachable", reason=f"it is not running ({cause})" if cause else "it is not running")


def readiness_of_part(part: PartState) -> Readiness:
    """What a part says of itself; of the broker only whether it runs."""
    if part.pid is None:
        return not_running(part.cause)
    if part.ready_url is None:
        return Readiness(status="ready")
    found = ask_process(part.pid, part.ready_url.removesuffix("/readyz"))
    if found.status != "unreachable" or part.cause is None:
        return found
    return replace(found, reason=f"{found.reason}; its last end: {part.cause}")


def readiness_of(http_status: int, body: object) -> Readiness:
    """What an answer means; of an older gateway, or a worker, only the HTTP status may say it. Pure."""
    facts = cast("Mapping[str, Any]", body) if isinstance(body, Mapping) else {}
    status = facts.get("status")
    if status not in ("ready", "degraded", "starting", "unavailable"):
        status = "ready" if http_status == 200 else "unavailable"
    models: object = facts.get("models_without_worker")
    reason: object = facts.get("reason")
    return Readiness(
        status=str(status),
        reason=str(reason) if reason else None,
        models_without_worker=tuple(_name(model) for model in cast("list[Any]", models))
        if isinstance(models, list)
        else (),
        waiting=tuple(_waiting(facts.get("waiting_without_worker"))),
    )


def _waiting(told: object) -> Iterator[Waiting]:
    kinds = cast("list[Any]", told) if isinstance(told, list) else []
    for kind in kinds:
        with contextlib.suppress(KeyError, TypeError):  # another release's
            yield Waiting(**{name: kind[name] for name in Waiting.__dataclass_fields__})


def _name(model: Any) -> str:
    if isinstance(model, Mapping):
        found = cast("Mapping[str, Any]", model)
        return str(found.get("id") or found.get("model"))
    return str(model)


class ReadinessWatch:
    """Looks at a gateway now and then, on a thread of its own, and tells every change; `log` is the workers'."""

    def __init__(self, look: Callable[[], Readiness], tell: Progress, log: Path) -> None:
        self._look = look
        self._tell = tell
        self._log = log
        self._ended = threading.Event()
        self._told = "ready"
        self._thread = threading.Thread(target=self._run, name="readiness", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.is_set():
            self.note(self._look())
            self._ended.wait(LOOK_EVERY_S)

    def note(self, readiness: Readiness) -> None:
        """Tell it when it is another than the last. Who is unreachable restarts: that is told by its supervisor."""
        text = readiness.text()
        if self._ended.is_set() or readiness.status == "unreachable" or text == self._told:
            return
        self._told = text
        ready = "the gateway is ready again: all models are served"
        self._tell(ready if readiness.status == "ready" else f"{text} (log: {self._log})")
