"""Worker settings: the file, then the environment over it; a typing slip in our own section is an error."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from penstock.processors.assembly import flow_settings
from penstock.processors.settings import WorkerSettings

FILE = """
[kafka]
bootstrap_servers = "a:1"
security = {"sasl.username" = "u"}
[worker]
intake_bytes = 8388608
[gateway]
port = 1
[[models]]
id = "m"
source = "noop"
engine = "noop"
options = {tokens = 3}
"""


def load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, **env: str) -> WorkerSettings:
    path = tmp_path / "penstock.toml"
    path.write_text(text)
    monkeypatch.setenv("PENSTOCK_CONFIG", str(path))
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    return WorkerSettings()


def test_file_then_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = load(monkeypatch, tmp_path, FILE, PENSTOCK_KAFKA__BOOTSTRAP_SERVERS="b:2", PENSTOCK_WORKER__POOL="gpu")
    assert settings.kafka.bootstrap_servers == "b:2"
    assert settings.kafka.security == {"sasl.username": "u"}
    assert settings.worker.pool == "gpu"
    assert settings.worker.intake_bytes == 8 << 20
    assert settings.models[0].options == {"tokens": 3}
    assert settings.kafka_settings().bootstrap_servers == "b:2"


@pytest.mark.parametrize(
    ("text", "successor"),
    [
        ("[worker]\ninflight_cap = 100\n", "set intake_bytes"),
        ("[memory]\ncpu_bytes = 3\n", "set limit_bytes"),
        ("[conversations]\ncached = 3\n", "set cached_bytes"),
        ("[conversations]\nread_deadline_s = 2.5\n", "remove it"),
    ],
)
def test_a_setting_that_is_gone_names_its_successor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, successor: str
) -> None:
    with pytest.raises(ValidationError, match=f"not a setting any more: {successor}"):
        load(monkeypatch, tmp_path, text)


@pytest.mark.parametrize("text", ["[worker]\nintake_bytess = 1\n", "[worker]\nchunk_linger_ms = 51\n"])
def test_slips_and_bounds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    with pytest.raises(ValidationError):
        load(monkeypatch, tmp_path, text)


def test_a_missing_file_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CONFIG", "nowhere.toml")
    with pytest.raises(FileNotFoundError, match=r"nowhere\.toml"):
        WorkerSettings()


def test_what_the_scheduler_is_told_reaches_the_flow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    values = {
        "affinity_s": 1.5,
        "lookahead_s": 2.5,
        "reserve_after_s": 3.5,
        "longest_reservation_s": 4.5,
        "scale_after_s": 5.5,
        "turn_factor": 6.5,
    }
    text = "[scheduler]\n" + "".join(f"{name} = {value}\n" for name, value in values.items())
    told = flow_settings(load(monkeypatch, tmp_path, text + "[worker]\naging_s = 7.5\naged_share = 9\n"))
    assert {name: getattr(told, name, None) or getattr(told.placement, name) for name in values} == values
    assert (told.placement.aging_s, told.placement.aged_share) == (7.5, 9)
