"""What a forked child does with its parent's Kafka clients: it uses none of them, and lets none of them end.

librdkafka's threads do not live on in a child. A call through a client of before would wait for them for ever, and so
would the end of such a client, at the latest when the child exits.
"""

from __future__ import annotations

import ctypes
import os
import weakref

_owners: weakref.WeakSet[object] = weakref.WeakSet()


def keep_in_children(owner: object) -> None:
    """Never let this object, which holds a Kafka client, be collected in a child of this process."""
    _owners.add(owner)


def _in_child() -> None:
    for owner in _owners:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))


os.register_at_fork(after_in_child=_in_child)
