"""What a forked child does with its parent's Kafka clients: it uses none of them, and lets none of them end.

librdkafka's threads do not live on in a child. A call through a client of before would wait for them for ever, and so
would the end of such a client, at the latest when the child exits.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref

_owners: weakref.WeakSet[object] = weakref.WeakSet()
_in_a_child = False
_leaves_locks = False
"""Whether a fork at this moment may leave a lock behind that a thread holds."""
_forks = 0


def forks() -> int:
    """How many forks lie between this process and the first that had imported this module.

    What compares it with that of an earlier time asks the system for nothing, as it would by os.getpid.
    """
    return _forks


def keep_for_ever(owner: object) -> None:
    """Never let this object be collected in this process."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))


def in_a_child() -> bool:
    """Whether this process is a fork of one that had Kafka clients or several threads.

    Its own Kafka clients may hang too: glibc's getaddrinfo takes a lock that a thread of the parent may have held at
    that moment, and that nobody lets go in the child. What waits for a client's end there could wait for ever.
    """
    return _in_a_child


def keep_in_children(owner: object) -> None:
    """Never let this object, which holds a Kafka client, be collected in a child of this process."""
    _owners.add(owner)


def _before_fork() -> None:
    global _leaves_locks
    _leaves_locks = bool(_owners) or threading.active_count() > 1


def _in_child() -> None:
    global _in_a_child, _forks
    _in_a_child = _in_a_child or _leaves_locks
    _forks += 1
    for owner in _owners:
        keep_for_ever(owner)


os.register_at_fork(before=_before_fork, after_in_child=_in_child)
