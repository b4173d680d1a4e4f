"""The gateway's one settings object: defaults, then the TOML that PENSTOCK_CONFIG names, then PENSTOCK_* variables."""

from __future__ import annotations

from collections.abc import Callable
from ipaddress import ip_network
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from penstock.common.configuration import (
    ArtifactsSection,
    KafkaProcessSettings,
    RegistrySection,
    Section,
    SharedSection,
    TelemetrySection,
)
from penstock.common.model_entry import ModelEntry
from penstock.gateway.callbacks import WebhooksSection
from penstock.gateway.limits.allowances import Allowances, Totals
from penstock.gateway.limits.callers import Caller
from penstock.gateway.limits.settings import LimitsSection, tenant_limits
from penstock.gateway.queues.settings import QueueSection


class GatewaySection(Section):
    successors = {  # noqa: RUF012  (nobody changes it)
        "access_log": "each HTTP call is logged; log.level with penstock.gateway.edge.http_log=warning ends that"
    }

    host: str = "127.0.0.1"
    """The address to listen on; beyond loopback only with `auth.keys_file`."""
    port: int = Field(8000, ge=0, le=65_535)
    """The port to listen on."""
    view_path: Path = Path(".penstock/gateway.sqlite")
    """The SQLite file of this gateway's view; with all files whose names begin with its name deleted, it is rebuilt
    from a snapshot or the topics. While another gateway holds it, this one takes the first free one of
    `gateway-2.sqlite`, `gateway-3.sqlite` and so on, beside it."""
    view_snapshot_s: float = Field(0.0, ge=0)
    """Seconds, about, between snapshots of the view that one of the gateways writes into the store of artifacts. A
    gateway without a view begins from the snapshot. 0: this gateway neither writes nor reads it."""
    usage_s: float = Field(60.0, gt=0)
    """Seconds, about, between records of a total of usage on its topic, while it changes."""
    artifacts_dir: str | None = None
    """Only when the gateway sees the artifacts under another name than `artifacts.location`: a folder or a URL."""
    sweep_artifacts_s: float = Field(3_600.0, ge=0)
    """Seconds, about, between sweeps of expired artifacts, of outputs whose worker died before its event and of uploads
    that broke off; 0: never."""
    sweep_conversations_s: float = Field(600.0, ge=0)
    """Seconds, about, between looks for conversations that `conversation_retention_s` of the limits has run out for; 0:
    only when an operator asks."""
    expired_per_minute: int = Field(120, ge=1)
    """Conversations that this gateway deletes in a minute because of that, at most."""
    client_queue_frames: int = Field(1024, ge=8)
    """Frames that wait for one client before it is let go as too slow."""
    max_pending_submits: int = Field(2_000, ge=1)
    """Requests on their way to Kafka at once; more are refused with 503."""
    max_live: int = Field(200_000, ge=100)
    """Requests accepted and not done that this gateway holds in memory, about 6 KiB each; more are refused with 503.
    Those that wait and that nobody follows are left to the view's file, but for a tenth of this number.
    Each class may have an eighth of it beyond that, whatever the others fill, and each tenant in it a sixteenth."""
    recent_bytes: int = Field(64 * 2**20, ge=1_000_000)
    """Memory for ended requests; who asks for one that is not there waits for the disk."""
    max_body_bytes: int = Field(2_000_000, ge=1_000)
    """The largest body of an HTTP request; files and multipart bodies may have `artifacts.max_bytes`."""
    max_large_body_bytes: int = Field(50_000_000, ge=1_000)
    """The largest JSON body of routes that take images in base64 or many texts."""
    large_bodies_bytes: int = Field(256 * 2**20, ge=1_000)
    """Bytes of bodies beyond `max_body_bytes` that are held at once; more are refused with 503. They take up to four
    times as much memory while they are read."""
    max_batch_bytes: int = Field(200 * 2**20, ge=1_000)
    """The largest file of `/v1/files` and body of `/v1/requests/bulk`; each line is held to `max_body_bytes`."""
    batch_lines: int = Field(1_000, ge=1)
    """Lines that batches may have in flight, shared evenly by all that this gateway runs. A tenant's batches take at
    most half of what the tenant may have outstanding."""
    max_http: int = Field(4_096, ge=1)
    """HTTP exchanges open at once; more are refused with 503."""
    max_sockets: int = Field(4_096, ge=1)
    """WebSockets open at once; more are closed with 1013."""
    limits: LimitsSection = Field(default_factory=LimitsSection)
    """What each tenant may have."""
    body_timeout_s: float = Field(30.0, gt=0)
    """Seconds that a body has to come, and one more for each 256 KiB that has come (16 KiB of an artifact)."""
    head_timeout_s: float = Field(30.0, gt=0)
    """Seconds that the head of an HTTP request has to come."""
    write_timeout_s: float = Field(30.0, gt=0)
    """Seconds after which a client that reads nothing of what it is sent is cut off."""
    worker_late_s: float = Field(8.0, gt=0)
    """Seconds after its last report for which a worker counts as alive; at least three times
    `worker.state_interval_s`."""
    horizon_h: float = Field(24.0, gt=0)
    """The view keeps requests of the last two horizons, in hours, and a new gateway begins there."""
    rediscover_s: float = Field(10.0, gt=0)
    """Seconds between looks for topics that are new."""
    probe_s: float = Field(30.0, gt=0)
    """Seconds between probes of what this gateway depends on: an artifact is written, read and deleted, and the workers
    are compared with the orders. `/readyz` shows the results."""
    drain_s: float = Field(15.0, ge=0)
    """Seconds that calls and streams on OpenAI's routes have to end when the gateway stops. Streams,
    sockets and long polls of ours are asked at once to continue at another gateway."""
    restart_notice_s: float = Field(0.0, ge=0)
    """Seconds for which a gateway that restarts itself, for renewed certificates, serves on while `/readyz` is 503: as
    long as load balancers need to remove it."""
    unknown_fields: Literal["refuse", "ignore"] = "refuse"
    """OpenAI's routes. refuse: a field that would change the output, or that nobody knows, is 400. ignore: it is left
    out, and the header `penstock-ignored-fields` names it."""
    trusted_proxies: list[str] = Field(default_factory=lambda: ["127.0.0.1", "::1"])
    """Addresses and networks of proxies in front, as `10.0.0.0/8`: their `X-Forwarded-*` headers are believed."""

    user_header: str | None = Field(default=None, pattern="^[A-Za-z0-9-]+$")
    """The header in which an identity proxy names the person behind a call, as `X-Auth-Request-Email`: actions are
    recorded with it. From any peer but `user_proxies` it is refused with 403. Each server of such a peer must replace
    or remove it: `deploy/nginx` does so for X-Auth-Request-Email alone."""
    user_proxies: list[str] = Field(default_factory=list[str])
    """Addresses and networks from which identity proxies connect, as `10.0.0.7`. Needed with `user_header`."""

    @model_validator(mode="after")
    def _trusts_somebody(self) -> Self:
        if self.user_header is not None and not self.user_proxies:
            raise ValueError("user_header needs user_proxies: the addresses of proxies that may send it")
        return self

    @model_validator(mode="after")
    def _largest_has_room(self) -> Self:
        if self.large_bodies_bytes < self.max_large_body_bytes:
            raise ValueError("large_bodies_bytes must be at least max_large_body_bytes")
        return self

    @field_validator("trusted_proxies", "user_proxies")
    @classmethod
    def _are_networks(cls, proxies: list[str]) -> list[str]:
        for proxy in proxies:
            try:
                ip_network(proxy)
            except ValueError:
                raise ValueError(f"{proxy!r} is no address and no network, as 10.0.0.7 and 10.0.0.0/8 are") from None
        return proxies


class AuthSection(Section):
    keys_file: Path | None = None
    """Without keys everybody is the default tenant, and only loopback may be bound."""
    ticket_key: str | None = Field(default=None, repr=False)
    """Shared by all gateways; without it each makes its own, and its tickets are good only there."""
    allowed_origins: list[str] = Field(default_factory=list[str])
    """Origins, besides its own, whose pages may call the gateway, as `https://app.example`."""
    allowed_hosts: list[str] = Field(default_factory=list[str])
    """Without keys: Host names, besides this machine's own, that are served."""


class TopicsSection(SharedSection):
    durability: Literal["replicas", "fsync"] = "replicas"
    """replicas: what all in-sync replicas hold is durable; fsync: every record is flushed too, against power loss."""


class ConversationsSection(SharedSection):
    max_topics: int = Field(default=10_000, ge=1)
    """Conversations that there may be in all, if each has a topic; a request that would begin one more fails."""


class GatewaySettings(KafkaProcessSettings):
    """All that a gateway process reads from outside, read once at its start."""

    process = "gateway"

    gateway: GatewaySection = GatewaySection()  # pyright: ignore[reportCallIssue]
    auth: AuthSection = Field(default_factory=AuthSection)
    artifacts: ArtifactsSection = Field(default_factory=ArtifactsSection)
    schema_registry: RegistrySection = Field(default_factory=RegistrySection)
    telemetry: TelemetrySection = Field(default_factory=TelemetrySection)
    models: list[ModelEntry] = Field(default_factory=list[ModelEntry])
    topics: TopicsSection = Field(default_factory=TopicsSection)
    conversations: ConversationsSection = Field(default_factory=ConversationsSection)
    webhooks: WebhooksSection = WebhooksSection()  # pyright: ignore[reportCallIssue]
    queues: list[QueueSection] = Field(default_factory=list[QueueSection])
    """Described in /asyncapi.json."""

    @property
    def artifacts_location(self) -> str:
        """The folder or URL of artifacts, as this process sees it; `ArtifactStore` decides which of the two it is."""
        return self.gateway.artifacts_dir or self.artifacts.location


def allowances_of(settings: GatewaySettings, renew: Callable[[Caller], Caller] = lambda caller: caller) -> Allowances:
    """The limits in force. Without keys there is one tenant, and nobody to hold anything back for."""
    conf, section = settings.gateway, settings.gateway.limits
    keyless = settings.auth.keys_file is None
    defaults, by_tenant = tenant_limits(section, keyless=keyless)
    return Allowances(
        defaults=defaults,
        by_tenant=by_tenant,
        renew=renew,
        totals=Totals(
            max_http=conf.max_http,
            max_sockets=conf.max_sockets,
            max_live=conf.max_live,
            max_pending_submits=conf.max_pending_submits,
            large_bodies_bytes=conf.large_bodies_bytes,
            reserve=0.0 if keyless else section.reserve,
        ),
    )
