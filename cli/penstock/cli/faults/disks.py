"""A small file system of its own that can be filled to its last byte. Needs root and loop devices."""

from __future__ import annotations

import errno
import os
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

from penstock.cli.failures import CliFailure

SIZE_BYTES = 1 << 30
_TRIAL_BYTES = 1 << 24


class SmallDisk:
    """An ext4 file system in a sparse file under `folder`. Raises CliFailure where this machine cannot have one."""

    def __init__(self, folder: Path, *, size_bytes: int = SIZE_BYTES) -> None:
        self._image, self.path = folder / "disk.img", folder / "disk"
        self._filler = self.path / "filler"
        self.path.mkdir(parents=True)
        with self._image.open("wb") as file:
            file.truncate(size_bytes)
        command("mkfs.ext4", "-q", "-m", "0", str(self._image))
        try:
            command("mount", "-o", "loop", str(self._image), str(self.path))
        except BaseException:
            subprocess.run(["umount", "--lazy", str(self.path)], capture_output=True, check=False)
            raise

    def fill(self) -> None:
        free = os.statvfs(self.path)
        with self._filler.open("ab", buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize * 99 // 100)
            for size in (1 << 20, 4096, 1):
                with suppress(OSError):
                    while file.write(b"\0" * size):
                        pass

    def is_full(self) -> bool:
        """Whether a file cannot be written to for want of space."""
        trial = self.path / "trial"
        try:
            trial.write_bytes(b"\0" * 4096)
        except OSError as error:
            return error.errno == errno.ENOSPC
        finally:
            trial.unlink(missing_ok=True)
        return False

    def make_room(self) -> None:
        self._filler.unlink(missing_ok=True)

    def remove(self) -> None:
        command("umount", "--lazy", str(self.path))
        self._image.unlink()


def why_no_disk() -> str | None:
    """Why this machine cannot have a SmallDisk; None if it can."""
    with tempfile.TemporaryDirectory(prefix="penstock-disk-") as folder:
        try:
            SmallDisk(Path(folder), size_bytes=_TRIAL_BYTES).remove()
        except (CliFailure, OSError) as failure:
            return str(failure)
    return None


def command(*words: str) -> None:
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise CliFailure(f"{words[0]} is not installed") from error
    if done.returncode:
        raise CliFailure(f"{' '.join(words)}: {done.stderr.strip()}")
