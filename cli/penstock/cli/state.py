"""What a running `penstock up` tells about itself: a lock that one process holds, and a small state file."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shlex
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import IO, Any

from penstock.cli.failures import CliFailure
from penstock.cli.paths import default_data_dir, running_dir

TEMPORARY = ".tmp"


@dataclass(frozen=True, kw_only=True, slots=True)
class PartState:
    """One supervised process as `penstock status` shows it."""

    name: str
    pid: int | None
    restarts: int
    log: str
    ready_url: str | None
    cause: str | None = None
    """Why its process last ended, or could not be started."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SystemState:
    """One `penstock up`. Times are Unix seconds."""

    pid: int
    phase: str
    """starting, ready, stopping"""
    url: str
    bootstrap_servers: str
    models: Sequence[str]
    started_at: float
    parts: list[PartState] = field(default_factory=list[PartState])
    failed: Mapping[str, str] = field(default_factory=dict[str, str])
    """Models that could not be loaded at the start, with the reason."""
    keys_file: str | None = None
    """The keys file of the gateway; None: it asks for no key."""


class Home:
    """The data folder of one `penstock up`."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir.absolute()
        self.logs = self.data_dir / "logs"
        self._state = self.data_dir / "state.json"
        self._lock_path = self.data_dir / "up.lock"
        self._lock: IO[str] | None = None

    @property
    def _entry(self) -> Path:
        """By this file commands find a folder that they do not know."""
        return running_dir() / hashlib.sha256(str(self.data_dir).encode()).hexdigest()[:16]

    @property
    def option(self) -> str:
        """What a command needs to mean this instance, to be put behind it: nothing for the default folder."""
        return "" if self.data_dir == default_data_dir() else f" --data-dir {shlex.quote(str(self.data_dir))}"

    def acquire(self) -> None:
        """Take the folder for this process, until it ends. Raises CliFailure when another `up` holds it."""
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            file = self._lock_path.open("a")
        except OSError as error:
            raise CliFailure(
                f"the data folder {self.data_dir} cannot be written ({error.strerror}): name another with --data-dir"
            ) from error
        if not _lock(file):
            file.close()
            running = self.read()
            who = f" (pid {running.pid}, {running.url})" if running else ""
            raise CliFailure(
                f"Penstock already runs on {self.data_dir}{who}: `penstock down{self.option}` stops it,"
                " --data-dir names another folder"
            )
        self._lock = file
        self._state.unlink(missing_ok=True)  # that of one that was killed
        with suppress(OSError):  # commands then need --url
            self._entry.parent.mkdir(parents=True, exist_ok=True)
            _replace(self._entry, str(self.data_dir))

    def release(self) -> None:
        self._state.unlink(missing_ok=True)
        with suppress(OSError):
            self._entry.unlink(missing_ok=True)
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def held(self) -> bool:
        """Whether some process runs Penstock on this folder."""
        with self.kept_free() as free:
            return not free

    @contextmanager
    def kept_free(self) -> Generator[bool]:
        """Whether no process runs Penstock on this folder; then none can begin to while this is open."""
        if not self._lock_path.exists():
            yield True
            return
        with self._lock_path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True

    def write(self, state: SystemState) -> None:
        _replace(self._state, json.dumps(asdict(state), indent=1))

    def read(self) -> SystemState | None:
        """The state of the process that holds the folder; None when it has not written one yet, or not in this form.

        Fields that a later release has added are ignored.
        """
        try:
            found = json.loads(self._state.read_text())
            parts = [PartState(**_known(PartState, part)) for part in found["parts"]]
            return replace(SystemState(**_known(SystemState, found)), parts=parts)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None

    @property
    def is_ours(self) -> bool:
        """Whether the state file is one of this user: any user can write one into a shared folder."""
        return _is_ours(self._state)

    def running(self) -> SystemState | None:
        """The state of the `penstock up` that runs on this folder, if one does and has written it."""
        return self.read() if self.held() else None

    def wait_released(self, deadline_s: float) -> bool:
        give_up = time.monotonic() + deadline_s
        while self.held():
            if time.monotonic() > give_up:
                return False
            time.sleep(0.1)
        return True


def running_homes() -> Iterator[Home]:
    """The folders on which a `penstock up` of this user runs. Entries of killed ones are removed."""
    for entry in sorted(running_dir().glob("*")):
        with suppress(OSError):
            if entry.suffix == TEMPORARY or not _is_ours(entry):
                continue
            home = Home(Path(entry.read_text()))
            with home.kept_free() as free:
                if free:
                    entry.unlink()
            if not free and home.is_ours:
                yield home


def _is_ours(path: Path) -> bool:
    """Raises OSError."""
    return path.stat().st_uid == os.getuid()


def _known(kind: type, fields_of: Mapping[str, Any]) -> dict[str, Any]:
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in fields_of.items() if name in names}


def _replace(path: Path, text: str) -> None:
    """At once: a reader finds the old text or this one."""
    temporary = path.with_suffix(TEMPORARY)
    temporary.write_text(text)
    os.replace(temporary, path)


def _lock(file: IO[str]) -> bool:
    """Several tries, because `held` of other processes takes the lock for a moment."""
    for left in reversed(range(5)):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if left:
                time.sleep(0.05)
        else:
            return True
    return False
