"""`[gateway.limits]`: what each tenant may have, and tenants with limits of their own."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from penstock.common.configuration import Section
from penstock.common.durations import seconds
from penstock.gateway.limits.limits import Limits
from penstock.gateway.limits.retention import Retention

SHORTEST_RETENTION_S = 3_600.0


def _long_enough(value_s: float) -> float:
    """A number of days that was written without its unit would delete all conversations."""
    if 0 < value_s < SHORTEST_RETENTION_S:
        raise ValueError(f"{value_s:g} s is too short: it is 0 (for ever) or at least an hour, as 12h or 30d")
    return value_s


class TenantLimits(Section):
    """Limits of one tenant that differ from those of all."""

    requests_per_s: float | None = Field(default=None, gt=0)
    """Submissions of a tenant each second, at each gateway; a second's worth may come at once."""
    calls_per_s: float | None = Field(default=None, gt=0)
    """HTTP calls of a tenant but those of the scope `admin`, and frames of sockets, each second, at each gateway."""
    cancels_per_s: float | None = Field(default=None, gt=0)
    """Requests of a tenant whose end is asked for each second, at each gateway."""
    tokens_per_minute: int | None = Field(default=None, ge=1)
    """Tokens of a tenant's prompts and answers, counted from the log when a request ends."""
    outstanding: int | None = Field(default=None, ge=0)
    """Requests of a tenant accepted and not done, counted from the log."""
    sockets: int | None = Field(default=None, ge=0)
    """Open WebSockets of a tenant, at each gateway."""
    streams: int | None = Field(default=None, ge=0)
    """Exchanges of a tenant that wait for an outcome (event streams, OpenAI calls, long polls), at each gateway."""
    conversations: int | None = Field(default=None, ge=0)
    """Conversations that a tenant may have."""
    artifact_bytes: int | None = Field(default=None, ge=0)
    """Bytes of all artifacts that a tenant may keep."""
    models: list[str] | None = None
    """The only models that a tenant may ask for, by id or alias; null: all."""
    pools: list[str] | None = None
    """The only pools that a tenant may ask for; null: all."""
    max_priority: int = Field(default=0, ge=0)
    """The most urgent priority that a tenant may ask for; 0 is the most urgent of all."""
    max_vram_bytes: int | None = Field(default=None, ge=0)
    """The largest `requirements.vram_bytes`; null: no limit."""
    max_cpu_memory_bytes: int | None = Field(default=None, ge=0)
    """The largest `requirements.cpu_memory_bytes`; null: no limit."""
    conversation_retention_s: Annotated[float, BeforeValidator(seconds), AfterValidator(_long_enough)] = Field(
        default=0.0, ge=0
    )
    """A conversation that nobody has touched for so long is deleted: seconds, or a text as `30d`, at least an hour;
    0: never. It holds without keys too, and not for a key."""


class LimitsSection(TenantLimits):
    """What each tenant may have. A gateway without keys has one tenant only: there those hold that are set."""

    requests_per_s: float | None = Field(default=100, gt=0)
    calls_per_s: float | None = Field(default=300, gt=0)
    cancels_per_s: float | None = Field(default=50, gt=0)
    tokens_per_minute: int | None = Field(default=10_000_000, ge=1)
    outstanding: int | None = Field(default=20_000, ge=0)
    sockets: int | None = Field(default=1_000, ge=0)
    streams: int | None = Field(default=1_000, ge=0)
    conversations: int | None = Field(default=2_000, ge=0)
    artifact_bytes: int | None = Field(default=10 * 2**30, ge=0)
    reserve: float = Field(default=0.25, ge=0, lt=1)
    """The part of `max_http`, `max_sockets`, `max_live` and `max_pending_submits` that no single tenant can take."""
    tenants: dict[str, TenantLimits] = Field(default_factory=dict[str, TenantLimits])
    """Tenants with limits of their own: what is set there goes before the limits of all."""


def tenant_limits(section: LimitsSection, *, keyless: bool) -> tuple[Limits, dict[str, Limits]]:
    """(of all tenants, of those with limits of their own). Without keys only what is set holds."""
    chosen = section.model_dump(exclude={"reserve", "tenants", "conversation_retention_s"}, exclude_unset=keyless)
    by_tenant = {
        tenant: Limits.from_dict({**chosen, **own.model_dump(exclude={"conversation_retention_s"}, exclude_unset=True)})
        for tenant, own in section.tenants.items()
    }
    return Limits.from_dict(chosen), by_tenant


def retention_of(section: LimitsSection) -> Retention:
    """How long each tenant's conversations are kept."""
    name = "conversation_retention_s"
    return Retention(
        all_s=section.conversation_retention_s,
        tenants_s={
            tenant: own.conversation_retention_s
            for tenant, own in section.tenants.items()
            if name in own.model_fields_set
        },
    )
