"""Who may name the person behind a call, and which names there are."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from penstock.gateway.edge.identity import PEER, IdentityProxies
from penstock.gateway.edge.tickets import TicketOffice
from penstock.gateway.limits.callers import Caller
from penstock.schemas.errors import Forbidden, InvalidRequest, PenstockError

NETWORKS = ["10.0.0.0/24", "::1"]


@pytest.mark.parametrize(
    ("peer", "sent", "found"),
    [
        ("10.0.0.7", [b"ann@example.com"], "ann@example.com"),
        ("::ffff:10.0.0.7", [b" ann "], "ann"),
        ("::1", ["Ännchen".encode()], "Ännchen"),
        ("10.0.0.7", [], None),
        ("10.0.0.7", [b""], None),
        ("10.0.1.7", [], None),
        ("10.0.1.7", [b"ann"], Forbidden),
        ("10.0.1.7", [b""], Forbidden),
        ("fe80::1", [b"ann"], Forbidden),
        ("/run/socket", [b"ann"], Forbidden),
        (None, [b"ann"], Forbidden),
        ("10.0.0.7", [b"ann", b"eve"], InvalidRequest),
        ("10.0.0.7", [b"\xff"], InvalidRequest),
        ("10.0.0.7", [b"a\x1b[31m"], InvalidRequest),
        ("10.0.0.7", [b"x" * 201], InvalidRequest),
    ],
)
def test_only_identity_proxies_name_people(
    peer: str | None, sent: list[bytes], found: str | type[PenstockError] | None
) -> None:
    scope = {PEER: None if peer is None else (peer, 1), "client": ("10.0.0.7", 1)}
    headers = Headers(raw=[(b"x-user", value) for value in sent])
    if isinstance(found, type):
        with pytest.raises(found):
            IdentityProxies("X-User", NETWORKS).user_of(scope, headers)
    else:
        assert IdentityProxies("X-User", NETWORKS).user_of(scope, headers) == found
    assert IdentityProxies().user_of(scope, headers) is None


@pytest.mark.parametrize("user", ["ann", None])
def test_a_ticket_names_who_asked_for_it(user: str | None) -> None:
    office = TicketOffice("shared")
    ticket, _ = office.issue(Caller(key_id="k", user=user), use="session")
    grant = office.redeem(ticket, ("session",)).grant
    assert Caller(key_id="k").narrowed(grant).user == user
