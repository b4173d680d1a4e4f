"""When the certificates of a process expire: which files count, and from when on they expire soon."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kit.certificates import Authority
from penstock.common.certificates import SOON_S, Certificates, Validity
from penstock.common.settings import KafkaSettings
from penstock.schemas.registry import RegistryAccess

DAY_S = 86_400.0


@pytest.mark.parametrize(
    ("life_s", "soon_s"),
    [(90 * DAY_S, SOON_S), (70 * DAY_S, SOON_S), (30 * DAY_S, 6 * DAY_S), (DAY_S, DAY_S / 5)],
)
def test_a_certificate_of_a_short_life_expires_soon_later(life_s: float, soon_s: float) -> None:
    valid = Validity(1_000.0, 1_000.0 + life_s)
    assert not valid.ends_soon(valid.ends_s - soon_s - 1)
    assert valid.ends_soon(valid.ends_s - soon_s + 1)
    assert valid.ends_soon(valid.ends_s + DAY_S)


def test_files_and_texts_of_kafka_and_the_registry_count(tmp_path: Path) -> None:
    old, new = Authority(tmp_path / "old", lifetime=timedelta(days=1)), Authority(tmp_path / "new")
    bundle = tmp_path / "bundle.pem"
    bundle.write_bytes(old.certificate.read_bytes() + new.certificate.read_bytes())
    soon = new.issue("soon", lifetime=timedelta(days=3))
    gone, good = new.issue("gone", lifetime=timedelta(hours=-1)), new.issue("good")
    (broken := tmp_path / "broken.pem").write_text("no certificate")

    def expiring(registry: RegistryAccess | None = None, **security: Path | str) -> dict[str, float]:
        """In days, by the last words of the setting."""
        names = {name.replace("_", "."): str(value) for name, value in security.items()}
        certificates = Certificates(KafkaSettings(security=names), registry)
        found = certificates.expiring().items()
        return {one.strip('"').rpartition("ssl.")[2]: round((at / 1000 - time.time()) / DAY_S, 2) for one, at in found}

    assert expiring() == {}
    assert expiring(ssl_certificate_location=soon.certificate) == {"certificate.location": 3.0}
    assert expiring(ssl_certificate_location=gone.certificate, ssl_key_location=gone.key) == {
        "certificate.location": -0.04
    }
    assert expiring(ssl_ca_location=old.certificate, ssl_certificate_location=good.certificate) == {"ca.location": 1.0}
    assert expiring(ssl_ca_location=bundle) == {}, "another authority of the bundle is trusted for longer"
    texts = {"ssl_ca_pem": old.certificate.read_text(), "ssl_certificate_pem": soon.certificate.read_text()}
    assert expiring(None, **texts) == {"ca.pem": 1.0, "certificate.pem": 3.0}
    authority = f"# de la société\n{old.certificate.read_text()}"
    texts = {"ssl_ca_pem": authority, "ssl_certificate_pem": soon.key.read_text() + soon.certificate.read_text()}
    assert expiring(None, **texts) == {"ca.pem": 1.0, "certificate.pem": 3.0}
    assert expiring(ssl_ca_pem="société", ssl_certificate_pem="none", ssl_certificate_location="\0") == {}
    (folder := tmp_path / "authorities").mkdir()
    (folder / "readme.txt").write_bytes(b"\xff no certificate")
    assert expiring(ssl_ca_location=folder) == {}
    (folder / "0a1b2c3d.0").symlink_to(old.certificate)
    assert expiring(ssl_ca_location=folder) == {"ca.location": 1.0}, "librdkafka takes a folder too"
    (folder / "new.pem").write_bytes(new.certificate.read_bytes())
    for unread in (broken, folder, tmp_path / "none.pem"):
        assert expiring(ssl_ca_location=unread, ssl_certificate_location=unread) == {}
    access = RegistryAccess(
        url="https://registry", ca_location=str(old.certificate), certificate_location=str(soon.certificate)
    )
    assert expiring(access) == {"schema_registry.ca_location": 1.0, "schema_registry.certificate_location": 3.0}


def test_a_certificate_counts_as_it_was_read_at_the_start(tmp_path: Path) -> None:
    """The process uses that one until it restarts itself."""
    authority = Authority(tmp_path)
    file = authority.issue("penstock", lifetime=timedelta(days=1)).certificate
    certificates = Certificates(KafkaSettings(security={"ssl.certificate.location": str(file)}), None)
    (before,) = certificates.expiring().values()
    authority.issue("penstock")
    assert [*certificates.expiring().values()] == [before]
    registry = CollectorRegistry()
    registry.register(certificates)
    series = 'penstock_certificate_expires_timestamp_seconds{setting="kafka.security.\\"ssl.certificate.location\\""}'
    (line,) = (one for one in generate_latest(registry).decode().splitlines() if one.startswith(series))
    assert float(line.split()[-1]) * 1000 == before
