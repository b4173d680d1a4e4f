"""Penstock on one machine: which parts there are, with which settings, when they are ready, what they are told."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from penstock.cli.assets import ASSETS, prepare_gguf, prepare_model
from penstock.cli.config import ENV_CONFIG, ClusterSettings, load, read_toml, to_toml
from penstock.cli.config_commands import checked
from penstock.cli.embedded_kafka import EmbeddedKafka, answers
from penstock.cli.failures import CliFailure, ExitCode
from penstock.cli.kafka_jars import KAFKA_VERSION
from penstock.cli.paths import Progress, free_port, port_in_use
from penstock.cli.reaching import why_unreachable
from penstock.cli.state import Home, PartState, SystemState
from penstock.cli.supervisor import Part, Supervisor, command_part

DEFAULT_CHAT = "smollm2-135m"
DEFAULT_EMBEDDING = "all-minilm-l6-v2"
EMBEDDED_PARTITIONS = 4
WORKER_HEALTH_PORT = 8001
WORKER_READY_S = 300.0
GATEWAY_READY_S = 90.0
MODEL_LOADED_S = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What the person asked for. `bootstrap_servers` None: run the embedded broker on `kafka_port`."""

    data_dir: Path
    host: str = "127.0.0.1"
    port: int = 8000
    kafka_port: int = 9092
    bootstrap_servers: str | None = None
    model: str | None = None
    remote: str | None = None
    config: Path | None = None


class LocalSystem:
    """One broker, one worker, one gateway under a supervisor."""

    def __init__(self, options: Options, progress: Progress) -> None:
        self.options = options
        self.home = Home(options.data_dir)
        self.phase = "starting"
        self.worker_port = WORKER_HEALTH_PORT
        self.models: list[dict[str, Any]] = []
        self.supervisor = Supervisor(progress, self._changed)
        self._progress = progress
        self._ready_urls: dict[str, str] = {}
        self._started_at = time.time()

    @property
    def url(self) -> str:
        return f"http://{self.options.host}:{self.options.port}"

    @property
    def bootstrap_servers(self) -> str:
        return self.options.bootstrap_servers or f"127.0.0.1:{self.options.kafka_port}"

    def start(self) -> None:
        """Bring everything up and return when it serves. Raises CliFailure naming the cure."""
        self._check()
        # The broker boots while the models are prepared; both are long only the first time.
        broker = self._start_broker()
        self.models = self._models()
        environment = self._write_settings()
        if broker is not None:
            self.supervisor.wait_ready(broker, 90.0)
        self._create_topics()
        worker = self._worker(environment)
        gateway = self._gateway(environment)
        self.supervisor.start(worker)
        self.supervisor.start(gateway)
        self._progress("starting the gateway and the worker (loading models)")
        self.supervisor.wait_ready(gateway, GATEWAY_READY_S)
        self.supervisor.wait_ready(worker, WORKER_READY_S)
        self._await_model(str(self.models[0]["id"]))
        self.phase = "ready"
        self._changed()

    def stop(self) -> None:
        """In order: the gateway stops accepting, the worker drains and commits, the broker closes its logs."""
        self.phase = "stopping"
        self._changed()
        self.supervisor.stop()

    def _check(self) -> None:
        """Find out early what would only fail after the long steps."""
        options = self.options
        checked()
        if port_in_use(options.port, options.host):
            raise CliFailure(
                f"port {options.port} is in use: stop what listens there, or choose another one with --port"
            )
        if port_in_use(self.worker_port):
            self.worker_port = free_port()
        load(ClusterSettings)

    def _start_broker(self) -> Part | None:
        if self.options.bootstrap_servers is not None:
            self._require_kafka(self.options.bootstrap_servers)
            return None
        kafka = EmbeddedKafka(self.home.data_dir / "kafka", self.options.kafka_port, progress=self._progress)
        kafka.log = self.home.logs / "broker.log"
        part = Part(
            name="broker",
            launch=kafka.launch,
            log=kafka.log,
            ready=lambda: answers(kafka.bootstrap_servers, timeout_s=1.0),
            grace_s=30.0,
        )
        self._progress(f"starting Apache Kafka {KAFKA_VERSION} on {kafka.bootstrap_servers}")
        self.supervisor.start(part)
        return part

    def _require_kafka(self, bootstrap_servers: str) -> None:
        reason = why_unreachable(load(ClusterSettings).kafka_settings(bootstrap_servers))
        if reason is not None:
            raise CliFailure(
                f"no Kafka answers at {bootstrap_servers} ({reason}): check the address and that it runs,"
                " or leave --bootstrap-servers out to run one here",
                exit_code=ExitCode.UNREACHABLE,
            )

    def _create_topics(self) -> None:
        from penstock.cli.topics import create_topics

        settings = load(ClusterSettings)
        embedded = self.options.bootstrap_servers is None
        create_topics(
            settings.kafka_settings(self.bootstrap_servers),
            partitions=EMBEDDED_PARTITIONS if embedded else settings.topics.partitions,
            durability=settings.topics.durability,
            progress=self._progress,
        )

    def _models(self) -> list[dict[str, Any]]:
        """The `[[models]]` of this run: the config's own, unless --model or --remote say otherwise."""
        options = self.options
        if options.remote is not None:
            return [remote_model(options.remote, options.model)]
        configured: list[dict[str, Any]] = self._configured().get("models", [])
        if configured and options.model is None:
            return configured
        embedding = ASSETS[DEFAULT_EMBEDDING]
        others = [model for model in configured if "text_generation" not in model.get("tasks", ["text_generation"])]
        if not configured:
            others = [embedding.model_table(prepare_model(embedding.id, self._progress))]
        return [chat_model(options.model or DEFAULT_CHAT, self._progress), *others]

    def _configured(self) -> dict[str, Any]:
        return read_toml(self.options.config) if self.options.config is not None else {}

    def _write_settings(self) -> dict[str, str]:
        """The children's environment: their TOML is the person's with this run's models; the rest are variables."""
        path = self.home.data_dir / "run.toml"
        path.write_text(
            "# Written by `penstock up` at every start; changes are lost. Yours goes to --config.\n"
            + to_toml({**self._configured(), "models": self.models})
        )
        data_dir = self.home.data_dir
        return {
            **os.environ,
            ENV_CONFIG: str(path),
            "PYTHONUNBUFFERED": "1",
            "PENSTOCK_KAFKA__BOOTSTRAP_SERVERS": self.bootstrap_servers,
            "PENSTOCK_WORKER__DATA_DIR": str(data_dir / "worker"),
            "PENSTOCK_WORKER__ARTIFACTS_DIR": str(data_dir / "artifacts"),
            "PENSTOCK_WORKER__HEALTH_PORT": str(self.worker_port),
            "PENSTOCK_GATEWAY__HOST": self.options.host,
            "PENSTOCK_GATEWAY__PORT": str(self.options.port),
            "PENSTOCK_GATEWAY__VIEW_PATH": str(data_dir / "gateway" / "view.sqlite"),
            "PENSTOCK_GATEWAY__ARTIFACTS_DIR": str(data_dir / "artifacts"),
        }

    def _await_model(self, model: str) -> None:
        """Wait until the first model is loaded, so that the first answer is quick; Penstock serves without it too."""
        began = said = time.monotonic()
        while time.monotonic() - began < MODEL_LOADED_S:
            self.supervisor.tend()
            state = model_state(self.url, model, since=self._started_at)
            if state == "failed":
                log = self.home.logs / "worker.log"
                self._progress(f"the model {model} could not be loaded; asking for it tries again; see {log}")
                return
            if state in ("ready", None):
                return
            if time.monotonic() - said > 15:
                said = time.monotonic()
                self._progress(f"the model {model} is {state} … {said - began:.0f} s")
            time.sleep(0.2)
        self._progress(f"the model {model} is still not loaded; going on without waiting")

    def _worker(self, environment: Mapping[str, str]) -> Part:
        return self._command("worker", f"http://127.0.0.1:{self.worker_port}/readyz", 40.0, environment)

    def _gateway(self, environment: Mapping[str, str]) -> Part:
        (self.home.data_dir / "gateway").mkdir(exist_ok=True)
        host = "127.0.0.1" if self.options.host in ("0.0.0.0", "::") else self.options.host
        return self._command("gateway", f"http://{host}:{self.options.port}/readyz", 20.0, environment)

    def _command(self, name: str, ready_url: str, grace_s: float, environment: Mapping[str, str]) -> Part:
        self._ready_urls[name] = ready_url
        return command_part(
            name,
            penstock_command(name),
            log=self.home.logs / f"{name}.log",
            ready=lambda: is_ready(ready_url),
            grace_s=grace_s,
            env=environment,
        )

    def _changed(self) -> None:
        parts = [
            PartState(
                name=part.name,
                pid=part.process.pid if part.process is not None and part.running else None,
                restarts=part.restarts,
                log=str(part.log),
                ready_url=self._ready_urls.get(part.name),
            )
            for part in self.supervisor.parts
        ]
        self.home.write(
            SystemState(
                pid=os.getpid(),
                phase=self.phase,
                url=self.url,
                bootstrap_servers=self.bootstrap_servers,
                models=[str(model["id"]) for model in self.models],
                started_at=self._started_at,
                parts=parts,
            )
        )


def is_ready(url: str, timeout_s: float = 2.0) -> bool:
    """Whether a /readyz says 200."""
    try:
        return httpx.get(url, timeout=timeout_s, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def model_state(url: str, model: str, since: float) -> str | None:
    """What the gateway says of a model: "unknown" if not told since (Unix s); None when it may not be asked."""
    try:
        answer = httpx.get(f"{url}/v1/models", timeout=5, trust_env=False)
        if answer.status_code != 200:
            return None
        found = next((entry for entry in answer.json()["data"] if entry["id"] == model), None)
    except (httpx.HTTPError, ValueError, KeyError):
        return "unknown"
    # The topic remembers what the last run said.
    return "unknown" if found is None or found["created"] < int(since) else str(found["state"])


def chat_model(name: str, progress: Progress) -> dict[str, Any]:
    """The `[[models]]` entry of a chat model named as an id of ours, a folder, a GGUF file or a hub id."""
    if name in ASSETS:
        return ASSETS[name].model_table(prepare_model(name, progress))
    path = Path(name).expanduser()
    if path.suffix.lower() == ".gguf":
        return _text_model(model_id(path.stem), str(prepare_gguf(path, progress)))
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise CliFailure(f"{path} holds no config.json: --model wants a model's folder", exit_code=ExitCode.USAGE)
        return _text_model(model_id(path.absolute().name), str(path.absolute()))
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not name.startswith("."):
        progress(f"the model {name} comes from the hub; the worker fetches it when it is not in its cache")
        return _text_model(model_id(name.rpartition("/")[2]), name)
    raise CliFailure(
        f"--model {name} is no folder, no .gguf file, no hub id (owner/name) and none of {', '.join(ASSETS)}",
        exit_code=ExitCode.USAGE,
    )


def _text_model(identity: str, source: str) -> dict[str, Any]:
    tasks, aliases = ["text_generation"], ["default"]
    return {"id": identity, "source": source, "engine": "text", "tasks": tasks, "aliases": aliases}


def model_id(name: str) -> str:
    return re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-")


def remote_model(url: str, model: str | None) -> dict[str, Any]:
    """The `[[models]]` entry of an OpenAI-compatible server; its first model unless one is named.

    Raises CliFailure when the server does not answer.
    """
    base = url.rstrip("/").removesuffix("/v1") + "/v1"
    if not base.startswith(("http://", "https://")):
        raise CliFailure(
            f"--remote {url}: give the server's URL, as http://127.0.0.1:11434/v1", exit_code=ExitCode.USAGE
        )
    key = os.environ.get("OPENAI_API_KEY")
    if model is None:
        offered = _remote_models(base, key)
        model = offered[0]
    options: dict[str, Any] = {"remote_model": model}
    if key:
        options["api_key_env"] = "OPENAI_API_KEY"
    return {
        "id": model,
        "source": base,
        "engine": "remote",
        "tasks": ["text_generation", "embedding"],
        "aliases": ["default"],
        "options": options,
    }


def _remote_models(base: str, key: str | None) -> Sequence[str]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.get(f"{base}/models", headers=headers, timeout=10)
        answer.raise_for_status()
        found = [str(entry["id"]) for entry in answer.json()["data"]]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise CliFailure(
            f"{base}/models does not answer as an OpenAI-compatible server does ({error}): check the URL,"
            " set OPENAI_API_KEY if it wants a key, or name the model with --model",
            exit_code=ExitCode.UNREACHABLE,
        ) from error
    if not found:
        raise CliFailure(f"{base} offers no model: load one there, or name it with --model")
    return found


def card(system: LocalSystem) -> str:
    """What a person needs now, short."""
    url, data = system.url, system.home.data_dir
    chat = next((m["id"] for m in system.models if "text_generation" in m.get("tasks", ["text_generation"])), "default")
    body = f'{{"model":"{chat}","messages":[{{"role":"user","content":"What is the capital of France?"}}]}}'
    return f"""
  Penstock is up: {url}   (docs: {url}/docs)

    penstock chat{"" if url == "http://127.0.0.1:8000" else f" --url {url}"}
    curl {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'
    OpenAI(base_url="{url}/v1", api_key="none").chat.completions.create(model="{chat}", messages=[…])

  Kafka {system.bootstrap_servers}   models {", ".join(str(m["id"]) for m in system.models)}
  data  {data}
  logs  {system.home.logs}   (penstock logs -f)
"""


def penstock_command(name: str) -> list[str]:
    """How a part is started: as `penstock <name>`, by which process lists show it."""
    script = Path(sys.executable).with_name("penstock")
    return [str(script), name] if script.exists() else [sys.executable, "-m", "penstock.cli.main", name]
