"""Which URLs are fetched, and to which addresses a connection is opened."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from hostile_images import BAD_ADDRESSES, PUBLIC, Dns, Network, hostile_server, picture
from kit.refusals import refused
from penstock.common.urls.addresses import is_allowed
from penstock.common.urls.rules import UrlRules
from penstock.processors.images.fetching import ImageFetcher
from penstock.schemas.errors import InvalidRequest, SourceUnavailable, TooLarge

PARAM = "payload.image.url"
PRIVATE = ("10.1.2.3", "172.16.5.4", "192.168.1.1", "127.0.0.1", "::1", "fd12:3456::1")


PUBLIC_ADDRESSES = (PUBLIC, "8.8.8.8", "2606:2800:220:1::1", "::ffff:8.8.8.8", "64:ff9b::808:808")
CREDENTIALS = (
    "169.254.169.254", "fd00:ec2::254", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "168.63.129.16", "0.0.0.0",
    "224.0.0.1", "fe80::1", "::", "100.100.100.200", "2002:a9fe:a9fe::1", "no address", "",
)  # fmt: skip


@pytest.mark.parametrize(
    ("addresses", "internal", "allowed"),
    [
        (PUBLIC_ADDRESSES, False, True),
        (PUBLIC_ADDRESSES, True, True),
        (PRIVATE, True, True),
        (BAD_ADDRESSES, False, False),
        (CREDENTIALS, True, False),
    ],
    ids=["public", "public, of an internal host", "private, of an internal host", "bad", "gives away credentials"],
)
def test_addresses_that_are_allowed(addresses: Sequence[str], internal: bool, allowed: bool) -> None:
    assert {one: is_allowed(one, internal=internal) for one in addresses} == dict.fromkeys(addresses, allowed)


RULES = UrlRules(
    allow_hosts=("images.example.com", ".cdn.example.com", "odd.example.com:8443", "xn--bcher-kva.example"),
    internal_hosts=("minio.storage.svc:9000", "10.0.0.7", "[fd12::7]:8080"),
)


@pytest.mark.parametrize(
    ("url", "internal"),
    [
        ("https://images.example.com/a.png?x=1", False),
        ("https://IMAGES.example.com./a.png", False),
        ("http://a.b.cdn.example.com/", False),
        ("https://odd.example.com:8443/", False),
        ("https://bücher.example/", False),
        ("http://minio.storage.svc:9000/bucket/a.png", True),
        ("http://10.0.0.7/a.png", True),
        ("http://[fd12::7]:8080/a.png", True),
    ],
)
def test_listed_hosts(url: str, internal: bool) -> None:
    assert RULES.target(url, param=PARAM).internal is internal


@pytest.mark.parametrize(
    "url",
    [
        "https://cdn.example.com/",  # the suffix is of names below it
        "https://evilcdn.example.com/",
        "https://images.example.com.evil.org/",
        "https://images.example.com:8443/",
        "https://odd.example.com/",
        "http://minio.storage.svc/",
        "http://a.minio.storage.svc:9000/",
        "http://10.0.0.8/",
        "https://user@images.example.com/",
        "ftp://images.example.com/",
        "images.example.com/a.png",
    ],
)
def test_others_are_refused(url: str) -> None:
    with refused(InvalidRequest, param=PARAM):
        RULES.target(url, param=PARAM)


def test_nothing_is_fetched_unless_it_is_allowed() -> None:
    with pytest.raises(InvalidRequest, match="not fetched from URLs here"):
        UrlRules().target("https://images.example.com/", param=PARAM)


def test_a_redirect_does_not_leave_https() -> None:
    first = RULES.target("https://images.example.com/", param=PARAM)
    assert RULES.target("/b.png", param=PARAM, after=first).url == "https://images.example.com/b.png"
    with pytest.raises(InvalidRequest, match="from https to http"):
        RULES.target("http://images.example.com/", param=PARAM, after=first)


def fetcher(network: Network, rules: UrlRules, **options: Any) -> ImageFetcher:
    conf: dict[str, Any] = {"max_bytes": 200_000, "timeout_s": 60.0, "max_redirects": 3, "resolve": Dns()} | options
    return ImageFetcher(rules, network=network, **conf)


async def test_an_image_is_fetched_from_the_address_that_was_checked() -> None:
    async with hostile_server() as port:
        network = Network(port)
        reading = fetcher(network, UrlRules(allow_hosts=("*",)))
        assert await reading.fetch("http://a.example.com/good", param=PARAM) == picture(Random(1))
        assert network.addresses == [PUBLIC]
        assert await reading.fetch("http://a.example.com/host", param=PARAM) == b"a.example.com"


async def test_a_host_inside_the_cluster_is_fetched_if_named_exactly() -> None:
    async with hostile_server() as port:
        network = Network(port)
        name = f"evil-{BAD_ADDRESSES.index('10.1.2.3')}.example.com"
        found = await fetcher(network, UrlRules(internal_hosts=(name,))).fetch(f"http://{name}/good", param=PARAM)
        assert found == picture(Random(1))
        assert network.addresses == ["10.1.2.3"]
        with pytest.raises(InvalidRequest, match="has an address that images may not come from"):
            await fetcher(network, UrlRules(allow_hosts=(name,))).fetch(f"http://{name}/good", param=PARAM)
        assert network.addresses == ["10.1.2.3"]


async def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with hostile_server() as port:
        network = Network(port)
        await fetcher(network, UrlRules(allow_hosts=("*",))).fetch("http://a.example.com/good", param=PARAM)
        assert network.addresses == [PUBLIC]


async def test_the_limit_of_bytes_is_named() -> None:
    async with hostile_server() as port:
        reading = fetcher(Network(port), UrlRules(allow_hosts=("*",)), max_bytes=100)
        with pytest.raises(TooLarge, match="more than 100 bytes"):
            await reading.fetch("http://a.example.com/good", param=PARAM)


async def test_a_host_that_is_away_is_worth_another_try() -> None:
    async with hostile_server() as port:
        reading = fetcher(Network(port), UrlRules(allow_hosts=("*:81", "*")))
        for url in ("http://a.example.com:81/", "http://nowhere.example.com/", "http://a.example.com/status/503"):
            with pytest.raises(SourceUnavailable) as caught:
                await reading.fetch(url, param=PARAM)
            assert caught.value.retryable
