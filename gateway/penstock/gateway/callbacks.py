"""Which callbacks are possible here: `[webhooks]`. Gateways read it to refuse others, `penstock webhooks` to send."""

from __future__ import annotations

import base64
import ipaddress

from pydantic import Field, SecretStr, field_validator

from penstock.common.configuration import Section
from penstock.common.urls.addresses import is_allowed
from penstock.common.urls.rules import Target, UrlRules
from penstock.schemas.errors import InvalidRequest, UnsupportedParameter

PREFIX = "whsec_"
KEY_BYTES = (24, 64)
"""How long the standard wants the key of a secret to be."""

Secrets = SecretStr | list[SecretStr]


class WebhooksSection(Section):
    secret: Secrets | None = None
    """Signs webhooks: `whsec_` and the base64 of 24 to 64 random bytes. Of a list each one signs, the newest first, so
    that receivers can change from one to the next. `penstock up` makes one."""
    secrets: dict[str, Secrets] = Field(default_factory=dict[str, Secrets])
    """`[webhooks.secrets]`: by tenant, in place of `secret`."""
    allow_hosts: list[str] = Field(default_factory=lambda: ["*"])
    """Hosts that may be called, at public addresses only: names, `.example.com` for all below it, `*` for all. The
    usual port is meant, unless an entry ends in `:port`."""
    internal_hosts: list[str] = Field(default_factory=list[str])
    """Exact names or addresses, as `host` or `host:port`, that may be called at private addresses too."""
    group_id: str | None = Field(default=None, min_length=1)
    """The consumer group of all processes that share the work; `-statuses` behind it names the one for statuses. Null:
    `penstock-webhooks` behind `kafka.topic_prefix`; see `worker.group_id`."""
    health_host: str = "127.0.0.1"
    """The address of /healthz, /readyz and /metrics."""
    health_port: int = Field(default=8003, ge=0, le=65_535)
    """The port of /healthz, /readyz and /metrics; each such process of a machine needs its own."""
    timeout_s: float = Field(default=15.0, gt=0, le=60)
    """Seconds that a receiver has to answer."""
    max_in_flight: int = Field(default=64, ge=2)
    """Calls at once. A tenant has at most half of them, a host at most an eighth."""
    first_retry_s: float = Field(default=5.0, gt=0)
    """Seconds until the second attempt; later waits double up to an hour. Up to half of each is left out at random."""
    give_up_s: float = Field(default=86_400.0, gt=0, le=172_800)
    """Seconds for which a webhook is tried; then it becomes a dead letter."""

    @field_validator("secret", mode="before")
    @classmethod
    def _none_if_empty(cls, value: object) -> object:
        """A compose file hands an unset variable on as an empty one."""
        return None if value == "" else value

    @field_validator("secret", "secrets")
    @classmethod
    def _are_keys(cls, value: Secrets | dict[str, Secrets] | None) -> Secrets | dict[str, Secrets] | None:
        given = list(value.values()) if isinstance(value, dict) else [] if value is None else [value]
        for one in given:
            if not (texts := _texts(one)) or not all(_is_key(text) for text in texts):
                raise ValueError(
                    f"a secret is {PREFIX} and the base64 of {KEY_BYTES[0]} to {KEY_BYTES[1]} random bytes"
                )
        return value


class Callbacks:
    """The section's answers."""

    def __init__(self, section: WebhooksSection) -> None:
        self._secret = section.secret
        self._secrets = section.secrets
        self._rules = UrlRules(
            section.allow_hosts,
            section.internal_hosts,
            closed_hint="nothing is called back here: webhooks.allow_hosts and webhooks.internal_hosts are empty",
            purpose="may be called (webhooks.allow_hosts, webhooks.internal_hosts)",
        )

    def secrets(self, tenant: str) -> list[str]:
        """What signs this tenant's webhooks; empty where nothing does."""
        found = self._secrets.get(tenant, self._secret)
        return [] if found is None else _texts(found)

    def target(self, url: str) -> Target:
        """Where a call goes; what a name resolves to is checked when it is connected to. Raises InvalidRequest."""
        target = self._rules.target(url, param="callback_url")
        if not _may_be_called(target):
            raise InvalidRequest(
                f"callback_url: {target.host} has no public address; webhooks.internal_hosts may name it",
                param="callback_url",
            )
        return target

    def check(self, tenant: str, url: str) -> None:
        """Refuse a callback that would never be delivered. Raises UnsupportedParameter, InvalidRequest."""
        if not self.secrets(tenant):
            raise UnsupportedParameter(
                "callback_url needs a secret that signs the calls: set webhooks.secret", param="callback_url"
            )
        self.target(url)


def _may_be_called(target: Target) -> bool:
    """False for an address that may not be connected to. Of a name only the address says that."""
    if target.host == "localhost" or target.host.endswith(".localhost"):
        return target.internal
    try:
        ipaddress.ip_address(target.host)
    except ValueError:
        return True
    return is_allowed(target.host, internal=target.internal)


def _texts(secrets: Secrets) -> list[str]:
    return [one.get_secret_value() for one in (secrets if isinstance(secrets, list) else [secrets])]


def _is_key(text: str) -> bool:
    encoded = text.removeprefix(PREFIX).rstrip("=")
    try:
        key = base64.b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)
    except ValueError:  # no base64, or not even ASCII
        return False
    return text.startswith(PREFIX) and KEY_BYTES[0] <= len(key) <= KEY_BYTES[1]
