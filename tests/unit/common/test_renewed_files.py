"""When renewed files restart a process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from kit.certificates import Authority
from penstock.common import renewed_files
from penstock.common.renewed_files import RenewedFiles, files_of
from penstock.common.settings import KafkaSettings
from support import wait_until


def test_a_process_restarts_once_a_broker_answers_with_the_renewed_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file, checked, restarted = tmp_path / "tls.crt", list[bytes](), threading.Event()
    file.write_bytes(b"old")

    def check(_: object, timeout_s: float) -> None:
        checked.append(file.read_bytes())
        if checked[-1] != b"new":
            raise ValueError("cut short")

    monkeypatch.setattr(renewed_files, "check_connection", check)
    asked = SimpleNamespace(times=0)

    def restart() -> bool:
        asked.times += 1
        if asked.times > 1:  # at first the process did not take signals yet
            restarted.set()
        return asked.times > 1

    kafka = KafkaSettings(security={"ssl.certificate.location": str(file)})
    RenewedFiles(kafka, None, KafkaSettings, restart, spread_s=0.0, look_s=0.01).start()
    file.write_bytes(b"ne")
    wait_until(lambda: checked, describe="the files are not tried")
    assert not asked.times
    file.write_bytes(b"new")
    assert restarted.wait(60)
    assert set(checked) == {b"ne", b"new"}
    assert asked.times == 2


def test_the_files_that_are_looked_at(tmp_path: Path) -> None:
    for name in ("PENSTOCK_KAFKA__SECURITY", "PENSTOCK_AUTH__TICKET_KEY"):
        (tmp_path / name).touch()
    security = {"ssl.ca.location": "/ca", "ssl.key.location": "/key", "sasl.password": "/no"}
    security["sasl.oauthbearer.assertion.file"] = "/each/token"
    found = files_of(KafkaSettings(security=security), str(tmp_path))
    assert found == [Path("/ca"), Path("/key"), tmp_path / "PENSTOCK_KAFKA__SECURITY"]
    assert files_of(KafkaSettings(), None) == []


def renewed(
    tmp_path: Path, restart: Callable[[], bool], security: dict[str, str], spread_s: float | None
) -> RenewedFiles:
    return RenewedFiles(KafkaSettings(security=security), str(tmp_path), KafkaSettings, restart, spread_s, look_s=0.01)


@pytest.mark.parametrize("changed", ["ca/new.pem", "PENSTOCK_KAFKA__SECURITY__SASL_PASSWORD"])
def test_new_files_in_folders_are_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changed: str) -> None:
    (tmp_path / "ca").mkdir()
    restarted = threading.Event()
    monkeypatch.setattr(renewed_files, "check_connection", Mock())

    def restart() -> bool:
        restarted.set()
        return True

    renewed(tmp_path, restart, {"ssl.ca.location": str(tmp_path / "ca")}, 0.0).start()
    (tmp_path / changed).write_text("new")
    assert restarted.wait(60)


def test_files_that_stay_unusable_are_tried_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    now, tries = SimpleNamespace(s=0.0), list[float]()

    def sleep(seconds: float) -> None:
        now.s += seconds
        if now.s > 7_200:
            threading.Event().wait()

    def check(*_: object) -> None:
        tries.append(now.s)
        raise ValueError("no broker trusts it")

    monkeypatch.setattr(renewed_files, "check_connection", check)
    monkeypatch.setattr(renewed_files, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: now.s))
    made = RenewedFiles(KafkaSettings(), str(tmp_path), KafkaSettings, Mock(), None)
    (tmp_path / "PENSTOCK_KAFKA__SECURITY").touch()
    made.start()
    wait_until(lambda: now.s > 7_200, describe=lambda: f"it is {now.s}")
    pauses = [after - before for before, after in pairwise(tries)]
    assert pauses[:4] == [5, 10, 20, 40]
    assert set(pauses[6:]) == {renewed_files.AGAIN_S}


DAY_S = 86_400.0


@pytest.mark.parametrize(
    ("left_s", "changed", "configured", "longest_s"),
    [
        (8 * 3600, "tls.crt", None, 2 * 3600),
        (90 * DAY_S, "tls.crt", None, 4 * 3600),
        (-1, "tls.crt", None, 60),
        (8 * 3600, "PENSTOCK_KAFKA__SECURITY", None, 60),
        (None, "tls.crt", None, 60),
        (90 * DAY_S, "tls.crt", 5.0, 5),
    ],
)
def test_restarts_are_spread_over_the_time_that_the_former_certificate_has_left(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    left_s: float | None,
    changed: str,
    configured: float | None,
    longest_s: float,
) -> None:
    certificate = tmp_path / "tls.crt"
    if left_s is not None:
        lifetime = timedelta(seconds=left_s)
        certificate = Authority(tmp_path).issue("penstock", lifetime=lifetime).certificate.rename(certificate)
    uniform = Mock(return_value=0.0)
    monkeypatch.setattr(renewed_files, "random", SimpleNamespace(uniform=uniform))
    monkeypatch.setattr(renewed_files, "check_connection", Mock())
    renewed(tmp_path, Mock(), {"ssl.certificate.location": str(certificate)}, configured).start()
    (tmp_path / changed).write_text("new")
    wait_until(lambda: uniform.called, describe="the change is not noticed")
    assert uniform.call_args.args[1] == pytest.approx(longest_s, abs=30)
