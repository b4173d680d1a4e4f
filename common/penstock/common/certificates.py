"""The certificates that a process uses, and when they expire."""

from __future__ import annotations

import re
import ssl
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from penstock.common.settings import KafkaSettings
from penstock.schemas.registry import RegistryAccess

if TYPE_CHECKING:
    from prometheus_client import Metric

_CERTIFICATE = re.compile("-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
SOON_S = 14 * 86_400.0
SOON_PART = 5
"""A certificate expires soon if it has less than `SOON_S` left, and less than this part of its whole life. Short-lived
ones are renewed when a third is left, and put to use before a quarter is left."""


class Validity(NamedTuple):
    """Of a certificate, in seconds since the epoch."""

    begins_s: float
    ends_s: float

    def ends_soon(self, now_s: float) -> bool:
        return self.ends_s - now_s < min(SOON_S, (self.ends_s - self.begins_s) / SOON_PART)


class Certificates:
    """By setting, the certificates that a process has read at its start; a collector for Prometheus too.

    Key stores are left out: only PEM is read.
    """

    def __init__(self, kafka: KafkaSettings, registry: RegistryAccess | None) -> None:
        self._valid: dict[str, Validity] = {}
        named = [(f'kafka.security."{name}"', name, kafka.security.get(name)) for name in _READERS]
        if registry is not None:
            for name in ("ca_location", "certificate_location"):
                like = f"ssl.{name.replace('_', '.')}"
                named.append((f"schema_registry.{name}", like, getattr(registry, name)))
        for setting, like, value in named:
            with suppress(Exception):  # what only watches stops no start
                if value is not None and (found := _READERS[like](value)) is not None:
                    self._valid[setting] = found

    def expiring(self) -> dict[str, int]:
        """Those that expire soon or have expired: by setting, when, in milliseconds since the epoch."""
        now_s = time.time()
        return {setting: int(one.ends_s * 1000) for setting, one in self._valid.items() if one.ends_soon(now_s)}

    def collect(self) -> Iterator[Metric]:
        """For Prometheus, on any thread."""
        from prometheus_client.core import GaugeMetricFamily

        name, text = "penstock_certificate_expires_timestamp_seconds", "When a certificate in use expires."
        family = GaugeMetricFamily(name, text, labels=["setting"])
        for setting, one in self._valid.items():
            family.add_metric([setting], one.ends_s)
        yield family


def certificate_validity(file: Path) -> Validity | None:
    """Of the first certificate of a PEM file; None where it cannot be read."""
    with suppress(Exception):
        # The standard library has no other way to read a certificate that is no authority's.
        return _validity(ssl._ssl._test_decode_cert(str(file)))  # pyright: ignore
    return None


def _of_pem(text: str) -> Validity | None:
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(_CERTIFICATE.findall(text)[0])  # without the key and comments
        file.flush()
        return certificate_validity(Path(file.name))


def _of_authorities(place: str) -> Validity | None:
    """Of a PEM file, or of those in a folder."""
    files = [one for one in Path(place).iterdir() if one.is_file()] if Path(place).is_dir() else [Path(place)]
    return _of_bundle("\n".join(one.read_text(errors="replace") for one in files))


def _of_bundle(text: str) -> Validity | None:
    """Of the certificate that expires last: until then one of a bundle is good."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with suppress(OSError, ValueError):
        context.load_verify_locations(cadata="\n".join(_CERTIFICATE.findall(text)))
    found = cast("list[Mapping[str, str]]", context.get_ca_certs())
    return max(map(_validity, found), key=lambda one: one.ends_s, default=None)


def _validity(decoded: Mapping[str, str]) -> Validity:
    begins, ends = (float(ssl.cert_time_to_seconds(decoded[name])) for name in ("notBefore", "notAfter"))
    return Validity(begins, ends)


_READERS: Mapping[str, Callable[[str], Validity | None]] = {
    "ssl.ca.location": _of_authorities,
    "ssl.ca.pem": _of_bundle,
    "ssl.certificate.location": lambda path: certificate_validity(Path(path)),
    "ssl.certificate.pem": _of_pem,
}
"""By librdkafka's names."""
