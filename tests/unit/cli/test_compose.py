"""docker-compose.yml: its form, its references and its settings. tests/integration/deploy runs what it says."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from penstock.cli.assets import ASSETS
from penstock.cli.kafka_jars import KAFKA_VERSION
from penstock.cli.local_system import DEFAULT_CHAT, DEFAULT_EMBEDDING, DEFAULT_UPSCALER, IMAGING
from penstock.gateway.bridge.settings import BridgeSettings
from penstock.gateway.settings import GatewaySettings
from penstock.processors.settings import WorkerSettings

ROOT = Path(__file__).parents[3]

DEPLOY: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["resources"],
    "properties": {
        "resources": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "reservations": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "devices": {
                            "type": "array",
                            "items": {
                                "type": "object",
                                "additionalProperties": False,
                                "required": ["capabilities"],
                                "properties": {
                                    "driver": {"type": "string"},
                                    "count": {"enum": ["all"]},
                                    "capabilities": {"type": "array", "items": {"enum": ["gpu"]}, "minItems": 1},
                                },
                            },
                        }
                    },
                }
            },
        }
    },
}
SERVICE: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["image"],
    "properties": {
        "image": {"type": "string"},
        "build": {
            "type": "object",
            "additionalProperties": False,
            "required": ["context", "dockerfile"],
            "properties": {
                "context": {"type": "string"},
                "dockerfile": {"type": "string"},
                "args": {"type": "object", "additionalProperties": {"type": "string"}},
            },
        },
        "restart": {"enum": ["no", "always", "on-failure", "unless-stopped"]},
        "environment": {"type": "object", "additionalProperties": {"type": "string"}},
        "volumes": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]+:/"}},
        "ports": {"type": "array", "items": {"type": "string", "pattern": r"^127\.0\.0\.1:\d+:\d+$"}},
        "entrypoint": {"type": "array", "items": {"type": "string"}},
        "command": {"type": "array", "items": {"type": "string"}, "minItems": 1},
        "profiles": {"type": "array", "items": {"type": "string"}, "minItems": 1},
        "deploy": DEPLOY,
        "stop_grace_period": {"type": "string", "pattern": r"^\d+s$"},
        "depends_on": {
            "type": "object",
            "additionalProperties": {
                "type": "object",
                "required": ["condition"],
                "properties": {
                    "condition": {"enum": ["service_healthy", "service_completed_successfully", "service_started"]}
                },
            },
        },
        "healthcheck": {
            "type": "object",
            "additionalProperties": False,
            "required": ["test"],
            "properties": {
                "test": {"type": "array", "items": {"type": "string"}},
                "interval": {"type": "string", "pattern": r"^\d+s$"},
                "timeout": {"type": "string", "pattern": r"^\d+s$"},
                "retries": {"type": "integer"},
            },
        },
    },
}
COMPOSE: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["services", "volumes"],
    "patternProperties": {"^x-": {}},
    "properties": {
        "name": {"type": "string"},
        "services": {"type": "object", "additionalProperties": SERVICE},
        "volumes": {"type": "object", "additionalProperties": {"type": ["object", "null"]}},
    },
}


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "docker-compose.yml").read_text())


def test_the_form_is_right(compose: dict[str, Any]) -> None:
    jsonschema.validate(compose, COMPOSE)


def test_every_reference_is_there(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        assert set(service.get("depends_on", {})) <= set(compose["services"])
        assert {volume.split(":")[0] for volume in service.get("volumes", [])} <= set(compose["volumes"])
        if "build" in service:
            assert (ROOT / service["build"]["dockerfile"]).is_file()
    for name, service in compose["services"].items():
        for other, wanted in service.get("depends_on", {}).items():
            if wanted["condition"] == "service_healthy":
                assert "healthcheck" in compose["services"][other], f"{name} waits for the health of {other}"


def test_a_worker_with_cards_differs_from_others_in_those_alone(compose: dict[str, Any]) -> None:
    with_cards = dict(compose["services"]["worker-gpu"])
    assert with_cards.pop("profiles") == ["gpu"]
    (devices,) = with_cards.pop("deploy")["resources"]["reservations"]["devices"]
    assert devices == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    assert with_cards == compose["services"]["worker"]


def test_the_default_models_do_what_those_of_up_do(compose: dict[str, Any]) -> None:
    tables = tomllib.loads((ROOT / "deploy/penstock.toml").read_text())["models"]
    chat, embedding = ASSETS[DEFAULT_CHAT], ASSETS[DEFAULT_EMBEDDING]
    upscaler = {**ASSETS[DEFAULT_UPSCALER].model_table(Path("/cache/models") / DEFAULT_UPSCALER), "preload": False}
    of_up = [
        chat.model_table(Path("/cache/models") / chat.id),
        embedding.model_table(Path("/cache/models") / embedding.id),
        dict(IMAGING),
        upscaler,
    ]
    fields = ("id", "source", "engine", "tasks", "preload")
    assert [[one.get(name) for name in fields] for one in tables] == [
        [one.get(name) for name in fields] for one in of_up
    ]
    prepared = compose["services"]["init"]["command"][0]
    assert {DEFAULT_CHAT, DEFAULT_EMBEDDING, DEFAULT_UPSCALER} <= set(prepared.split())


def test_the_broker_is_set_as_the_embedded_one(compose: dict[str, Any]) -> None:
    kafka = compose["services"]["kafka"]
    assert kafka["image"] == f"apache/kafka:{KAFKA_VERSION}"
    assert kafka["environment"]["KAFKA_AUTO_CREATE_TOPICS_ENABLE"] == "false"
    assert int(kafka["environment"]["KAFKA_OFFSETS_RETENTION_MINUTES"]) >= 30 * 24 * 60


def test_the_gateway_is_open_to_other_containers_only_with_keys() -> None:
    settings = tomllib.loads((ROOT / "deploy/penstock.toml").read_text())
    assert settings["gateway"]["host"] == "0.0.0.0"
    assert settings["auth"]["keys_file"]


def test_a_worker_has_time_to_drain(compose: dict[str, Any]) -> None:
    assert int(compose["services"]["worker"]["stop_grace_period"].removesuffix("s")) >= 40


def test_worker_and_gateway_find_the_same_artifacts_on_a_volume_that_both_mount(
    compose: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CONFIG", str(ROOT / "deploy/penstock.toml"))
    location = GatewaySettings().artifacts_location
    assert WorkerSettings().artifacts_location == location
    assert BridgeSettings().artifacts_location == location
    for service in ("worker", "gateway", "bridge"):
        mounts = [volume.partition(":")[2] for volume in compose["services"][service]["volumes"]]
        assert any(Path(location).is_relative_to(mount) for mount in mounts)


@pytest.mark.parametrize("location", ["/srv/artifacts", "s3://bucket/some/prefix"])
def test_artifacts_are_one_setting_with_the_same_meaning_for_both(
    location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_ARTIFACTS__LOCATION", location)
    assert (GatewaySettings().artifacts_location, WorkerSettings().artifacts_location) == (location, location)
    monkeypatch.setenv("PENSTOCK_GATEWAY__ARTIFACTS_DIR", "s3://seen/otherwise")
    assert GatewaySettings().artifacts_location == "s3://seen/otherwise"
