"""Which addresses may be connected to for a caller's URL. Pure."""

from __future__ import annotations

import ipaddress

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

NEVER: tuple[Network, ...] = tuple(
    ipaddress.ip_network(text)
    for text in (
        "0.0.0.0/8",
        "169.254.0.0/16",  # link-local, and the metadata of most clouds
        "168.63.129.16/32",  # Azure's, though public
        "100.100.100.200/32",  # Alibaba's metadata
        "192.0.0.192/32",  # Oracle's
        "255.255.255.255/32",
        "::/128",
        "fe80::/10",
        "fec0::/10",  # site-local, given up long ago
        "fd00:ec2::254/128",  # metadata of AWS
        "fd20:ce::254/128",  # of Google's
    )
)
"""Refused even for hosts inside the cluster: they give away credentials, or are no hosts at all."""

_EMBEDDED_BITS: tuple[tuple[ipaddress.IPv6Network, int], ...] = (
    (ipaddress.IPv6Network("::ffff:0:0/96"), 0),  # IPv4-mapped
    (ipaddress.IPv6Network("::ffff:0:0:0/96"), 0),  # IPv4-translated
    (ipaddress.IPv6Network("::/96"), 0),  # IPv4-compatible
    (ipaddress.IPv6Network("64:ff9b::/96"), 0),  # NAT64
    (ipaddress.IPv6Network("2002::/16"), 80),  # 6to4
)
"""Forms of IPv6 that lead to an IPv4 address, and by how many bits that is shifted."""

_TUNNELS = (ipaddress.IPv6Network("64:ff9b:1::/48"), ipaddress.IPv6Network("2001::/32"))
"""Forms that may lead anywhere: NAT64 of local use, Teredo."""


def is_allowed(text: str, *, internal: bool) -> bool:
    """Whether an address may be connected to: a public one, or with `internal` also private and loopback ones.

    False for what is no address.
    """
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and (address.scope_id or any(address in net for net in _TUNNELS)):
        return False
    return all(_allowed_alone(one, internal) for one in (address, *_embedded(address)))


def _allowed_alone(address: Address, internal: bool) -> bool:
    if any(address.version == net.version and address in net for net in NEVER):
        return False
    if address.is_multicast or address.is_unspecified or address.is_link_local:
        return False
    if isinstance(address, ipaddress.IPv6Address) and _embedded(address):
        return True  # what it leads to decides
    if internal:
        return address.is_global or address.is_private or address.is_loopback
    return address.is_global and not address.is_reserved


def _embedded(address: Address) -> tuple[ipaddress.IPv4Address, ...]:
    """The IPv4 address that an IPv6 address stands for, if it does."""
    if isinstance(address, ipaddress.IPv4Address) or address == ipaddress.IPv6Address("::1"):
        return ()
    return tuple(
        ipaddress.IPv4Address((int(address) >> shift) & 0xFFFFFFFF)
        for network, shift in _EMBEDDED_BITS
        if address in network
    )
