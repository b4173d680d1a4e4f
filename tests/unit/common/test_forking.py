"""What a forked process makes of its parent: only one that had clients or threads can have left locks behind."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, sys, threading
from penstock.common import forking
class Owner: pass
owner, over = Owner(), threading.Event()
if "client" in sys.argv:
    forking.keep_in_children(owner)
if "thread" in sys.argv:
    threading.Thread(target=over.wait, daemon=True).start()
if (child := os.fork()) == 0:
    print(forking.forks(), forking.in_a_child(), flush=True)
    os._exit(0)
os.waitpid(child, 0)
over.set()
print(forking.forks(), forking.in_a_child())
"""


@pytest.mark.parametrize(("parent", "in_a_child"), [("alone", False), ("client", True), ("thread", True)])
def test_a_fork_is_a_child_of_a_parent_with_clients_or_threads(parent: str, in_a_child: bool) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, parent], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [f"1 {in_a_child}", "0 False"], done.stderr
