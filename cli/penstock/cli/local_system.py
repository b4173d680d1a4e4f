"""Penstock on one machine: which parts there are, with which settings, when they are ready, what they are told."""

from __future__ import annotations

import base64
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from penstock.cli.assets import ASSETS, prepare_model
from penstock.cli.chosen_models import chat_model, check_chat_model, check_source, remote_model
from penstock.cli.commands.order_waits import FAILED_S
from penstock.cli.config import (
    ENV_CONFIG,
    USUAL_PARTITIONS,
    ClusterSettings,
    DrainSettings,
    QueueSettings,
    load,
    to_toml,
)
from penstock.cli.config_commands import checked
from penstock.cli.embedded_kafka import EmbeddedKafka, answers
from penstock.cli.failures import CliFailure, ExitCode
from penstock.cli.hub_models import HubModel
from penstock.cli.kafka_jars import KAFKA_VERSION
from penstock.cli.ordered import read_orders, removed_lines, withdraw_unserved
from penstock.cli.paths import Progress, free_port, listens, local_url, port_in_use
from penstock.cli.reaching import why_unreachable
from penstock.cli.readiness import Readiness, ReadinessWatch, ask, ask_process
from penstock.cli.run_config import MODELS, RunConfig, variable
from penstock.cli.state import Home, PartState, SystemState
from penstock.cli.supervisor import Part, Supervisor, command_part
from penstock.common.desired import Desired
from penstock.common.model_entry import PRIORITY, ModelEntry, parse_entry, served_by
from penstock.common.orders import effective_entries
from penstock.schemas.desired import MODEL, desired_key
from penstock.schemas.errors import InvalidRequest
from penstock.schemas.tasks import BUILT_TASKS, needs_model

DEFAULT_CHAT = "smollm2-135m"
DEFAULT_EMBEDDING = "all-minilm-l6-v2"
DEFAULT_UPSCALER = "realesr-animevideov3"
IMAGING: Mapping[str, Any] = {
    "id": "imaging",
    "source": "pillow",
    "engine": "imaging",
    "tasks": ["image_processing"],
    "preload": False,
}
"""Image processing without a model. It and the upscaler are loaded when somebody asks for them."""
TINY_MODELS = ("tiny-image-generation", "tiny-image-editing", "tiny-image-to-text")
"""Made in code for tasks that no package carries a model for, so that every route can be tried."""
EMBEDDED_PARTITIONS = 4
KAFKA_PORT = 9092
HEALTH_PORTS = {"worker": 8001, "bridge": 8002, "webhooks": 8003, "summarizer": 8004}
WORKER_READY_S = 300.0
GATEWAY_READY_S = 90.0
BESIDE_READY_S = 60.0
"""Of the bridge, the sender of webhooks and the summarizer."""
MODEL_LOADED_S = 600.0
ORDERS_S = 5.0
"""So often orders are looked at while a model is waited for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What the person asked for. `bootstrap_servers` None: run the embedded broker on `kafka_port`, else 9092."""

    data_dir: Path
    host: str = "127.0.0.1"
    port: int = 8000
    kafka_port: int | None = None
    worker_port: int | None = None
    """Of the worker's health and metrics; None: as configured, else 8001 or a free one."""
    bootstrap_servers: str | None = None
    model: str | None = None
    remote: str | None = None
    tiny_models: bool = False
    hub_models: Sequence[HubModel] = ()
    """Of `--with`: the person has agreed to them."""
    config: Path | None = None
    open_console: bool = False


class LocalSystem:
    """A broker, a worker, a gateway, a sender of webhooks and a summarizer, supervised; a bridge where queues are
    configured."""

    def __init__(self, options: Options, progress: Progress) -> None:
        self.options = options
        self.config = RunConfig(options.config)
        self.home = Home(options.data_dir)
        self.phase = "starting"
        self.ports = dict(HEALTH_PORTS)
        """Where the health of each part is that has a port of its own."""
        self.has_queues = False
        """Whether there are topics of other systems to read."""
        self.models: list[dict[str, Any]] = []
        self.failed: dict[str, str] = {}
        """The model that was waited for at the start and could not be loaded, with the reason."""
        self.step = "the look at the settings"
        """The newest step of the start, as it was shown."""
        self._show = progress
        self.supervisor = Supervisor(self._progress, self._changed)
        self._watch = ReadinessWatch(lambda: ask(self.local_url), self._progress, self.home.logs / "worker.log")
        self._started_at = time.time()

    def _progress(self, line: str) -> None:
        self.step = line
        self._show(line)

    @property
    def url(self) -> str:
        return f"http://{self.options.host}:{self.options.port}"

    @property
    def bootstrap_servers(self) -> str:
        return self.options.bootstrap_servers or f"127.0.0.1:{self.kafka_port}"

    @property
    def kafka_port(self) -> int:
        """Of the embedded broker."""
        return self.options.kafka_port or KAFKA_PORT

    def start(self) -> None:
        """Bring everything up and return when it could serve. Raises CliFailure naming the cure."""
        self.check()
        # The broker boots while the models are prepared; both are long only the first time.
        broker = self._start_broker()
        self.models = [*(self.models or self._models()), *self.hub_entries(), *self.tiny_entries()]
        self._say_models()
        environment = self.write_settings()
        if broker is not None:
            self.supervisor.wait_ready(broker, 90.0)
        self._create_topics()
        self._look_at_models_of_before()
        worker = self._worker(environment)
        gateway = self._gateway(environment)
        self.supervisor.start(worker)
        self.supervisor.start(gateway)
        self._progress("starting the gateway and the worker (loading models)")
        self._wait_ready(gateway, GATEWAY_READY_S)
        self._wait_ready(worker, WORKER_READY_S)
        graces_s = {**({"bridge": 40.0} if self.has_queues else {}), "webhooks": 20.0, "summarizer": 20.0}
        beside = [self.part(name, grace_s, environment) for name, grace_s in graces_s.items()]
        for part in beside:
            self.supervisor.start(part)
        self.await_model()
        for part in beside:
            self._wait_ready(part, BESIDE_READY_S)

    def _wait_ready(self, part: Part, deadline_s: float) -> None:
        self.supervisor.wait_ready(part, deadline_s)
        self._progress(f"{part.name}: ready")

    def serves(self) -> None:
        """It says so from now on, and is stopped in order when it is asked to."""
        self.phase = "ready"
        self.supervisor.tell()
        self._watch.start()

    def stop(self) -> None:
        """In order: summaries and webhooks wait, the bridge stops reading queues and the gateway stops accepting, the
        worker drains and commits, the broker closes its logs."""
        self.phase = "stopping"
        self._watch.stop()
        self.supervisor.tell()
        self.supervisor.stop()

    def check(self) -> None:
        """Find out early what would only fail after the long steps."""
        options = self.options
        self.has_queues = bool(checked().get("queues"))
        if port_in_use(options.port, options.host):
            raise CliFailure(
                f"port {options.port} is in use: stop what listens there, or choose another one with --port"
            )
        load(ClusterSettings)
        if options.bootstrap_servers is None:
            self.config.refuse_for_own_kafka()
        elif options.kafka_port is not None:
            self._progress(f"--kafka-port has no effect: the Kafka at {options.bootstrap_servers} is used, none is run")
        for part in HEALTH_PORTS:
            if part != "bridge" or self.has_queues:
                self._choose_port(part)
        self._check_models()

    def _choose_port(self, part: str) -> int:
        """The port that was named, else that of before, which only then may be given up for another."""
        asked = self.options.worker_port if part == "worker" else None
        named = int((self.config.value(part, "health_port") or 0) if asked is None else asked)
        host = self.config.health_host(part)
        in_use = port_in_use(named or self.ports[part], host)
        if in_use and named:
            raise CliFailure(
                f"port {named} for the {part}'s health is in use: stop what listens there, or name another one"
                f" ({'--worker-port, ' if part == 'worker' else ''}{part}.health_port, {variable(part, 'health_port')})"
            )
        self.ports[part] = free_port(host) if in_use else named or self.ports[part]
        return self.ports[part]

    def _check_models(self) -> None:
        options = self.options
        if options.remote is not None:
            self.models = [remote_model(options.remote, options.model)]
            try:
                parse_entry(self.models[0])
            except InvalidRequest as error:
                raise CliFailure(f"--remote: {error.message}", exit_code=ExitCode.USAGE) from None
        elif options.model is not None:
            check_chat_model(options.model)
        else:
            for model in self.config.models:
                check_source(model)
        taken = {model.get("id") for model in self.models or self.config.models}
        for model in options.hub_models:
            if model.id in taken:
                raise CliFailure(f"--with: {model.id} is the name of another model here", exit_code=ExitCode.USAGE)

    def _start_broker(self) -> Part | None:
        if self.options.bootstrap_servers is not None:
            self._require_kafka(self.options.bootstrap_servers)
            return None
        kafka = EmbeddedKafka(self.home.data_dir / "kafka", self.kafka_port, progress=self._progress)
        kafka.log = self.home.logs / "broker.log"
        part = Part(
            name="broker",
            launch=kafka.launch,
            log=kafka.log,
            look=lambda pid: look_at_broker(pid, kafka),
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
            partitions=settings.topics.named("partitions"),
            usual_partitions=EMBEDDED_PARTITIONS if embedded else USUAL_PARTITIONS,
            durability=settings.topics.durability,
            conversation_layout=settings.topics.named("conversation_layout"),
            pools=list(dict.fromkeys([*settings.topics.pools, *filter(None, (self.config.pool,))])),
            queues=load(QueueSettings).topics,
            alter=embedded,
            progress=self._progress,
        )

    def _models(self) -> list[dict[str, Any]]:
        """The `[[models]]` of this run: the config's own, unless --model or --remote say otherwise."""
        options, configured = self.options, self.config.models
        if configured and options.model is None:
            return configured
        embedding = ASSETS[DEFAULT_EMBEDDING]
        others = [model for model in configured if "text_generation" not in model.get("tasks", ["text_generation"])]
        if not configured:
            others = [embedding.model_table(prepare_model(embedding.id, self._progress)), dict(IMAGING)]
            others += self._upscaler()
        return [chat_model(options.model or DEFAULT_CHAT, self._progress), *others]

    def _upscaler(self) -> list[dict[str, Any]]:
        """The upscaler, if it can be had: nobody's chat shall wait for it."""
        asset = ASSETS[DEFAULT_UPSCALER]
        try:
            return [{**asset.model_table(prepare_model(asset.id, self._progress)), "preload": False}]
        except CliFailure as failure:
            self._progress(f"going on without the upscaler: {failure}")
            return []

    def hub_entries(self) -> list[dict[str, Any]]:
        """Before the tiny ones, which stand in where there is no other."""
        return [model.entry() for model in self.options.hub_models]

    def tiny_entries(self) -> list[dict[str, Any]]:
        """After all others, where a request names no model: one of them knows a few words of text too."""
        wanted = TINY_MODELS if self.options.tiny_models else ()
        last = {"preload": False, "priority": PRIORITY + 1}
        return [{**ASSETS[name].model_table(prepare_model(name, self._progress)), **last} for name in wanted]

    def _say_models(self) -> None:
        chosen = {model["id"] for model in self.models}
        if replaced := [str(model.get("id")) for model in self.config.models if model.get("id") not in chosen]:
            option = "--model" if self.options.remote is None else "--remote"
            self._progress(f"{option} takes the place of the configured model(s) {', '.join(replaced)}")
        served = {one.id for one in self._own_entries()}
        if others := [f"{model['id']} ({model.get('pool')})" for model in self.models if model["id"] not in served]:
            self._progress(f"models of other pools than the worker's are not served here: {', '.join(others)}")

    def _look_at_models_of_before(self) -> None:
        """Which models of this run orders have removed, and which of earlier runs it does not serve.

        On a Kafka of somebody else's, other workers may serve these.
        """
        for line in removed_lines(self._own_entries(), self._orders(), self.config.pool):
            self._progress(line)
        if self.options.bootstrap_servers is None:
            kafka = load(ClusterSettings).kafka_settings(self.bootstrap_servers)
            if gone := withdraw_unserved(kafka, self.config.pool, {entry.id for entry in self.entries()}):
                self._progress(f"models of an earlier start are not served: {', '.join(gone)}")

    def write_settings(self) -> dict[str, str]:
        """The children's environment: their TOML is the person's with this run's models; the rest are variables."""
        path = self.home.data_dir / "run.toml"
        path.write_text(
            "# Written by `penstock up` at every start; changes are lost. Yours goes to --config.\n"
            + to_toml({**self.config.tables, "models": self.models})
        )
        data_dir = self.home.data_dir
        own: dict[tuple[str, str], Path | str] = {
            ("worker", "data_dir"): data_dir / "worker",
            ("gateway", "view_path"): data_dir / "gateway" / "view.sqlite",
            ("summarizer", "data_dir"): data_dir / "summarizer",
            ("artifacts", "location"): data_dir / "artifacts",
        }
        return {
            **{name: value for name, value in os.environ.items() if name != MODELS},
            **self.config.unset(own),
            ENV_CONFIG: str(path),
            "PYTHONUNBUFFERED": "1",
            "PENSTOCK_KAFKA__BOOTSTRAP_SERVERS": self.bootstrap_servers,
            **self._webhook_secret(),
            "PENSTOCK_GATEWAY__HOST": self.options.host,
            "PENSTOCK_GATEWAY__PORT": str(self.options.port),
        }

    def entries(self) -> list[ModelEntry]:
        """The models that the worker serves: those of this run, and what operators ordered since and before."""
        return effective_entries(self._own_entries(), {key: one.state for key, one in self._orders().items()})

    def _own_entries(self) -> list[ModelEntry]:
        return served_by([parse_entry(model) for model in self.models], self.config.pool)

    def _orders(self) -> dict[str, Desired]:
        """Of the worker's pool."""
        found = read_orders(load(ClusterSettings).kafka_settings(self.bootstrap_servers)) or {}
        return {key: one for key, one in found.items() if one.state.pool == self.config.pool}

    def wanted_model(self) -> str | None:
        """The first model that is to be loaded by itself, as it is ordered now."""
        orders = self._orders()
        for entry in effective_entries(self._own_entries(), {key: one.state for key, one in orders.items()}):
            ordered = orders.get(desired_key(MODEL, entry.id, self.config.pool))
            state = None if ordered is None else ordered.state
            if entry.preload and (state is None or not (state.paused or state.loaded is False)):
                return entry.id
        return None

    def await_model(self) -> None:
        """Wait until the first model is loaded, so that the first answer is quick; Penstock serves without it too."""
        model = self.wanted_model()
        began = said = looked = time.monotonic()
        failed_since: float | None = None
        while model is not None and time.monotonic() - began < MODEL_LOADED_S:
            self.supervisor.tend_start()
            if time.monotonic() - looked > ORDERS_S:  # somebody may have ordered otherwise
                model, looked = self.wanted_model(), time.monotonic()
                continue
            state = model_state(self.url, model, since=self._started_at)
            if state is None:  # the gateway wants a key
                state = model_state_of_worker(self.worker_url, model)
            if state == "ready":
                return
            failed_since = None if state != "failed" else failed_since or time.monotonic()
            if failed_since is not None and time.monotonic() - failed_since > FAILED_S:
                log = self.home.logs / "worker.log"
                self.failed[model] = f"{ask(self.local_url).reason or f'{model} could not be loaded'} (log: {log})"
                self._progress(f"{self.failed[model]}; asking for it tries again")
                return
            if time.monotonic() - said > 15:
                said = time.monotonic()
                self._progress(f"the model {model} is {state} … {said - began:.0f} s")
            time.sleep(0.2)
        if model is not None:
            self._progress(f"the model {model} is still not loaded; going on without waiting")

    @property
    def worker_url(self) -> str:
        return self.part_url("worker")

    @property
    def local_url(self) -> str:
        """The gateway as this machine reaches it."""
        return local_url(self.options.host, self.options.port)

    def _worker(self, environment: Mapping[str, str]) -> Part:
        grace_s = load(DrainSettings).worker.drain_s + 40
        return self.part("worker", grace_s, environment)

    def _gateway(self, environment: Mapping[str, str]) -> Part:
        (self.home.data_dir / "gateway").mkdir(exist_ok=True)
        grace_s = load(DrainSettings).gateway.drain_s + 15
        return self.part("gateway", grace_s, environment)

    @property
    def own_webhook_secret(self) -> Path | None:
        """The file of the secret that was made here; None where one is configured."""
        configured = self.config.value("webhooks", "secret") or self.config.value("webhooks", "secrets")
        return None if configured else self.home.data_dir / "webhook-secret"

    def _webhook_secret(self) -> dict[str, str]:
        """For the children's environment: the secret that signs webhooks, made at the first start."""
        path = self.own_webhook_secret
        if path is None:
            return {}
        if not path.exists():
            fresh = path.with_suffix(".new")
            fresh.touch(mode=0o600)
            fresh.write_text("whsec_" + base64.b64encode(os.urandom(32)).decode() + "\n")
            fresh.replace(path)
        return {variable("webhooks", "secret"): path.read_text().strip()}

    def part_url(self, name: str) -> str:
        return self.local_url if name == "gateway" else local_url(self.config.health_host(name), self.ports[name])

    def part(self, name: str, grace_s: float, environment: Mapping[str, str]) -> Part:
        """A part that is a command of Penstock. A health port that nobody named is chosen right before each start."""

        def env() -> Mapping[str, str]:
            if name == "gateway":
                return environment
            return {**environment, variable(name, "health_port"): str(self._choose_port(name))}

        return command_part(
            name,
            penstock_command(name),
            log=self.home.logs / f"{name}.log",
            look=lambda pid: ask_process(pid, self.part_url(name)),
            grace_s=grace_s,
            env=env,
        )

    def _changed(self) -> None:
        parts = [
            PartState(
                name=part.name,
                pid=part.process.pid if part.process is not None and part.running else None,
                restarts=part.restarts,
                log=str(part.log),
                ready_url=None if part.name == "broker" else f"{self.part_url(part.name)}/readyz",
                cause=part.cause,
            )
            for part in self.supervisor.parts
        ]
        self.home.write(
            SystemState(
                pid=os.getpid(),
                phase=self.phase,
                url=self.local_url,
                bootstrap_servers=self.bootstrap_servers,
                models=[str(model["id"]) for model in self.models],
                started_at=self._started_at,
                failed=self.failed,
                keys_file=self.config.keys_file,
                parts=parts,
            )
        )


def model_state(url: str, model: str, since: float) -> str | None:
    """What the gateway says of a model: "unknown" if not told since (Unix s); None when it may not be asked."""
    try:
        answer = httpx.get(f"{url}/v1/models?task=all", timeout=5, trust_env=False)
        if answer.status_code != 200:
            return None
        found = next((entry for entry in answer.json()["data"] if entry["id"] == model), None)
    except (httpx.HTTPError, ValueError, KeyError):
        return "unknown"
    # The topic remembers what the last run said.
    return "unknown" if found is None or found["created"] < int(since) else str(found["state"])


def model_state_of_worker(url: str, model: str) -> str:
    """What a worker says of a model of its own, to everybody who reaches its health port; "unknown" if nothing."""
    try:
        states = httpx.get(f"{url}/readyz", timeout=5, trust_env=False).json()["models"]
        return str(states.get(model, "unknown"))
    except (httpx.HTTPError, ValueError, KeyError, AttributeError):
        return "unknown"


def where_models_are(url: str, models: Sequence[str]) -> str:
    """The models that the worker serves now, with their devices; one that is not ready, with its state.

    `models`: those to name where the worker does not answer.
    """
    try:
        told = httpx.get(f"{url}/readyz", timeout=5, trust_env=False).json()
        return ", ".join(_with_device(model, told) for model in told["models"]) or "none"
    except (httpx.HTTPError, ValueError, KeyError):
        return ", ".join(models)


def _with_device(model: str, told: Mapping[str, Any]) -> str:
    state, devices = told["models"][model], told["devices"].get(model)
    if devices:
        return f"{model} (on {' '.join(devices)})"
    if state == "absent":
        return f"{model} (loaded when asked for)"
    return model if state == "ready" else f"{model} ({state})"


def card(system: LocalSystem) -> str:
    """What a person needs now, short."""
    url, data, option = system.url, system.home.data_dir, system.home.option
    entries = system.entries()
    models = [entry.id for entry in entries if "text_generation" in entry.tasks]
    chat = next((model for model in models if model not in system.failed), None)
    without = "".join(f" without the model {model}" for model in system.failed)
    body = f'{{"model":"{chat}","messages":[{{"role":"user","content":"What is the capital of France?"}}]}}'
    headers, key, export = "-H 'content-type: application/json'", "none", f"export PENSTOCK_URL={url}"
    if system.config.keys_file is not None:
        headers, key = f"-H 'authorization: Bearer KEY' {headers}", "KEY"
        export += f" PENSTOCK_API_KEY=KEY   (penstock keys create --file {shlex.quote(system.config.keys_file)})"
    first = f"""
    penstock chat{f" --model {chat}" if system.failed else ""}
    curl {url}/v1/chat/completions {headers} -d '{body}'
    OpenAI(base_url="{url}/v1", api_key="{key}").chat.completions.create(model="{chat}", messages=[…])
"""
    return f"""
  Penstock is up{without}: {url}   (the console, for a browser; {url}/docs: the routes)

    {export}{"" if chat is None else first}
  Kafka {system.bootstrap_servers}   parts  {_parts_line(system)}
  models  {where_models_are(system.worker_url, [entry.id for entry in entries])}{_without_model(system, entries)}
  worker  {system.worker_url}/readyz   data  {data}{_webhooks_line(system)}
  logs  penstock logs -f{option}   status  penstock status{option}
"""


def _parts_line(system: LocalSystem) -> str:
    """`broker, worker, gateway: ready`, and what any other says of itself."""
    said = {part.name: part.readiness().text() for part in system.supervisor.parts}
    others = [f"{name}: {text}" for name, text in said.items() if text != "ready"]
    return "; ".join([f"{', '.join(name for name, text in said.items() if text == 'ready')}: ready", *others])


def _webhooks_line(system: LocalSystem) -> str:
    """Where the secret lies that was made for receivers of webhooks."""
    path = system.own_webhook_secret
    return "" if path is None else f"\n  webhooks are signed by the secret in {path}"


def _without_model(system: LocalSystem, entries: Sequence[ModelEntry]) -> str:
    """A line that says for which tasks there is no model, if there are such."""
    served = {task for entry in entries for task in entry.tasks}
    lacking = [task for task in BUILT_TASKS if needs_model(task) and task not in served]
    if not lacking or system.options.remote is not None:
        return ""
    cure = (
        ""
        if system.options.tiny_models
        else " (--with images adds real ones, --tiny-models tiny ones to try the routes)"
    )
    return f"\n  no model for {', '.join(lacking)}{cure}"


def look_at_broker(pid: int, kafka: EmbeddedKafka) -> Readiness:
    """Another broker that answers on its port does not count."""
    if listens(pid, kafka.port) and answers(kafka.bootstrap_servers, timeout_s=1.0):
        return Readiness(status="ready")
    return Readiness(status="unreachable", reason="it does not answer")


def penstock_command(name: str) -> list[str]:
    """How a part is started: as `penstock <name>`, by which process lists show it."""
    script = Path(sys.executable).with_name("penstock")
    return [str(script), name] if script.exists() else [sys.executable, "-m", "penstock.cli.main", name]
