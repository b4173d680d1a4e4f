"""A folder on a file system of its own that fails, hangs or is full when it is told to. Needs root and loop devices."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.cli.faults.disks import SmallDisk, command
from penstock.common.artifacts import ArtifactStore
from store_outages import Outage
from support import wait_until
from system import Process

_CAUSES = {"fails": "Read-only file system", "fills": "No space left"}
_FROZEN = "percpu_rwsem_wait"
"""Where a thread waits in the kernel that writes to a frozen file system."""


class BreakableDisk:
    """A small disk under `folder`.

    While it fails it is read-only, while it hangs it is frozen, while it is full a file takes all that was free.
    """

    blocks_exit = True

    def __init__(self, folder: Path, *, size_bytes: int = 4 << 30) -> None:
        self._disk = SmallDisk(folder, size_bytes=size_bytes)
        self.path = self._disk.path
        self._outage: Outage | None = None
        self._location = self.path / "artifacts"
        self._location.mkdir()
        self.env = {
            "PENSTOCK_WORKER__ARTIFACTS_DIR": str(self._location),
            "PENSTOCK_GATEWAY__ARTIFACTS_DIR": str(self._location),
        }

    def begin(self, outage: Outage) -> None:
        if outage == "hangs":
            command("fsfreeze", "--freeze", str(self.path))
        elif outage == "fails":
            self._remount("ro")
        else:
            self._disk.fill()
        self._outage = outage

    def heal(self) -> None:
        outage, self._outage = self._outage, None
        if outage == "hangs":
            command("fsfreeze", "--unfreeze", str(self.path))
        elif outage == "fails":
            self._remount("rw")
        elif outage == "fills":
            self._disk.make_room()

    def struck(self, outage: Outage, workers: Sequence[Process]) -> int:
        """Of hanging calls those that hang now."""
        if outage == "hangs":
            return sum(_frozen_threads(worker.popen.pid) for worker in workers)
        return sum(worker.log.read_text(errors="replace").count(_CAUSES[outage]) for worker in workers)

    def direct(self, **settings: Any) -> ArtifactStore:
        return ArtifactStore(self._location, **settings)

    def stop(self) -> None:
        self.heal()
        self._disk.remove()

    def _remount(self, mode: str) -> None:
        """The kernel refuses while a file is open for writing."""

        def done() -> bool:
            return (
                subprocess.run(["mount", "-o", f"remount,{mode}", str(self.path)], capture_output=True).returncode == 0
            )

        wait_until(done, 20, f"{self.path} cannot be remounted {mode}", poll_s=0.01)


def _frozen_threads(pid: int) -> int:
    found = 0
    for task in Path(f"/proc/{pid}/task").glob("*/wchan"):
        with suppress(OSError):  # it has ended meanwhile
            found += task.read_text() == _FROZEN
    return found
