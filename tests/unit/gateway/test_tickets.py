"""Tickets: signed, short-lived, single-use at a gateway, good at all that share the key, masked in logs."""

from __future__ import annotations

import logging

import pytest

from penstock.gateway.edge.tickets import TTL_S, Redeemed, TicketMask, TicketOffice, Use, mask_access_logs, mask_tickets
from penstock.gateway.limits.callers import Caller, Grant
from penstock.schemas.errors import Unauthenticated

CALLER = Caller(tenant="acme", scopes=frozenset({"read"}), max_priority=3, key_id="k1")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def office(clock: Clock) -> TicketOffice:
    return TicketOffice("shared", clock)


def test_a_ticket_carries_the_rights_to_another_gateway(office: TicketOffice, clock: Clock) -> None:
    """Once at each gateway, for a minute."""
    ticket, expires_at = office.issue(CALLER)
    assert expires_at == clock.now + TTL_S["socket"][0]
    grant = Grant(scopes=CALLER.scopes)
    for one in (office, TicketOffice("shared", clock)):
        assert one.redeem(ticket) == Redeemed(tenant="acme", key_id="k1", grant=grant)
        with pytest.raises(Unauthenticated, match="used before"):
            one.redeem(ticket)
    clock.now = expires_at
    with pytest.raises(Unauthenticated, match="expired"):
        TicketOffice("shared", clock).redeem(ticket)


@pytest.mark.parametrize("use", ["read", "session"])
def test_a_ticket_keeps_what_it_is_narrowed_to_and_is_good_until_it_expires(
    office: TicketOffice, clock: Clock, use: Use
) -> None:
    ticket, expires_at = office.issue(CALLER, use=use, scopes=["read"], ttl_s=9, conversation_id="c", user_id="u")
    assert expires_at == clock.now + 9
    grant = Grant(scopes=frozenset({"read"}), conversation_id="c", user_id="u", expires_at=expires_at)
    for _ in range(2):
        assert office.redeem(ticket, [use]).grant == grant
    with pytest.raises(Unauthenticated, match="for this route"):
        office.redeem(ticket, ["read" if use == "session" else "session", "socket", "artifact"])
    clock.now += 9
    with pytest.raises(Unauthenticated, match="expired"):
        office.redeem(ticket, [use])


def test_a_ticket_of_another_kind_or_that_nobody_gave_out_is_none(office: TicketOffice, clock: Clock) -> None:
    for_socket, _ = office.issue(CALLER)
    for_artifact, _ = office.issue_for_artifact(CALLER, "a1", 300)
    body, signature = for_socket.split(".")
    changed = [body[:-2] + "AA." + signature, body + "." + signature[:-2] + "AA", body + "."]
    malformed = ["", ".", "a.b", "e30.e30", "\udcff.x", "=.=", "é.é"]
    for ticket in (*changed, *malformed, for_artifact):
        with pytest.raises(Unauthenticated, match="none of this gateway"):
            office.redeem(ticket)
    for ticket in (*malformed, for_socket, for_artifact[:-2]):
        with pytest.raises(Unauthenticated, match="none of this gateway"):
            office.redeem(ticket, ["artifact"], "a1")
    for issued_by, redeemed_by in (("shared", "other"), (None, None)):  # without a secret each office has its own
        ticket, _ = TicketOffice(issued_by, clock).issue(CALLER)
        with pytest.raises(Unauthenticated):
            TicketOffice(redeemed_by, clock).redeem(ticket)


def test_tickets_are_masked_in_access_logs() -> None:
    assert mask_tickets("/v1/ws?a=1&ticket=abc.def&b=2") == "/v1/ws?a=1&ticket=***&b=2"
    record = logging.LogRecord(
        "uvicorn.access", 20, "", 0, '%s - "WebSocket %s" [accepted]', ("1.2.3.4:5", "/v1/ws?ticket=s.t"), None
    )
    assert TicketMask().filter(record)
    assert record.getMessage() == '1.2.3.4:5 - "WebSocket /v1/ws?ticket=***" [accepted]'
    mask_access_logs()
    mask_access_logs()
    filters = logging.getLogger("uvicorn.access").filters
    assert sum(isinstance(item, TicketMask) for item in filters) == 1


def test_a_ticket_for_an_artifact_reads_that_one_until_it_expires(office: TicketOffice, clock: Clock) -> None:
    """One of a session expires with it."""
    of_session = CALLER.narrowed(Grant(scopes=CALLER.scopes, expires_at=clock.now + 5))
    assert office.issue_for_artifact(of_session, "a1", 300)[1] == clock.now + 5
    ticket, expires_at = TicketOffice("shared", clock).issue_for_artifact(CALLER, "a1", 300)
    assert expires_at == clock.now + 300
    for _ in range(2):  # an image is shown more than once
        reader = office.redeem(ticket, ["artifact"], "a1")
        assert (reader.tenant, reader.grant.scopes, reader.key_id) == ("acme", frozenset({"read"}), "k1")
    with pytest.raises(Unauthenticated, match="another"):
        office.redeem(ticket, ["artifact"], "a2")
    clock.now += 300
    with pytest.raises(Unauthenticated, match="expired"):
        office.redeem(ticket, ["artifact"], "a1")
