"""docker-compose.yml: its form, its references and its settings. tests/integration/deploy runs what it says."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from pydantic import BaseModel

from penstock.cli.assets import ASSETS
from penstock.cli.config import load
from penstock.cli.config_commands import settings_types
from penstock.cli.kafka_jars import KAFKA_VERSION
from penstock.cli.local_system import DEFAULT_CHAT, DEFAULT_EMBEDDING, DEFAULT_UPSCALER, IMAGING
from penstock.gateway.bridge.settings import BridgeSettings
from penstock.gateway.settings import GatewaySettings
from penstock.processors.settings import WorkerSettings

ROOT = Path(__file__).parents[3]


def table(*required: str, **fields: Any) -> dict[str, Any]:
    """A table with these fields alone."""
    return {"type": "object", "additionalProperties": False, "required": [*required], "properties": fields}


def names(value: Any) -> dict[str, Any]:
    """A table of any names, each with such a value."""
    return {"type": "object", "additionalProperties": value}


def array(items: Any, least: int = 0) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least}


def text(pattern: str = "") -> dict[str, Any]:
    return {"type": "string", "pattern": pattern}


SECONDS = text(r"^\d+s$")
CONDITION = {"enum": ["service_healthy", "service_completed_successfully", "service_started"]}
CARDS = table("capabilities", driver=text(), count={"enum": ["all"]}, capabilities=array({"enum": ["gpu"]}, 1))
SERVICE = table(
    "image",
    image=text(),
    build=table("context", "dockerfile", context=text(), dockerfile=text(), target=text(), args=names(text())),
    restart={"enum": ["no", "always", "on-failure", "unless-stopped"]},
    read_only={"type": "boolean"},
    tmpfs=array(text("^/")),
    cap_drop=array(text()),
    security_opt=array(text()),
    environment=names(text()),
    volumes=array(text(r"^([a-z]+|\./[\w./-]+):/[\w./-]+(:ro)?$")),
    ports=array(text(r"^127\.0\.0\.1:\d+:\d+$")),
    entrypoint=array(text()),
    command=array(text(), 1),
    profiles=array(text(), 1),
    deploy=table("resources", resources=table(reservations=table(devices=array(CARDS)))),
    stop_grace_period=SECONDS,
    depends_on=names({"type": "object", "required": ["condition"], "properties": {"condition": CONDITION}}),
    healthcheck=table("test", test=array(text()), interval=SECONDS, timeout=SECONDS, retries={"type": "integer"}),
)
COMPOSE = {
    **table("services", "volumes", name=text(), services=names(SERVICE), volumes=names({"type": ["object", "null"]})),
    "patternProperties": {"^x-": {}},
}


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "docker-compose.yml").read_text())


@pytest.fixture(scope="module")
def settings() -> dict[str, Any]:
    return tomllib.loads((ROOT / "deploy/penstock.toml").read_text())


def test_its_form_and_its_references(compose: dict[str, Any]) -> None:
    jsonschema.validate(compose, COMPOSE)
    for name, service in compose["services"].items():
        assert set(service.get("depends_on", {})) <= set(compose["services"])
        for source in (volume.split(":")[0] for volume in service.get("volumes", [])):
            assert source in compose["volumes"] or (source.startswith("./") and (ROOT / source).exists())
        if build := service.get("build"):
            targets = re.findall(r"^FROM .* AS (\S+)$", (ROOT / build["dockerfile"]).read_text(), re.M)
            assert build["target"] in targets
            assert service["image"] == f"penstock:{build['target']}"
        for other, wanted in service.get("depends_on", {}).items():
            if wanted["condition"] == "service_healthy":
                assert "healthcheck" in compose["services"][other], f"{name} waits for the health of {other}"


def test_proxy_and_grafana_alone_have_a_port_of_the_host(compose: dict[str, Any]) -> None:
    assert [name for name, service in compose["services"].items() if "ports" in service] == ["proxy", "grafana"]
    settings = compose["services"]["grafana"]["environment"]
    assert settings == {
        "GF_AUTH_ANONYMOUS_ENABLED": "true",
        "GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION": "true",
        "GF_AUTH_DISABLE_LOGIN_FORM": "true",
        "GF_AUTH_BASIC_ENABLED": "false",
    }, "everybody may look, nobody may change"


def test_prometheus_finds_each_service_at_the_port_of_its_settings(
    compose: dict[str, Any], settings: dict[str, Any]
) -> None:
    ports = {name: one.get("health_port", one.get("port")) for name, one in settings.items() if isinstance(one, dict)}
    (job,) = yaml.safe_load((ROOT / "deploy/prometheus/compose.yml").read_text())["scrape_configs"]
    found = {name: one["port"] for one in job["dns_sd_configs"] for name in one["names"]}
    assert found.keys() <= compose["services"].keys()
    assert found == {name: ports[name.removesuffix("-gpu")] for name in found}
    assert {name for name, port in ports.items() if port is not None} <= found.keys()


def test_services_of_the_images_write_to_their_volume_alone(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        if "build" in service:
            assert service["read_only"]
            assert service["cap_drop"] == ["ALL"]
            assert (service["volumes"], service["tmpfs"]) == (["data:/data"], ["/tmp"])


def test_the_health_check_asks_the_ports_of_the_settings(settings: dict[str, Any]) -> None:
    health = {
        f"{name.upper()}__HEALTH_PORT": one["health_port"] for name, one in settings.items() if "health_port" in one
    }
    asked = re.findall(r'"(\w+)": "(\d+)"', (ROOT / "deploy/healthy.py").read_text())
    assert {name: int(port) for name, port in asked} == {"GATEWAY__PORT": settings["gateway"]["port"], **health}


def test_a_worker_with_cards_differs_from_others_only_in_those(compose: dict[str, Any]) -> None:
    with_cards = dict(compose["services"]["worker-gpu"])
    assert with_cards.pop("profiles") == ["gpu"]
    (devices,) = with_cards.pop("deploy")["resources"]["reservations"]["devices"]
    assert devices == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    assert with_cards == compose["services"]["worker"]
    assert int(with_cards["stop_grace_period"].removesuffix("s")) >= 40, "it has time to drain"


def test_the_models_are_those_of_penstock_up(compose: dict[str, Any], settings: dict[str, Any]) -> None:
    defaults = (DEFAULT_CHAT, DEFAULT_EMBEDDING, DEFAULT_UPSCALER)
    chat, embedding, upscaler = (ASSETS[name].model_table(Path("/data/cache/models") / name) for name in defaults)
    of_up = [chat, embedding, dict(IMAGING), {**upscaler, "preload": False}]
    fields = ("id", "source", "engine", "tasks", "preload")
    found, expected = ([[one.get(name) for name in fields] for one in models] for models in (settings["models"], of_up))
    assert found == expected
    assert {*defaults} <= set(compose["services"]["init"]["command"][0].split())


def test_the_broker_is_configured_as_the_embedded_one(compose: dict[str, Any]) -> None:
    kafka = compose["services"]["kafka"]
    assert kafka["image"] == f"apache/kafka:{KAFKA_VERSION}"
    assert kafka["environment"]["KAFKA_AUTO_CREATE_TOPICS_ENABLE"] == "false"
    assert int(kafka["environment"]["KAFKA_OFFSETS_RETENTION_MINUTES"]) >= 30 * 24 * 60


def test_the_gateway_is_open_to_other_containers_only_with_keys(settings: dict[str, Any]) -> None:
    assert settings["gateway"]["host"] == "0.0.0.0"
    assert settings["auth"]["keys_file"]


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


def test_every_process_writes_on_volumes_that_its_service_mounts(
    compose: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CONFIG", str(ROOT / "deploy/penstock.toml"))
    mounts = {
        name: [volume.partition(":")[2] for volume in service.get("volumes", [])]
        for name, service in compose["services"].items()
    }
    for settings_type in settings_types():
        for section, value in load(settings_type):
            paths = [found for _, found in value if isinstance(found, Path)] if isinstance(value, BaseModel) else []
            for path in paths:
                on = mounts.get(section, mounts["gateway"])
                assert any(path.is_relative_to(mount) for mount in on), f"[{section}]: {path} is not on a volume"


@pytest.mark.parametrize("location", ["/srv/artifacts", "s3://bucket/some/prefix"])
def test_artifacts_are_one_setting_with_the_same_meaning_for_both(
    location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_ARTIFACTS__LOCATION", location)
    assert (GatewaySettings().artifacts_location, WorkerSettings().artifacts_location) == (location, location)
    monkeypatch.setenv("PENSTOCK_GATEWAY__ARTIFACTS_DIR", "s3://seen/otherwise")
    assert GatewaySettings().artifacts_location == "s3://seen/otherwise"
