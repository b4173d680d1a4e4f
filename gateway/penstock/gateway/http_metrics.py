"""HTTP as the gateway answers it: how many calls of each route, how long they take, and what is refused to whom."""

from __future__ import annotations

from functools import cache

from prometheus_client import CollectorRegistry, Counter, Histogram

from penstock.common.labels import BoundedLabel

SECONDS = (0.005, 0.025, 0.1, 0.5, 2.5, 10, 60, 600)
UNKNOWN = "none"
"""The route of a path that no route has, the status of an answer that did not begin."""


class HttpMetrics:
    """Routes are named as in the documentation, so that there are as many series as routes."""

    def __init__(self, registry: CollectorRegistry, tenants: BoundedLabel) -> None:
        labels, text = ["method", "route", "status"], "HTTP calls answered."
        self._calls = cache(Counter("penstock_http_requests", text, labels, registry=registry).labels)
        text = "From the head of an HTTP call to the end of its answer."
        seconds = Histogram("penstock_http_seconds", text, labels[:2], buckets=SECONDS, registry=registry)
        self._seconds = cache(seconds.labels)
        text = "HTTP calls refused, by the code of the error."
        self._refused = cache(Counter("penstock_refused", text, ["tenant", "code"], registry=registry).labels)
        text = "Calls without a good key or ticket, by what they sent."
        self._unknown = Counter("penstock_auth_failures", text, ["sent"], registry=registry)
        self._tenants = tenants

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """`route`: as documented, empty for none. `status`: 0 for an answer that did not begin."""
        method = method if route else UNKNOWN
        self._calls(method, route or UNKNOWN, str(status or UNKNOWN)).inc()
        self._seconds(method, route or UNKNOWN).observe(seconds)

    def unauthenticated(self, sent: str) -> None:
        """`sent`: nothing, key or ticket."""
        self._unknown.labels(sent).inc()

    def refused(self, tenant: str | None, code: str) -> None:
        """`tenant`: None for a call without a key that is known."""
        self._refused(self._tenants.of(tenant), code).inc()
