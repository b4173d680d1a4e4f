"""The limit of open files, raised at the start: each connection is one."""

from __future__ import annotations

import logging
import resource

logger = logging.getLogger(__name__)

BESIDE_CONNECTIONS = 1_024
"""Kafka, SQLite, artifacts, and connections that wait to be taken."""


def raise_open_files(connections: int) -> int:
    """Raise the soft limit to what so many connections need, as far as the hard limit allows; the limit then."""
    wanted = 2 * connections + BESIDE_CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
        except (ValueError, OSError) as error:
            logger.warning("gateway.open_files_not_raised error=%s", error)
    log = logger.info if soft == resource.RLIM_INFINITY or soft >= wanted else logger.warning
    log("gateway.open_files limit=%d wanted=%d hard=%d", soft, wanted, hard)
    return soft
