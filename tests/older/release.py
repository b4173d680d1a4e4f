"""The sources of an older release, for processes of it beside those of this one.

b887c1a writes and knows older records: InferenceRequest 6, WorkerState 5, no GatewayState. Its dependencies are those
of this release. `git archive --prefix=release/ b887c1a schemas common producers processors gateway cli` made it.
"""

from __future__ import annotations

import os
import tarfile
import tempfile
from functools import cache
from pathlib import Path

ARCHIVE = Path(__file__).parent / "b887c1a-source.tar.xz"
ROOMS = ("schemas", "common", "producers", "processors", "gateway", "cli")


@cache
def _unpacked() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="penstock-older-")
    with tarfile.open(ARCHIVE) as file:
        # Python 3.11.2, which Debian 12 has, takes no `filter=`.
        file.extraction_filter = getattr(tarfile, "data_filter", None)
        file.extractall(folder.name)
    return folder


def python_path() -> str:
    """What PYTHONPATH has to be for a process of that release."""
    return os.pathsep.join(f"{_unpacked().name}/release/{room}" for room in ROOMS)
