"""Tickets: signed, short-lived, single-use at a gateway, good at all that share the key, masked in logs."""

from __future__ import annotations

import logging

import pytest

from penstock.gateway.edge.tickets import TICKET_TTL_S, TicketMask, TicketOffice, mask_access_logs, mask_tickets
from penstock.gateway.limits.callers import Caller
from penstock.schemas.errors import Unauthenticated

CALLER = Caller(tenant="acme", scopes=frozenset({"read"}), max_priority=3, key_id="k1")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_ticket_carries_the_rights_to_another_gateway(clock: Clock) -> None:
    ticket, expires_at = TicketOffice("shared", clock).issue(CALLER)
    assert expires_at == clock.now + TICKET_TTL_S
    assert TicketOffice("shared", clock).redeem(ticket) == CALLER


def test_a_ticket_works_once_per_gateway(clock: Clock) -> None:
    office = TicketOffice("shared", clock)
    ticket, _ = office.issue(CALLER)
    office.redeem(ticket)
    with pytest.raises(Unauthenticated, match="used before"):
        office.redeem(ticket)


def test_a_ticket_ends_after_a_minute(clock: Clock) -> None:
    office = TicketOffice("shared", clock)
    ticket, _ = office.issue(CALLER)
    clock.now += TICKET_TTL_S
    with pytest.raises(Unauthenticated, match="expired"):
        office.redeem(ticket)


@pytest.mark.parametrize("ticket", ["", ".", "a.b", "e30.e30", "\udcff.x", "=.=", "é.é"])
def test_nonsense_is_unauthenticated(clock: Clock, ticket: str) -> None:
    with pytest.raises(Unauthenticated):
        TicketOffice("shared", clock).redeem(ticket)


def test_a_changed_or_foreign_ticket_is_unauthenticated(clock: Clock) -> None:
    office = TicketOffice("shared", clock)
    ticket, _ = office.issue(CALLER)
    body, signature = ticket.split(".")
    for forged in (body[:-2] + "AA." + signature, body + "." + signature[:-2] + "AA", body + "."):
        with pytest.raises(Unauthenticated):
            office.redeem(forged)
    with pytest.raises(Unauthenticated):
        TicketOffice("other", clock).redeem(ticket)
    with pytest.raises(Unauthenticated):
        TicketOffice(None, clock).redeem(TicketOffice(None, clock).issue(CALLER)[0])


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


def test_a_ticket_for_an_artifact_reads_that_one_until_it_expires(clock: Clock) -> None:
    ticket, expires_at = TicketOffice("shared", clock).issue_for_artifact(CALLER, "a1", 300)
    office = TicketOffice("shared", clock)
    assert expires_at == clock.now + 300
    for _ in range(2):  # an image is shown more than once
        reader = office.redeem_for_artifact(ticket, "a1")
        assert (reader.tenant, reader.scopes, reader.key_id) == ("acme", frozenset({"read"}), "k1")
    with pytest.raises(Unauthenticated, match="another"):
        office.redeem_for_artifact(ticket, "a2")
    clock.now += 300
    with pytest.raises(Unauthenticated, match="expired"):
        office.redeem_for_artifact(ticket, "a1")


def test_no_ticket_passes_for_one_of_the_other_kind(clock: Clock) -> None:
    office = TicketOffice("shared", clock)
    for_artifact, _ = office.issue_for_artifact(CALLER, "a1", 300)
    for_socket, _ = office.issue(CALLER)
    with pytest.raises(Unauthenticated, match="not one of ours"):
        office.redeem(for_artifact)
    for ticket in (for_socket, "", "a.b", "é.é", for_artifact[:-2]):
        with pytest.raises(Unauthenticated, match="not one of ours"):
            office.redeem_for_artifact(ticket, "a1")
