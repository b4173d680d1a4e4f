"""Restarts a process whose Kafka certificates or mounted secrets were renewed: librdkafka reads them only once.

See docs/decisions/0095-renewed-certificates.md.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

from penstock.common.admin_clients import check_connection
from penstock.common.certificates import certificate_validity
from penstock.common.refused_connections import CERTIFICATE
from penstock.common.settings import KafkaSettings

logger = logging.getLogger(__name__)

LOOK_S = 5.0
ANSWER_S = 5.0
AGAIN_S = 300.0
"""The longest pause before the same unusable files are tried again."""
SPREAD_S, LONGEST_SPREAD_S = 60.0, 4 * 3600.0
SPREAD_PART = 4
"""A renewed certificate is put to use within the time that the former one has left, divided by this."""


class RenewedFiles:
    """Looks on a thread of its own at `files_of(settings, secrets)`, if there can be any. Make it before these files
    are read.

    When two looks in a row find the same new content, and a broker answers a client made of `load()`, it calls
    `restart` at a random time within `spread_s`, until that returns True. Files with which no broker answers, as a key
    that does not fit its certificate, are reported and not used. They are tried again, in the end every `AGAIN_S`.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        secrets: str | None,
        load: Callable[[], KafkaSettings],
        restart: Callable[[], bool],
        spread_s: float | None,
        look_s: float = LOOK_S,
    ) -> None:
        self._settings, self._secrets = settings, secrets
        self._load = load
        self._restart = restart
        self._spread_s, self._look_s = spread_s, look_s
        self._certificate = Path(settings.security.get(CERTIFICATE, os.devnull))
        self._valid = certificate_validity(self._certificate)
        self._used = self._content()
        self._reported: str | None = None

    def start(self) -> None:
        if self._used or self._secrets:
            threading.Thread(target=self._look_forever, name="renewed files", daemon=True).start()

    def _look_forever(self) -> None:
        seen = self._used
        due_s = pause_s = 0.0
        is_spread = False
        while True:
            time.sleep(self._look_s)
            former, seen = seen, self._content()
            if seen == self._used or seen != former:
                due_s, pause_s, is_spread = 0.0, 0.0, False
                continue
            if time.monotonic() < due_s:
                continue
            if not self._usable():
                pause_s = min(2 * pause_s or self._look_s, AGAIN_S)
                due_s = time.monotonic() + pause_s
            elif not is_spread:
                is_spread, wait_s = True, random.uniform(0, self._longest_wait_s(seen))
                due_s = time.monotonic() + wait_s
                logger.warning("kafka.files_renewed restart_in_s=%.1f", wait_s)
            elif self._restart():
                return

    def _longest_wait_s(self, seen: dict[Path, bytes]) -> float:
        if self._spread_s is not None:
            return self._spread_s
        if self._valid is None or seen.get(self._certificate) == self._used.get(self._certificate):
            return SPREAD_S
        return min(max(SPREAD_S, (self._valid.ends_s - time.time()) / SPREAD_PART), LONGEST_SPREAD_S)

    def _usable(self) -> bool:
        try:
            check_connection(self._load(), ANSWER_S)
        except Exception as error:  # a secret that is half written can be wrong in any way
            if (text := str(error)) != self._reported:
                logger.warning("kafka.renewed_files_unusable error=%s: the former ones stay in use", text)
            self._reported = text
            return False
        return True

    def _content(self) -> dict[Path, bytes]:
        return {file: _digest(file) for file in files_of(self._settings, self._secrets)}


def files_of(settings: KafkaSettings, secrets: str | None) -> list[Path]:
    """The files and folders that librdkafka reads for these settings, and files that hold settings for Kafka: of
    `PENSTOCK_SECRETS`, and of variables such as PENSTOCK_KAFKA__SECURITY__SASL_PASSWORD_FILE.

    Without `sasl.oauthbearer.assertion.file` and its like: librdkafka reads these for each token.
    """
    named = [Path(value) for name, value in settings.security.items() if name.endswith(".location")]
    mounted = Path(secrets or os.devnull).glob("*")
    for_kafka = [
        (name.upper(), value) for name, value in os.environ.items() if name.upper().startswith("PENSTOCK_KAFKA")
    ]
    named += [Path(value) for name, value in for_kafka if name.endswith("_FILE")]
    return [*named, *sorted(one for one in mounted if one.name.upper().startswith("PENSTOCK_KAFKA"))]


def _digest(path: Path) -> bytes:
    """Of a file, or of the files in a folder. Empty for one that cannot be read, as while it is replaced."""
    try:
        if path.is_dir():
            files = sorted(one for one in path.iterdir() if one.is_file())
            return b"".join(one.name.encode() + _digest(one) for one in files)
        return hashlib.sha256(path.read_bytes()).digest()
    except OSError:
        return b""
