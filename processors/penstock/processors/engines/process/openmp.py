"""Threads of OpenMP in an engine's process, where torch computes with them."""

from __future__ import annotations

import sys
import threading
from typing import Any


def without_openmp() -> None:
    """This thread is one beside that which computes with torch: OpenMP shall make no threads for it.

    libgomp counts those of all threads, and when they are more than the processors it has the computing ones sleep at
    each barrier: a thread that prepared images made two computing threads slower than one.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return
    threads: int = torch.get_num_threads()
    torch.set_num_threads(1)
    # Threads to come would begin with that number too: a thread that ends says theirs again.
    saying = threading.Thread(target=torch.set_num_threads, args=(threads,))
    saying.start()
    saying.join()
