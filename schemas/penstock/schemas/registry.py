"""A Confluent-compatible schema registry over HTTP: reading schemas by id, registering ours."""

from __future__ import annotations

import contextlib
import logging
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.schemas.codec import SCHEMA_IDS, Codec, default_codec, schema_text
from penstock.schemas.errors import Conflict, RegistryUnavailable, UnknownSchema
from penstock.schemas.texts import without_user

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger(__name__)

MAX_ASKING = 8
"""How many questions to a registry are under way at once, each in a thread."""
MEDIA_TYPE = "application/vnd.schemaregistry.v1+json"


@dataclass(frozen=True, kw_only=True, slots=True)
class RegistryAccess:
    """How to reach a registry: by basic authentication or a bearer token, and with TLS by the files of a CA and of a
    client's certificate and key (PEM).
    """

    url: str
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    ca_location: str | None = None
    certificate_location: str | None = None
    key_location: str | None = None
    key_password: str | None = field(default=None, repr=False)

    def options(self) -> dict[str, Any]:
        """Of an httpx client. Raises RegistryUnavailable for files that hold no certificate or no key that fits."""
        options: dict[str, Any] = {}
        if self.username is not None:
            options["auth"] = (self.username, self.password or "")
        if self.token is not None:
            options["headers"] = {"authorization": f"Bearer {self.token}"}
        if self.url.startswith("https:"):
            try:
                context = options["verify"] = ssl.create_default_context(cafile=self.ca_location)
                if self.certificate_location is not None:
                    context.load_cert_chain(
                        self.certificate_location, self.key_location, lambda: self.key_password or ""
                    )
            except OSError as error:
                names = "schema_registry.ca_location, certificate_location, key_location or key_password"
                raise RegistryUnavailable(f"{names} is wrong: {error}", retry_after_s=1) from error
        return options


Registry = RegistryAccess | str
"""Its access, or its URL where that is enough."""


class RegistryClient:
    """Blocking and thread-safe. `transport` is for tests. Raises RegistryUnavailable as `RegistryAccess.options`."""

    def __init__(
        self, registry: Registry, *, timeout_s: float = 10, transport: httpx.BaseTransport | None = None
    ) -> None:
        import httpx

        access = RegistryAccess(url=registry) if isinstance(registry, str) else registry
        self._url = access.url.rstrip("/")
        self.shown_url = without_user(self._url)
        self._http = httpx.Client(timeout=timeout_s, transport=transport, trust_env=False, **access.options())

    def get_schema(self, schema_id: int) -> str:
        """Raises UnknownSchema, RegistryUnavailable."""
        answer = self._call("GET", f"/schemas/ids/{schema_id}")
        if answer.status_code == 404:
            raise UnknownSchema(f"schema id {schema_id} is not in the registry")
        return str(self._field(answer, "schema"))

    def register(self, subject: str, schema: str) -> int:
        """The id there of a schema under a subject, the same for a repeat. Raises Conflict, RegistryUnavailable."""
        answer = self._call("POST", f"/subjects/{subject}/versions", {"schema": schema, "schemaType": "AVRO"})
        if answer.status_code in (409, 422):
            raise Conflict(f"the registry refuses {subject}: {answer.text[:200]}")
        return int(self._field(answer, "id"))

    def close(self) -> None:
        self._http.close()

    def _call(self, method: str, path: str, body: Any = None) -> httpx.Response:
        import httpx

        try:
            return self._http.request(method, self._url + path, json=body, headers={"accept": MEDIA_TYPE})
        except httpx.HTTPError as error:
            of_tls = ": see schema_registry.ca_location and certificate_location" if "SSL" in str(error) else ""
            raise RegistryUnavailable(
                f"no schema registry at {self.shown_url}: {error}{of_tls}", retry_after_s=1
            ) from error

    def _field(self, answer: httpx.Response, name: str) -> Any:
        if answer.status_code in (401, 403):
            raise RegistryUnavailable(
                f"the schema registry at {self.shown_url} refuses this client ({answer.status_code}): check"
                " schema_registry.username and schema_registry.password, or schema_registry.token",
                retry_after_s=1,
            )
        if answer.is_error:
            raise RegistryUnavailable(f"the schema registry answered {answer.status_code}", retry_after_s=1)
        try:
            return answer.json()[name]
        except (ValueError, TypeError, KeyError) as error:
            raise RegistryUnavailable(
                f"{self.shown_url} does not answer as a schema registry", retry_after_s=1
            ) from error


class UnknownIds:
    """Ids that the registry does not have. It may have them a moment later, so this is forgotten after some seconds."""

    def __init__(
        self, *, seconds: float = 3.0, at_most: int = 10_000, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.seconds = seconds
        self._at_most = at_most
        self._clock = clock
        self._since: dict[int, float] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._since)

    def add(self, schema_id: int) -> None:
        with self._lock:
            self._since.pop(schema_id, None)
            if len(self._since) >= self._at_most:
                del self._since[next(iter(self._since))]  # the oldest
            self._since[schema_id] = self._clock()

    def discard(self, schema_id: int) -> None:
        with self._lock:
            self._since.pop(schema_id, None)

    def age(self, schema_id: int) -> float | None:
        """Seconds since the registry said so; None when that is forgotten."""
        with self._lock:
            since = self._since.get(schema_id)
            if since is None:
                return None
            if (age := self._clock() - since) < self.seconds:
                return age
            del self._since[schema_id]
            return None


def _unknown(schema_id: int) -> UnknownSchema:
    return UnknownSchema(f"schema id {schema_id} is not in the registry")


class RegistryResolver:
    """Finds schemas in a registry, and keeps them: an id never changes its schema.

    `ask` waits for the registry; `ask_aside` never does. An id that the registry does not have is unknown for some
    seconds without another question.
    """

    def __init__(self, client: RegistryClient, *, retry_s: float = 1.0, unknown: UnknownIds | None = None) -> None:
        self.unknown = unknown if unknown is not None else UnknownIds()
        self._client = client
        self._retry_s = retry_s
        self._known: dict[int, str] = {}
        self._asking: set[int] = set()
        self._failure: str | None = None

    def ask(self, schema_id: int) -> str:
        """The schema, for a thread. Raises UnknownSchema, RegistryUnavailable."""
        if (known := self._known.get(schema_id)) is not None:
            return known
        if self.unknown.age(schema_id) is not None:
            raise _unknown(schema_id)
        return self._fetch(schema_id)

    def ask_aside(self, schema_id: int) -> str:
        """The schema, for an event loop: if it is not known yet, a thread fetches it.

        An unknown id that keeps coming is fetched again before it is forgotten, so that its records stall nobody.
        Raises UnknownSchema, and RegistryUnavailable until the thread has an answer.
        """
        if (known := self._known.get(schema_id)) is not None:
            return known
        age = self.unknown.age(schema_id)
        if age is None or age > self.unknown.seconds / 2:
            self._fetch_aside(schema_id)
        if age is not None:
            raise _unknown(schema_id)
        raise RegistryUnavailable(self._failure or f"schema id {schema_id} is being asked for", retry_after_s=0.1)

    def _fetch(self, schema_id: int) -> str:
        try:
            text = self._known[schema_id] = self._client.get_schema(schema_id)
        except UnknownSchema:
            self.unknown.add(schema_id)
            raise
        self.unknown.discard(schema_id)
        return text

    def _fetch_aside(self, schema_id: int) -> None:
        if schema_id not in self._asking and len(self._asking) < MAX_ASKING:
            self._asking.add(schema_id)
            threading.Thread(target=self._fetch_on_thread, args=(schema_id,), name="registry", daemon=True).start()

    def _fetch_on_thread(self, schema_id: int) -> None:
        try:
            with contextlib.suppress(UnknownSchema):
                self._fetch(schema_id)
            self._failure = None
        except Exception as error:
            self._failure = str(error)
            time.sleep(self._retry_s)
        finally:
            self._asking.discard(schema_id)


@dataclass(frozen=True, slots=True)
class Codecs:
    """Two codecs of one installation, with one memory of schemas between them.

    `blocking` waits for the registry when it meets an id that it does not know: for threads. `prompt` never waits: it
    raises RegistryUnavailable until the schema is there.
    """

    blocking: Codec
    prompt: Codec


def registry_codecs(registry: Registry | None, *, write: bool = False) -> Codecs:
    """The codecs for an installation: the package's own ids alone, or with a registry beside it.

    With a registry every schema is registered there, ids from it are read, and with `write` they are written too.
    Raises RegistryUnavailable when `write` is asked and nobody can say which ids to write.
    """
    if registry is None:
        return Codecs(default_codec(), default_codec())
    client = RegistryClient(registry)
    resolver, ids = RegistryResolver(client), _registered_ids(client, write=write)
    return Codecs(Codec(resolver.ask, writer_ids=ids), Codec(resolver.ask_aside, writer_ids=ids))


def reading_codec(registry: Registry | None) -> Codec:
    """A codec that only reads, for tools: it registers nothing, and asks the registry when an id of it comes."""
    return default_codec() if registry is None else Codec(RegistryResolver(RegistryClient(registry)).ask)


def _registered_ids(client: RegistryClient, *, write: bool) -> dict[str, int] | None:
    """Register our schemas; with `write` the registry's ids of them. Raises RegistryUnavailable with `write` alone."""
    ids: dict[str, int] = {}
    try:
        for name in SCHEMA_IDS:
            ids[name] = client.register(f"penstock.v1.{name}", schema_text(name))
    except RegistryUnavailable as error:
        if write:
            raise
        logger.warning("registry.unavailable reason=%s: its ids are asked for when they come", error)
    return ids if write else None
