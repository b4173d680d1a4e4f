"""A worker of a test gets multiprocessing's fork server by fork, with torch imported: 7 s of processor time less.

The server has to be a child of its worker. So the worker's process forks it at its beginning, when it has one thread.
It waits until the worker starts it, and then does what the program that `multiprocessing` would execute does.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from multiprocessing import util
from typing import Any, NoReturn

# Of glibc, then of modules that engines import.
READ_AT_START = ("GLIBC_", "LD_", "MALLOC_", "CUDA", "HF_", "MKL_", "OMP_", "PYTORCH", "TOKENIZERS_", "TORCH")
"""Environment variables that begin so are read when a program begins or imports modules, and not again."""
ABOVE_ALL = 512
"""File descriptors from here on are free in a new process."""


def starts_alike(env: Mapping[str, str]) -> bool:
    """Whether a program that is executed with `env` begins as one with the environment of this process."""
    names = {name for name in (*env, *os.environ) if name.startswith(READ_AT_START)}
    return all(env.get(name) == os.environ.get(name) for name in names)


def keep_fork_server() -> None:
    """Fork the server of this process; `multiprocessing` starts it in place of its first one."""
    ours, theirs = socket.socketpair()
    if (pid := os.fork()) == 0:
        ours.close()
        _wait_and_serve(theirs)
    theirs.close()
    execute = util.spawnv_passfds

    def spawn(path: Any, args: Sequence[Any], passfds: Sequence[int]) -> int:
        if "multiprocessing.forkserver" not in str(args[-1]):
            return execute(path, args, passfds)
        util.spawnv_passfds = execute
        order = {"code": args[-1], "descriptors": list(passfds), "env": dict(os.environ)}
        with ours:
            socket.send_fds(ours, [b"!"], passfds)
            ours.sendall(json.dumps(order).encode())
        return pid

    util.spawnv_passfds = spawn


def _wait_and_serve(control: socket.socket) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as the module that a fork server imports first has it
    begun, descriptors, _, _ = socket.recv_fds(control, 1, 8)
    if not begun:
        os._exit(0)  # the worker has ended without an engine
    with control, control.makefile("rb") as lines:
        order = json.load(lines)
    high = [fcntl.fcntl(one, fcntl.F_DUPFD, ABOVE_ALL) for one in descriptors]
    for number in descriptors:
        os.close(number)
    for number, wanted in zip(high, order["descriptors"], strict=True):
        os.dup2(number, wanted)
        os.close(number)
    os.environ.clear()
    os.environ.update(order["env"])
    try:
        exec(order["code"], {"__name__": "__main__"})
    finally:
        os._exit(0)
