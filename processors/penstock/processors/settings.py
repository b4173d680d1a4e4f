"""The worker's one settings object: defaults, then the TOML file of PENSTOCK_CONFIG, then PENSTOCK_* variables."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

from pydantic import BeforeValidator, Field, field_validator, model_validator

from penstock.common.configuration import (
    ArtifactsSection,
    KafkaProcessSettings,
    RegistrySection,
    Section,
    SharedSection,
    TelemetrySection,
)
from penstock.common.model_entry import ModelEntry, RetriesSection, check_names
from penstock.processors.hardware.entries import DeviceSection, check_entries
from penstock.schemas.topics import GATEWAY_KEY


class WorkerSection(Section):
    successors = {  # noqa: RUF012
        "inflight_cap": "set intake_bytes",
        "retry_delay_s": "set retries.first_s",
        "control_horizon_s": "remove it, commands are applied for a day",
        "control_remembered": "remove it, 100,000 commands of each kind are remembered",
    }

    worker_id: str | None = None
    """The worker's name on `inference.worker` and in results; null: host name and process id. Names that begin with
    `gateway/` are kept for the reports of gateways."""
    group_id: str | None = None
    """The consumer group that shares the work, one for all pools; never delete or change it while requests live. Null:
    `penstock-worker` behind `kafka.topic_prefix`. An installation that began with an earlier release keeps the group
    without the prefix: its offsets there show that. Set it if the brokers do not let this client look at both groups,
    or for a name of your own; all workers of an installation must have the same."""
    pool: str | None = None
    """Serve the request topics of this pool instead of the common ones."""
    data_dir: Path = Path(".penstock/worker")
    """The folder of the crash journal and of outputs that wait for their store. While another worker holds it, this one
    takes the first free one of `worker-2`, `worker-3` and so on, beside it."""
    artifacts_dir: str | None = None
    """Only when the worker sees the artifacts under another name than `artifacts.location`: a folder or a URL."""
    health_host: str = "127.0.0.1"
    """The address of /healthz, /readyz and /metrics."""
    health_port: int = Field(default=8001, ge=0, le=65_535)
    """The port of /healthz, /readyz and /metrics; each worker of a machine needs its own."""

    intake_bytes: int = Field(default=256 << 20, ge=1 << 20)
    """Memory for requests that wait: half for bytes (an eighth of it all for those that end while they are parked, the
    rest with a share for each class of each model), half for the facts of those whose bytes are read again when their
    turn is near."""
    output_bytes: int = Field(default=128 << 20, ge=1 << 20)
    """Memory for chunks and finished outputs that the broker or the store of artifacts does not take. When it is full
    nothing more starts; what runs then may exceed it."""
    spool_bytes: int = Field(default=4 << 30, ge=0)
    """Disk in `data_dir` for finished outputs that the store of artifacts does not take; 0: they stay in memory."""
    commit_span: int = Field(default=50_000, ge=16)
    """Offsets between the oldest unfinished record of a partition and the newest taken: so far the worker sees."""
    aging_s: float = Field(default=20.0, gt=0)
    """Seconds of waiting after which work is aged: it then has a share of the starts."""
    aged_share: int = Field(default=8, ge=2)
    """Of this many starts on a model, one goes to aged work of a lower class, if there is any."""

    slack: bool = False
    """Low work leaves as much of each model's engines free as more urgent work has needed recently."""
    slack_share: float = Field(default=0.125, gt=0, le=1)
    """With `slack`: the share of a model's engines that low work may use in any case while nothing urgent waits."""

    chunk_linger_ms: int = Field(default=30, ge=0, le=50)
    """Milliseconds for which new text of a stream is collected before it is published."""
    status_linger_ms: int = Field(default=25, ge=0)
    """A status that is not terminal is published only when it lasts this long."""
    max_execution_s: float = Field(default=900.0, gt=0)
    """The longest run; a request's own execution_timeout_ms can only shorten it."""
    retries: RetriesSection = Field(default_factory=RetriesSection)
    """When a failed attempt runs again: `{backoff, first_s, longest_s}`. `backoff` is `doubling` (from first_s up to
    longest_s) or `fixed` (always first_s); up to half of each wait is left out at random. A model may have its own."""

    @field_validator("worker_id")
    @classmethod
    def _is_no_gateways_key(cls, worker_id: str | None) -> str | None:
        if worker_id is not None and worker_id.startswith(GATEWAY_KEY):
            raise ValueError(f"a worker's name must not begin with {GATEWAY_KEY}")
        return worker_id

    drain_s: float = Field(default=20.0, ge=0)
    """Seconds that running work has to end when the worker stops; the rest is handed back."""
    model_absent_s: float = Field(default=60.0, gt=0)
    """A request for a model that this worker does not serve waits while a live worker of its pool reports the model,
    and for so many seconds more. Then it fails. One whose model cannot be loaded here waits while another worker has
    it loaded, and for so many seconds more."""
    stall_s: float = Field(default=60.0, gt=0)
    """Seconds after which a partition that has lag and room, and has not moved on, ends the worker."""
    session_timeout_s: float = Field(default=10.0, gt=0)
    """Seconds without a heartbeat after which the broker gives this worker's partitions to others."""
    heartbeat_s: float = Field(default=2.0, gt=0)
    """Seconds between heartbeats to the group's coordinator."""

    @model_validator(mode="after")
    def _beats_often_enough(self) -> Self:
        if self.heartbeat_s >= self.session_timeout_s:
            raise ValueError(
                f"heartbeat_s is {self.heartbeat_s:g}, and session_timeout_s {self.session_timeout_s:g}: between two"
                " heartbeats the broker would give this worker's partitions to others"
            )
        return self

    commit_interval_s: float = Field(default=0.3, gt=0)
    """Seconds between commits of what is finished."""
    fetch_wait_ms: int = Field(default=100, ge=1)
    """Milliseconds for which a broker may hold back a fetch to fill it."""
    on_lost_log: Literal["beginning", "end"] = "beginning"
    """Where reading goes on in a log that is shorter than the group's commit, because the broker has lost its end: at
    its beginning (what it holds runs again, and readers ignore second outcomes), or at its end (that does not run)."""
    state_interval_s: float = Field(default=2.0, gt=0)
    """Seconds between this worker's records on `inference.worker`."""


class SchedulerSection(Section):
    """How long requests may wait."""

    dynamic_ttl: bool = False
    """A request that names no deadline lives for max(ttl_floor_s, ttl_factor × the 95th percentile of the waits of its
    class), in place of the default; its status says `ttl_ms`."""
    ttl_floor_s: float = Field(default=60.0, gt=0)
    """With `dynamic_ttl`: the shortest time to live, in seconds."""
    ttl_factor: float = Field(default=3.0, ge=1)
    """With `dynamic_ttl`: how many times the 95th percentile of the waits of its class."""
    affinity_s: float = Field(default=0.5, ge=0)
    """So long, in seconds, a turn of a conversation waits for the replica that has the conversation's beginning."""
    lookahead_s: float = Field(default=5.0, ge=0)
    """Of models whose oldest requests came within so many seconds, the one that shortens waits most is loaded first."""
    reserve_after_s: float = Field(default=5.0, ge=0)
    """What waits for memory lets smaller ones pass for so many seconds; then what becomes free is kept for it."""
    longest_reservation_s: float = Field(default=30.0, gt=0)
    """So long, in seconds, room is kept at first. Then others pass for as long, then it is kept for twice as long."""
    scale_after_s: float = Field(default=5.0, ge=0)
    """A model is full for so many seconds before it gets one replica more, where memory lies free."""
    turn_factor: float = Field(default=15.0, ge=1)
    """A model that others of its class wait for keeps its place for so many times what a load and a run of it take."""


class ConversationsSection(Section):
    successors = {"cached": "set cached_bytes", "read_deadline_s": "remove it; a turn waits for Kafka"}  # noqa: RUF012

    max_topics: int = Field(default=10_000, ge=1)
    """Conversations that there may be in all, if each has a topic; a request that would begin one more fails."""
    threads: int = Field(default=4, ge=1)
    """Conversations that are read or written at once."""
    cached_bytes: int = Field(default=64 << 20, ge=0)
    """Bytes of memory for conversations that this worker keeps, so that a turn reads only the unseen tail."""


class MemorySection(Section):
    """What the ledger may grant of this machine's memory; `[[devices]]` says it of single devices."""

    successors = {"cpu_bytes": "set limit_bytes of a [[devices]] table of the kind cpu"}  # noqa: RUF012

    cpu_reserve_bytes: int = Field(default=1 << 30, ge=0)
    """Main memory that is left to others."""
    gpu_reserve_bytes: int = Field(default=1 << 30, ge=0)
    """Memory of each GPU that is left to others."""


def _by_own_path(value: Any) -> Any:
    return {str(path): path for path in cast("list[Any]", value)} if isinstance(value, list) else value


class ImagesSection(Section):
    """Images that come in: from where they are fetched, and what decoding one may take."""

    allow_hosts: list[str] = Field(default_factory=list[str])
    """Hosts on the internet that a request's image URL may name: `images.example.com`, `.example.com` for all names
    below it, or `*`; with `:port` where it is not the usual one. Only at public addresses. Empty: none."""
    internal_hosts: list[str] = Field(default_factory=list[str])
    """Hosts inside the cluster, by their exact names: these may have private addresses. Not behind names that others
    control. Link-local and metadata addresses are refused even here."""
    folders: Annotated[dict[str, Path], BeforeValidator(_by_own_path)] = Field(default_factory=dict[str, Path])
    """Folders of the worker's machine from which requests may name images, as `image_path` or a `file:` URL:
    `["/data/in"]`, or a table of the path in requests and the folder that it means, `{"/data/in" = "/mnt/photos"}`.
    Every caller may read every image below them. Links that lead out of the folder are refused. Empty: none."""
    max_bytes: int = Field(default=20 << 20, ge=1_000)
    """The largest image, in bytes as it comes: fetched, or of an artifact."""
    timeout_s: float = Field(default=20.0, gt=0)
    """Seconds in which an image must have come from its URL, redirects included."""
    max_redirects: int = Field(default=3, ge=0)
    """Redirects that are followed; each is checked as the first URL."""
    formats: list[Literal["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"]] = Field(
        default_factory=lambda: ["PNG", "JPEG", "WEBP", "GIF", "BMP"]
    )
    """Formats that are decoded; the format of an image is detected from its bytes."""
    max_pixels: int = Field(default=50_000_000, ge=1)
    """Width times height of the largest image that is decoded. A decoder may have 512 MiB and 24 bytes for each."""
    max_side: int = Field(default=16_384, ge=1)
    """The longest side of an image that is decoded, in pixels."""
    decode_cpu_s: int = Field(default=10, ge=1)
    """Seconds of processor time that decoding an image may take."""
    decoders: int = Field(default=2, ge=1)
    """Images that are decoded at once, each in a process of its own."""

    @field_validator("folders")
    @classmethod
    def _are_absolute(cls, value: dict[str, Path]) -> dict[str, Path]:
        for path in (*value, *map(str, value.values())):
            if not path.startswith("/") or ".." in Path(path).parts or Path(path) == Path("/"):
                raise ValueError(f"{path!r} must be an absolute path of a folder below /")
        return value


class TopicsSection(SharedSection):
    durability: str = "replicas"
    """replicas, or fsync: flush conversation topics on every record."""


class WorkerSettings(KafkaProcessSettings):
    """All that a worker process reads from outside, read once at its start."""

    process = "worker"

    topics: TopicsSection = Field(default_factory=TopicsSection)
    worker: WorkerSection = Field(default_factory=WorkerSection)
    scheduler: SchedulerSection = Field(default_factory=SchedulerSection)
    conversations: ConversationsSection = Field(default_factory=ConversationsSection)
    memory: MemorySection = Field(default_factory=MemorySection)
    artifacts: ArtifactsSection = Field(default_factory=ArtifactsSection)
    images: ImagesSection = Field(default_factory=ImagesSection)
    schema_registry: RegistrySection = Field(default_factory=RegistrySection)
    telemetry: TelemetrySection = Field(default_factory=TelemetrySection)
    devices: list[DeviceSection] = Field(default_factory=list[DeviceSection])
    models: list[ModelEntry] = Field(default_factory=list[ModelEntry])

    @field_validator("devices")
    @classmethod
    def _devices_differ(cls, devices: list[DeviceSection]) -> list[DeviceSection]:
        check_entries(devices)
        return devices

    @field_validator("models")
    @classmethod
    def _names_differ(cls, models: list[ModelEntry]) -> list[ModelEntry]:
        check_names(models)
        return models

    @property
    def artifacts_location(self) -> str:
        """The folder or URL of artifacts, as this process sees it; `ArtifactStore` decides which of the two it is."""
        return self.worker.artifacts_dir or self.artifacts.location

    @property
    def worker_id(self) -> str:
        return self.worker.worker_id or f"{socket.gethostname()}-{os.getpid()}"
