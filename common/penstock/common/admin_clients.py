"""Admin clients of this process, and how they are asked: what hears nothing is asked again through a new one."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient

from penstock.common.forking import in_a_child, keep_for_ever, keep_in_children
from penstock.common.kafka_errors import from_kafka, wrong_configuration
from penstock.common.refused_connections import HeardErrors
from penstock.common.settings import KafkaSettings
from penstock.schemas.errors import BrokerRefused, BrokerUnavailable, PenstockError

Answer = TypeVar("Answer")

_unlogged = logging.getLogger("penstock.kafka.admin")
"""Of admin clients: what they log is raised as an error."""
_unlogged.disabled = True

STUCK_S = 3.0
"""An answer about the cluster that takes longer is asked for again with a new client."""
REFUSED_S = 2.0
"""The wait for an answer after a refused connection."""

_clients: dict[tuple[object, ...], AdminClient] = {}
_heard_errors: dict[tuple[object, ...], HeardErrors] = {}
"""Of each of these clients."""
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
            former = _heard_errors.get(key)
            _clients[key], _heard_errors[key] = _new_client(settings)
            _heard_errors[key].answered = former is not None and former.answered
            keep_in_children(_clients[key])
        return _clients[key]


def _new_client(settings: KafkaSettings) -> tuple[AdminClient, HeardErrors]:
    heard = HeardErrors()
    config: dict[str, Any] = {**settings.librdkafka(), "error_cb": heard.note}
    del config["allow.auto.create.topics"]  # a consumer's property
    try:
        return AdminClient(config, logger=_unlogged), heard
    except KafkaException as error:
        raise wrong_configuration(error) from error


def check_connection(settings: KafkaSettings, timeout_s: float) -> None:
    """Have a new client connect. Raises InvalidRequest, BrokerRefused, BrokerUnavailable."""
    give_up = time.monotonic() + timeout_s
    client, heard = _new_client(settings)
    try:
        client.list_topics(timeout=timeout_s)
    except KafkaException as error:
        client.poll(0.1)
        doing = f"reach Kafka at {settings.bootstrap_servers}"
        raise heard.refused(settings, give_up) or from_kafka(error, doing) from error


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


def _refusal(settings: KafkaSettings, client: AdminClient, give_up: float) -> BrokerRefused | None:
    for _ in range(3):  # it reports a moment late
        client.poll(0.05)
    return _heard_errors[_key(settings)].refused(settings, give_up)


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
    Raises BrokerRefused, soon, where brokers refuse the connections of this client.
    """
    give_up = time.monotonic() + timeout_s
    wait_s, refused = STUCK_S, None
    for tries in itertools.count(1):
        client = admin_client(settings)  # held until all is answered
        client.poll(0)  # what it reported earlier
        try:
            answer = ask(client, max(0.1, min(wait_s, give_up - time.monotonic())))
            _heard_errors[_key(settings)].answered = True
            return answer
        except BrokerUnavailable as error:
            # After a broker's restart librdkafka also keeps asking with the leader epoch of before, and is refused for
            # minutes: only a new client learns the new one.
            silent = isinstance(error, _Silent)
            before, refused = refused, _refusal(settings, client, give_up) if silent else None
            if refused is not None and (before is not None or time.monotonic() >= give_up):
                raise refused from error  # twice in a row: a broker that starts may refuse what it takes a moment later
            if silent or tries % 5 == 0:
                _forget(settings, client)
            if not (silent or refused_too) or time.monotonic() >= give_up:
                raise
        wait_s = REFUSED_S if refused is not None else wait_s * 2 if silent else wait_s
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
