"""Where things lie on this machine, and the file lock that lets two processes prepare the same thing at once."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shutil
import socket
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from penstock.cli.failures import CliFailure

SERVERS_PORTS = (20_000, 32_000)
"""Ports for servers that were given none: below those that Linux and IANA use for outgoing connections."""
Progress = Callable[[str], None]
"""Called with one line for a person whenever a long step begins or moves on."""


def silent(line: str) -> None:
    """A Progress that says nothing."""


def cache_dir() -> Path:
    """The user's cache folder: what lies here can always be made again."""
    if explicit := os.environ.get("PENSTOCK_CACHE"):
        return Path(explicit).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "penstock"


def default_data_dir() -> Path:
    """The folder that `penstock up` keeps its data in: topics, view, journal, logs."""
    if explicit := os.environ.get("PENSTOCK_DATA"):
        return Path(explicit).expanduser().absolute()
    base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(base).expanduser().absolute() / "penstock"


def running_dir() -> Path:
    """Where each `penstock up` of this user leaves its data folder, so that commands find it."""
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser().absolute() / "penstock" / "running"


@contextmanager
def exclusive(path: Path, progress: Progress = silent) -> Generator[None]:
    """Hold an advisory lock on `path`; a second process waits, and says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another process that prepares {path.stem}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def require_space(folder: Path, need_bytes: int, what: str) -> None:
    """Raise CliFailure when the disk under `folder` has less than `need_bytes` free."""
    existing = folder
    while not existing.exists():
        existing = existing.parent
    free_bytes = shutil.disk_usage(existing).free
    if free_bytes < need_bytes:
        raise CliFailure(
            f"not enough disk space for {what}: {folder} has {free_bytes / 1e6:.0f} MB free and"
            f" {need_bytes / 1e6:.0f} MB are needed; free some, or name another folder"
            " (--data-dir, PENSTOCK_CACHE)"
        )


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that is free, that no outgoing connection takes, and that no other process gets from this function.

    A port that the system chooses by itself lies among those that it gives to outgoing connections: one of them can
    take it before the server binds it, or while a broker on it restarts. Those are left to them. Two processes that
    choose at the same time would find the same port free until one has bound it: a file lock, held until this process
    ends, reserves it.
    """
    for port in random.SystemRandom().sample(range(*SERVERS_PORTS), 50):
        with suppress(OSError), socket.socket() as sock:
            sock.bind((host, port))
            if _reserve(port):
                return port
    with socket.socket() as sock:
        sock.bind((host, 0))
        return int(sock.getsockname()[1])


def _reserve(port: int) -> bool:
    """False when another process of this user, or this one, has reserved the port."""
    folder = Path(tempfile.gettempdir()) / f"penstock-ports-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    lock = os.open(folder / str(port), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return False
    return True


def local_url(host: str, port: int) -> str:
    """The URL at which this machine reaches a server that is bound to `host`."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def listens(pid: int, port: int) -> bool:
    import psutil  # comes with the worker, which `penstock up` runs

    try:
        connections = psutil.Process(pid).net_connections("tcp")
    except psutil.Error:
        return False
    return any(one.status == psutil.CONN_LISTEN and one.laddr.port == port for one in connections)


def port_in_use(port: int, host: str = "127.0.0.1") -> bool:
    """Whether something else holds this port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return True
            raise CliFailure(f"cannot listen on {host}: {error.strerror or error}; choose another --host") from error
    return False
