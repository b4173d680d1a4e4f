"""Keeps a managed server: a program of its own between the worker and the server, so that none of the server's
processes outlives the worker.

    python keeper.py GRACE_S LOG LOG_LIMIT_BYTES COMMAND [ARGUMENT…]

Its standard input is a pipe whose other end only the worker has: when that closes, the worker has ended, in whatever
way, and the whole tree is killed. A byte on it asks for an orderly end: SIGTERM to the server, SIGKILL to the tree
after GRACE_S. As a subreaper (prctl(2)) it inherits what descendants leave behind, those of sessions of their own too,
and kills until no child is left. It copies the server's output to LOG, and keeps one older log when that has grown too
large. It exits as the server did: its code, or 128 + the signal; 127 when the command cannot be executed.

It imports only the standard library and is run by its path: it starts in some 30 ms and takes some 8 MB.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
CANNOT_EXECUTE = 127
KILL_AGAIN_S = 0.02
REAP_S = 5.0
"""How often those are looked for that descendants left behind and that have ended."""
CHUNK = 1 << 16


def main(argv: list[str]) -> int:
    grace_s, log_path, log_limit, command = float(argv[0]), argv[1], int(argv[2]), argv[3:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # only the worker, or its end, ends this
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    log = _Log(log_path, log_limit)
    read_end, write_end = os.pipe()
    server = _start(command, write_end)
    os.close(write_end)
    status = _watch(server, read_end, log, grace_s)
    kill_tree(server)
    log.drain(read_end)
    return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def _start(command: list[str], output: int) -> int:
    """The pid of the server, the leader of a session of its own."""
    keeper = os.getpid()
    pid = os.fork()  # nothing here has threads
    if pid:
        return pid
    try:
        os.setsid()
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # should somebody kill the keeper
        if os.getppid() != keeper:
            os._exit(CANNOT_EXECUTE)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]} cannot be executed: {error.strerror}\n".encode())
    finally:
        os._exit(CANNOT_EXECUTE)


def _watch(server: int, output: int, log: _Log, grace_s: float) -> int:
    """Until the server has ended, by itself or because it must. Returns its wait status."""
    ended = os.pidfd_open(server)
    poll = select.poll()
    for descriptor in (0, output, ended):
        poll.register(descriptor, select.POLLIN)
    kill_at = float("inf")
    while True:
        wait_s = min(REAP_S, max(0.0, kill_at - time.monotonic()))
        ready = {descriptor for descriptor, _ in poll.poll(wait_s * 1000)}
        if output in ready and not log.copy(output):
            poll.unregister(output)  # it closed its output, and goes on
        if 0 in ready:
            orderly = bool(os.read(0, 1))
            poll.unregister(0)
            if orderly:
                os.kill(server, signal.SIGTERM)
                kill_at = time.monotonic() + grace_s
            else:
                kill_tree(server)
        if time.monotonic() >= kill_at:
            os.kill(server, signal.SIGKILL)
            kill_at = time.monotonic() + REAP_S
        while (found := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            if found[0] == server:
                return found[1]


def kill_tree(server: int) -> None:
    """Kill every descendant; what one leaves behind becomes a child of this process, and is killed in the next round.

    The server itself, whose exit code `_watch` waits for, is not reaped here.
    """
    while True:
        tree = descendants(os.getpid())
        for pid in tree:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:  # it has ended meanwhile, or has taken other rights
                pass
        for pid in tree:
            if pid != server:
                try:
                    os.waitpid(pid, os.WNOHANG)
                except ChildProcessError:  # a grandchild, whose parent is still ending
                    pass
        if not tree - {server}:
            return
        time.sleep(KILL_AGAIN_S)


def descendants(root: int) -> set[int]:
    """The pids of all processes below this one, from /proc."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as stat:
                    # pid (name) state ppid …; the name may hold anything
                    parent = int(stat.read().rpartition(b")")[2].split()[1])
            except (OSError, IndexError):
                continue
            children.setdefault(parent, []).append(int(name))
    found: set[int] = set()
    left = [root]
    while left:
        new = children.get(left.pop(), [])
        left += new
        found.update(new)
    return found


class _Log:
    """A file that does not grow without end."""

    def __init__(self, path: str, limit_bytes: int) -> None:
        self._path, self._limit = path, limit_bytes
        self._open()

    def _open(self) -> None:
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size = os.fstat(self._file).st_size

    def copy(self, output: int) -> bool:
        """Some of what the server said; False at its end."""
        said = os.read(output, CHUNK)
        try:
            os.write(self._file, said)
            self._size += len(said)
            if self._size > self._limit:
                os.close(self._file)
                os.replace(self._path, f"{self._path}.1")
                self._open()
        except OSError:  # a full disk must not hold up the server
            pass
        return bool(said)

    def drain(self, output: int) -> None:
        """The rest, when nobody writes any more."""
        os.set_blocking(output, False)
        try:
            while self.copy(output):
                pass
        except BlockingIOError:
            pass


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
