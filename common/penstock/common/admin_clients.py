"""Admin clients of this process, and how they are asked: what hears nothing is asked again through a new one."""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient

from penstock.common.forking import in_a_child, keep_for_ever, keep_in_children
from penstock.common.kafka_errors import client_logger, from_kafka, wrong_configuration
from penstock.common.settings import KafkaSettings
from penstock.schemas.errors import BrokerUnavailable, PenstockError

Answer = TypeVar("Answer")

STUCK_S = 3.0
"""An answer about the cluster that takes longer is asked for again with a new client."""

_clients: dict[tuple[object, ...], AdminClient] = {}
RENEW_S = 1.0
"""A client is not replaced before it is so old: an outage would pile them up."""
_made_at: dict[tuple[object, ...], float] = {}
_clients_lock = threading.Lock()


def admin_client(settings: KafkaSettings) -> AdminClient:
    """The process's admin client for these settings; connecting one per call would cost more than the calls.

    Hold it until its answer is there: one that was replaced ends, with its threads, when nobody holds it any more.
    """
    key = _key(settings)
    with _clients_lock:
        if key not in _clients:
            _made_at[key] = time.monotonic()
            config = settings.librdkafka()
            del config["allow.auto.create.topics"]  # a consumer's property
            try:
                _clients[key] = AdminClient(config, logger=client_logger)
            except KafkaException as error:
                raise wrong_configuration(error) from error
            keep_in_children(_clients[key])
        return _clients[key]


def _begin_anew() -> None:
    """In a forked child: make clients of its own."""
    global _clients_lock
    _clients_lock = threading.Lock()  # another thread of the parent may have held it
    _clients.clear()


def _leave_as_they_are() -> None:
    """At the process's end: admin clients have nothing to hand in, and one that hangs would hold the process back."""
    for client in _clients.values():
        keep_for_ever(client)


os.register_at_fork(after_in_child=_begin_anew)
atexit.register(_leave_as_they_are)


def _key(settings: KafkaSettings) -> tuple[object, ...]:
    return (settings.bootstrap_servers, settings.client_id, *sorted(settings.security.items()))


def _forget(settings: KafkaSettings, client: AdminClient) -> None:
    """Begin with a new client: one that lost its broker can stay without any connection for a minute and more."""
    key = _key(settings)
    with _clients_lock:
        if _clients.get(key) is client and time.monotonic() - _made_at.get(key, 0.0) >= RENEW_S:
            if in_a_child():
                keep_for_ever(client)
            del _clients[key]


class _Silent(BrokerUnavailable):
    """Nothing was heard at all, in place of a refusal: the client may be stuck."""


_NOT_HEARD = frozenset(
    {KafkaError._TIMED_OUT, KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN}  # pyright: ignore[reportPrivateUsage]
)


def asked(
    settings: KafkaSettings,
    ask: Callable[[AdminClient, float], Answer],
    timeout_s: float,
    *,
    refused_too: bool = False,
) -> Answer:
    """What Kafka answers to `ask(client, seconds to wait)`, tried again with a new client when nothing is heard.

    With `refused_too` also what a broker refuses for now is asked again. `ask` may be carried out more than once.
    """
    give_up = time.monotonic() + timeout_s
    wait_s = STUCK_S
    for tries in itertools.count(1):
        client = admin_client(settings)  # held until all is answered
        try:
            return ask(client, max(0.1, min(wait_s, give_up - time.monotonic())))
        except BrokerUnavailable as error:
            # After a broker's restart librdkafka also keeps asking with the leader epoch of before, and is refused for
            # minutes: only a new client learns the new one.
            silent = isinstance(error, _Silent)
            if silent or tries % 5 == 0:
                _forget(settings, client)
            if not (silent or refused_too) or time.monotonic() >= give_up:
                raise
        wait_s = wait_s * 2 if silent else wait_s
        time.sleep(0.02)
    raise AssertionError("unreachable")


def answer_of(
    future: Future[Any], doing: str, wait_s: float, topic: str | None = None, group: str | None = None
) -> Any:
    if (error := _heard(future, doing, wait_s)) is not None:
        raise from_kafka(error, doing, topic, group)
    return future.result()


def is_new(future: Future[Any], doing: str, wait_s: float) -> bool:
    """Whether what was to be made was made now; False when it existed. Any other error is raised."""
    error = _heard(future, doing, wait_s)
    if error is not None and error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
        raise from_kafka(error, doing)
    return error is None


def _heard(future: Future[Any], doing: str, wait_s: float) -> KafkaException | None:
    """The broker's refusal, if any. Raises _Silent when nothing was heard, and whatever else went wrong."""
    # Raised by `result`, the error would refer to the frames that hold the future and the client: a cycle that keeps
    # a client's threads until the collector comes by.
    try:
        error = future.exception(wait_s + 1)
    except TimeoutError as late:
        raise _Silent(f"{doing}: no answer within {wait_s:.0f} s", retry_after_s=1.0) from late
    if error is None:
        return None
    if not isinstance(error, KafkaException):
        raise error
    if error.args[0].code() in _NOT_HEARD:
        raise unanswered(error, doing)
    return error


def unanswered(error: KafkaException, doing: str) -> PenstockError:
    ours = from_kafka(error, doing)
    return _Silent(str(ours), retry_after_s=1.0) if error.args[0].code() in _NOT_HEARD else ours
