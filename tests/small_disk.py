"""A folder on a file system of its own that fails, hangs or is full when it is told to. Needs root and loop devices."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.common.artifacts import ArtifactStore
from store_outages import Outage
from support import wait_until
from system import Process

_CAUSES = {"fails": "Read-only file system", "fills": "No space left"}
_FROZEN = "percpu_rwsem_wait"
"""Where a thread waits in the kernel that writes to a frozen file system."""


class BreakableDisk:
    """An ext4 file system in a sparse file under `folder`.

    While it fails it is read-only, while it hangs it is frozen, while it is full a file takes all that was free.
    """

    blocks_exit = True

    def __init__(self, folder: Path, *, size_bytes: int = 4 << 30) -> None:
        self._image, self.path = folder / "disk.img", folder / "disk"
        self._filler = self.path / "filler"
        self._outage: Outage | None = None
        self.path.mkdir(parents=True)
        with self._image.open("wb") as file:
            file.truncate(size_bytes)
        _command("mkfs.ext4", "-q", "-m", "0", str(self._image))
        _command("mount", "-o", "loop", str(self._image), str(self.path))
        self._location = self.path / "artifacts"
        self._location.mkdir()
        self.env = {
            "PENSTOCK_WORKER__ARTIFACTS_DIR": str(self._location),
            "PENSTOCK_GATEWAY__ARTIFACTS_DIR": str(self._location),
        }

    def begin(self, outage: Outage) -> None:
        if outage == "hangs":
            _command("fsfreeze", "--freeze", str(self.path))
        elif outage == "fails":
            self._remount("ro")
        else:
            self._fill()
        self._outage = outage

    def heal(self) -> None:
        outage, self._outage = self._outage, None
        if outage == "hangs":
            _command("fsfreeze", "--unfreeze", str(self.path))
        elif outage == "fails":
            self._remount("rw")
        elif outage == "fills":
            self._filler.unlink()

    def struck(self, outage: Outage, workers: Sequence[Process]) -> int:
        """Of hanging calls those that hang now."""
        if outage == "hangs":
            return sum(_frozen_threads(worker.popen.pid) for worker in workers)
        return sum(worker.log.read_text(errors="replace").count(_CAUSES[outage]) for worker in workers)

    def direct(self, **settings: Any) -> ArtifactStore:
        return ArtifactStore(self._location, **settings)

    def stop(self) -> None:
        self.heal()
        _command("umount", "--lazy", str(self.path))
        self._image.unlink()

    def _remount(self, mode: str) -> None:
        """The kernel refuses while a file is open for writing."""

        def done() -> bool:
            return (
                subprocess.run(["mount", "-o", f"remount,{mode}", str(self.path)], capture_output=True).returncode == 0
            )

        wait_until(done, 20, f"{self.path} cannot be remounted {mode}", poll_s=0.01)

    def _fill(self) -> None:
        free = os.statvfs(self.path)
        with self._filler.open("ab", buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize * 99 // 100)
            for size in (1 << 20, 4096, 1):
                with suppress(OSError):
                    while file.write(b"\0" * size):
                        pass


def _frozen_threads(pid: int) -> int:
    found = 0
    for task in Path(f"/proc/{pid}/task").glob("*/wchan"):
        with suppress(OSError):  # it has ended meanwhile
            found += task.read_text() == _FROZEN
    return found


def _command(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr.strip()}"
