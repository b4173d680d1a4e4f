"""The one settings object of `penstock summarizer`: defaults, then the TOML of PENSTOCK_CONFIG, then variables."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from penstock.common.configuration import KafkaProcessSettings, RegistrySection, Section, TelemetrySection
from penstock.schemas.records import SummarizePolicy
from penstock.schemas.topics import MOST_PRIORITY


class PolicySection(Section):
    every_turns: int | None = Field(default=None, ge=0)
    """Whole turns that one summary adds to the last; 0 and null: turns do not count."""
    every_tokens: int | None = Field(default=None, ge=0)
    """Tokens that one summary adds to the last, about; 0 and null: tokens do not count."""
    model: str | None = None
    """Which model sums up; null: the best for summarization."""

    @property
    def policy(self) -> SummarizePolicy:
        return SummarizePolicy(every_turns=self.every_turns, every_tokens=self.every_tokens, model=self.model)


class SummarizerSection(PolicySection):
    """The policy is that of conversations which have none of their own. With neither turns nor tokens they are not
    summed up by themselves."""

    tenants: dict[str, PolicySection] = Field(default_factory=dict[str, PolicySection])
    """`[summarizer.tenants.NAME]`: every_turns, every_tokens and model of one tenant, in place of these."""
    max_tokens: int | None = Field(default=None, ge=1)
    """The longest summary, in tokens; null: as the model says."""
    priority: int = Field(default=8, ge=0, le=MOST_PRIORITY)
    """The priority of requests for summaries: 8 and above is low."""
    ttl_s: float = Field(default=21_600.0, gt=0, le=86_400)
    """Seconds that such a request has to end."""
    max_in_flight: int = Field(default=8, ge=1, le=1_000)
    """Conversations that are summed up at once."""
    group_id: str | None = Field(default=None, min_length=1)
    """The consumer group under which it keeps how far each conversation is summed up. Null: `penstock-summarizer`
    behind `kafka.topic_prefix`; see `worker.group_id`."""
    data_dir: Path = Path(".penstock/summarizer")
    """A folder of this process alone: where conversations share a topic it holds a copy of them."""
    look_s: float = Field(default=5.0, gt=0)
    """Seconds between two looks for new conversations."""
    health_host: str = "127.0.0.1"
    """The address of /healthz, /readyz and /metrics."""
    health_port: int = Field(default=8004, ge=0, le=65_535)
    """The port of /healthz, /readyz and /metrics; each such process of a machine needs its own."""

    def of_tenant(self, tenant: str) -> SummarizePolicy:
        """The policy of the tenant's conversations that have none of their own."""
        return self.tenants.get(tenant, self).policy


class SummarizerSettings(KafkaProcessSettings):
    """All that such a process reads from outside, read once at its start."""

    process = "summarizer"

    schema_registry: RegistrySection = Field(default_factory=RegistrySection)
    telemetry: TelemetrySection = Field(default_factory=TelemetrySection)
    summarizer: SummarizerSection = SummarizerSection()  # pyright: ignore[reportCallIssue]
