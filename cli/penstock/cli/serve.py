"""`penstock worker`, `gateway`, `bridge`, `webhooks`, `summarizer`: one process each, by penstock.toml."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn, TypeVar

import typer

from penstock.cli.config import ConfigFile, load, use_config
from penstock.cli.installs import importing
from penstock.cli.log_options import LogOptions
from penstock.common.configuration import ENV_SECRETS, KafkaProcessSettings
from penstock.common.renewed_files import RenewedFiles
from penstock.common.stop_bound import restart_process, run_process

S = TypeVar("S", bound=KafkaProcessSettings)


@dataclass
class Started(LogOptions):
    """How a process is started."""

    config: ConfigFile = None
    bootstrap_servers: Annotated[
        str | None, typer.Option("--bootstrap-servers", "-b", help="Kafka (default: [kafka], else 127.0.0.1:9092).")
    ] = None

    @contextmanager
    def importing(self, room: str) -> Generator[None]:
        """Around the imports of a room, which may not be installed: logging and settings are set up before.

        An option goes before the file: by its variable, which does too.
        """
        use_config(self.config)
        self.set_up_logging()
        if self.bootstrap_servers is not None:
            os.environ["PENSTOCK_KAFKA__BOOTSTRAP_SERVERS"] = self.bootstrap_servers
        with importing(room):
            yield


def worker(started: Started) -> None:
    """Run one worker: takes requests from Kafka and runs them on its models.

    Example:  penstock worker --config penstock.toml

    Start as many as you like, on as many machines; they share the work as one consumer group.
    """
    with started.importing("worker"):
        from penstock.processors.app import run_worker
        from penstock.processors.settings import WorkerSettings
    finish(run_worker, WorkerSettings)


def gateway(started: Started) -> None:
    """Run one gateway: HTTP, WebSocket and OpenAI routes in front of Kafka.

    Example:  PENSTOCK_GATEWAY__PORT=8080 penstock gateway --config penstock.toml
    """
    with started.importing("gateway"):
        from penstock.gateway.app import run_gateway
        from penstock.gateway.settings import GatewaySettings
    finish(run_gateway, GatewaySettings, new_loop=fast_loop())


def bridge(started: Started) -> None:
    """Run one bridge: reads the topics of other systems that [[queues]] names, and writes the answers back.

    Example:  penstock bridge --config penstock.toml

    Each message becomes one request, which workers run; its answer goes to the queue's result_topic. Start as many
    as you like: they share the queues as one consumer group, and one that is killed is followed by another within
    ten seconds. Its port, bridge.health_port, has /healthz, /readyz and /metrics.
    """
    with started.importing("gateway"):
        from penstock.gateway.bridge.app import run_bridge
        from penstock.gateway.bridge.settings import BridgeSettings
    finish(run_bridge, BridgeSettings)


def webhooks(started: Started) -> None:
    """Run one sender of webhooks: calls the callback_url of requests with outcomes, and with statuses where asked.

    Example:  penstock webhooks --config penstock.toml

    Calls are signed by webhooks.secret and tried again for a day; what nobody takes becomes a dead letter. Start as
    many as you like: they share the work as one consumer group, and one that is killed is followed by another within
    ten seconds. Its port, webhooks.health_port, has /healthz, /readyz and /metrics.
    """
    with started.importing("gateway"):
        from penstock.gateway.webhooks.app import run_webhooks
        from penstock.gateway.webhooks.settings import WebhooksSettings
    finish(run_webhooks, WebhooksSettings)


def summarizer(started: Started) -> None:
    """Run one summarizer: sums up conversations by their policies, as low work.

    Example:  PENSTOCK_SUMMARIZER__EVERY_TURNS=20 penstock summarizer --config penstock.toml

    It follows the topics of conversations that have a policy, of [summarizer] or of their own (see `penstock
    conversations set --help`), and submits a request for each span that is due. One that is killed is followed by the
    next at the same place: spans are neither summed up twice nor passed over. A second one beside it does no harm. Its
    port, summarizer.health_port, has /healthz, /readyz and /metrics.
    """
    with started.importing("gateway"):
        from penstock.gateway.summarizer.app import run_summarizer
        from penstock.gateway.summarizer.settings import SummarizerSettings
    finish(run_summarizer, SummarizerSettings)


def fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where there is one: sockets are most of what a gateway does."""
    try:
        import uvloop
    except ModuleNotFoundError:  # it is not built for every platform
        return None
    return uvloop.new_event_loop


def finish(
    run: Callable[[S], Coroutine[Any, Any, int | None]],
    settings_type: type[S],
    *,
    new_loop: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> NoReturn:
    """Run to the end; ends the process with the code that it returns, or restarts it when certificates were renewed."""
    named = load(settings_type)
    renewed = RenewedFiles(
        named.kafka_settings(),
        os.environ.get(ENV_SECRETS),
        lambda: load(settings_type).kafka_settings(),
        restart_process,
        named.kafka.restart_spread_s,
    )
    settings = load(settings_type)  # after the look at the files that it is read from
    renewed.start()
    run_process(run(settings), new_loop)
