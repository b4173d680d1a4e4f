"""The cluster id is an argument of Kafka's tool: it must never look like an option."""

from __future__ import annotations

from penstock.cli.embedded_kafka import new_cluster_id


def test_a_cluster_id_never_looks_like_an_option() -> None:
    drawn = iter([b"\xf8" + bytes(15), b"\xfb" + bytes(15), b"\xfc" + bytes(15)])
    assert new_cluster_id(lambda: next(drawn)) == "_AAAAAAAAAAAAAAAAAAAAA"
    assert len(new_cluster_id()) == 22
