"""Fixtures that every room shares: one real broker per session, a topic prefix per test, models made once."""

from __future__ import annotations

import os
import signal
import tempfile
import uuid
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import httpx
import pytest
from httpx._transports import default as httpx_transport
from hypothesis import HealthCheck, settings

from kit.assets import prepared
from kit.examples import examples
from penstock.cli import children
from penstock.cli.embedded_kafka import EmbeddedKafka
from penstock.cli.paths import free_port
from penstock.gateway.edge.keys import create_key
from support import create_topics as _create_topics
from support import delete_topics
from system import BROKERS, RUNNING, Process, System, running

pytest_plugins = ["kit.run.plugin"]

# The machine's processor is stolen in waves: no example fails for the time it took.
settings.register_profile(
    "penstock", max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("penstock")

# Commands find the instances of this run, and none of the person who runs the tests.
_OWN = tempfile.TemporaryDirectory(prefix="penstock-state-")
os.environ.update(XDG_STATE_HOME=_OWN.name, XDG_DATA_HOME=_OWN.name)
for _name in ("PENSTOCK_DATA", "PENSTOCK_URL", "PENSTOCK_API_KEY"):
    os.environ.pop(_name, None)

# A shell starts `command &` with Ctrl-C ignored, which all processes that tests start would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Every client reads the certificates of all authorities: 50 ms of processor time, for each look at /readyz too.
httpx_transport.create_ssl_context = cache(httpx.create_ssl_context)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
    """A test leaves the session's broker running.

    After a file's last test its topics go: a broker with thousands of partitions takes a minute to start again.
    """
    yield
    stopped = [broker for broker in BROKERS if not broker.running]
    for broker in stopped:
        broker.start()
    if nextitem is not None and nextitem.path != item.path:
        for broker in BROKERS:
            delete_topics(broker.bootstrap_servers, but=[system.prefix for system in RUNNING])
    assert not stopped, f"the broker does not run at the end:\n{children.tail(stopped[0].log, 40)}"


class Kafka(Protocol):
    """What a test may do with the session's broker. A test that stops it must leave it running."""

    @property
    def bootstrap_servers(self) -> str: ...

    def start(self) -> object: ...

    def stop(self) -> None: ...

    def kill(self) -> None: ...

    def restart(self) -> None: ...


class ExistingKafka:
    """A broker that somebody else runs (PENSTOCK_TEST_KAFKA=host:port): tests that restart it are skipped."""

    def __init__(self, bootstrap_servers: str) -> None:
        self.bootstrap_servers = bootstrap_servers

    def _not_ours(self) -> None:
        pytest.skip("this test restarts the broker, and PENSTOCK_TEST_KAFKA names one that is not ours")

    start = stop = kill = restart = _not_ours


@pytest.fixture(autouse=True)
def _no_configuration_of_another_test() -> Iterator[None]:
    """A command that is run in this process names its configuration to children of the process, later tests' too."""
    yield
    for name in ("PENSTOCK_CONFIG", "PENSTOCK_KAFKA__BOOTSTRAP_SERVERS"):
        os.environ.pop(name, None)


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    """One real Apache Kafka for the whole session, on a free port, with its data in a temporary folder."""
    if existing := os.environ.get("PENSTOCK_TEST_KAFKA"):
        yield ExistingKafka(existing)
        return
    broker = EmbeddedKafka(tmp_path_factory.mktemp("kafka"), free_port())
    broker.start()
    BROKERS.append(broker)
    try:
        yield broker
    finally:
        BROKERS.remove(broker)
        # Its data goes with the session: nothing is worth an orderly end.
        broker.kill()


@pytest.fixture
def kafka_prefix() -> str:
    """A topic prefix of this test's own."""
    return f"t{uuid.uuid4().hex[:6]}-"


@pytest.fixture
def create_topics(kafka: Kafka, kafka_prefix: str) -> Callable[..., None]:
    """Call it to create this test's topics; the arguments are those of `support.create_topics` behind the prefix."""
    return partial(_create_topics, kafka.bootstrap_servers, kafka_prefix)


@pytest.fixture
def make_system(kafka: Kafka, tmp_path: Path) -> Iterator[Callable[..., System]]:
    """Makes systems that stop with the test. Options are those of `System`; no process is started."""
    with ExitStack() as stack:

        def make(**options: Any) -> System:
            prefix = f"t{uuid.uuid4().hex[:6]}-"
            return stack.enter_context(running(System(kafka.bootstrap_servers, prefix, tmp_path / prefix, **options)))

        yield make


@pytest.fixture(scope="module")
def system(kafka: Kafka, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[System]:
    """The system of a test file, started once.

    The file's `SYSTEM` holds options of `System`. Under "processes" it names those that run, a worker and a gateway by
    default, and under "tenants" those that have a key. It is a function where options have to be made first.
    """
    described: dict[str, Any] | Callable[[], dict[str, Any]] = request.module.SYSTEM
    options = dict(described if isinstance(described, dict) else described())
    names = options.pop("processes", ["w1", "g1"])
    folder = tmp_path_factory.mktemp("system")
    keys_file = folder / "keys.json"
    if tenants := options.pop("tenants", []):
        options["auth"] = {"keys_file": str(keys_file)}
        options["keys"] = {tenant: create_key(keys_file, tenant=tenant) for tenant in tenants}
    made = System(kafka.bootstrap_servers, f"t{uuid.uuid4().hex[:6]}-", folder, **options)
    with running(made):
        yield made.start_all(names)


@pytest.fixture
def gateway(system: System) -> Process:
    """The newest gateway of the file's system."""
    return system.process("g")


@pytest.fixture
def client(system: System) -> Iterator[httpx.Client]:
    """A client of the newest gateway of the file's system."""
    with httpx.Client(base_url=system.process("g").url, timeout=60) as found:
        yield found


@pytest.fixture(scope="session")
def tiny_lm() -> Path:
    """The folder of a tiny chat model, trained in code once and kept in the cache."""
    return prepared("tiny-lm")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct, prepared once into the cache."""
    return prepared("smollm2-135m")


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The folder of all-MiniLM-L6-v2, prepared once into the cache."""
    return prepared("all-minilm-l6-v2")


@pytest.fixture(scope="session")
def tiny_vision() -> Path:
    """The folder of a tiny model that tells the colours of pictures, trained in code once."""
    return prepared("tiny-image-to-text")


@pytest.fixture(scope="session")
def upscaler() -> Path:
    """The folder of Real-ESRGAN's compact network with its real weights, fetched once."""
    return prepared("realesr-animevideov3")


@pytest.fixture(scope="session")
def llama_cpp() -> dict[str, Any]:
    """A `[[models]]` entry that runs SmolLM2 on llama.cpp's own server."""
    from penstock.cli import assets

    model = "smollm2-135m-llamacpp"
    return assets.ASSETS[model].model_table(prepared(model))
