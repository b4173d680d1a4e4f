"""`[gateway.limits]`: what each tenant may have, and tenants with limits of their own."""

from __future__ import annotations

from pydantic import Field

from penstock.common.configuration import Section
from penstock.gateway.limits.limits import Limits


class TenantLimits(Section):
    """Limits of one tenant that differ from those of all."""

    requests_per_s: float | None = Field(default=None, gt=0)
    """Submissions of a tenant each second, at each gateway; a second's worth may come at once."""
    calls_per_s: float | None = Field(default=None, gt=0)
    """Calls of any route, and frames of sockets, of a tenant each second, at each gateway."""
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
    chosen = section.model_dump(exclude={"reserve", "tenants"}, exclude_unset=keyless)
    by_tenant = {
        tenant: Limits.from_dict({**chosen, **own.model_dump(exclude_unset=True)})
        for tenant, own in section.tenants.items()
    }
    return Limits.from_dict(chosen), by_tenant
