"""Which Kafka the commands that read topics speak to: the one that is named, else that of the running `penstock up`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.cli.config import ClusterSettings, load
from penstock.cli.state import Home, SystemState
from penstock.cli.topics import kafka_settings

RUNNING, NAMED = "127.0.0.1:29092", "kafka.example:9092"
VARIABLE = "PENSTOCK_KAFKA__BOOTSTRAP_SERVERS"


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Home]:
    """The data folder of a system that runs, with its broker on another port than the default."""
    for name in ("PENSTOCK_CONFIG", VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PENSTOCK_DATA", str(tmp_path))
    home = Home(tmp_path)
    home.acquire()
    state = SystemState(pid=1, phase="ready", url="http://x", bootstrap_servers=RUNNING, models=[], started_at=0)
    home.write(state)
    yield home
    home.release()


def found(option: str | None = None) -> str:
    return kafka_settings(load(ClusterSettings), option, None).bootstrap_servers


@pytest.mark.usefixtures("home")
def test_the_broker_of_the_running_system_is_found() -> None:
    assert found() == RUNNING


@pytest.mark.usefixtures("home")
def test_an_option_and_a_setting_win(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert found(NAMED) == NAMED
    monkeypatch.setenv(VARIABLE, NAMED)
    assert found() == NAMED
    monkeypatch.delenv(VARIABLE)
    config = tmp_path / "penstock.toml"
    config.write_text(f'[kafka]\nbootstrap_servers = "{NAMED}"\n')
    monkeypatch.setenv("PENSTOCK_CONFIG", str(config))
    assert found() == NAMED


def test_what_a_system_left_behind_is_not_taken(home: Home, tmp_path: Path) -> None:
    state = (tmp_path / "state.json").read_text()
    home.release()
    (tmp_path / "state.json").write_text(state)
    assert found() == "127.0.0.1:9092"
