"""The store's library is imported on use, by whichever threads come first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# One thread stands still in the middle of the library's own import, while another one uses a store.
PROGRAM = """
import sys, threading
from penstock.common.artifacts.store import ArtifactStore

half, done, failures = threading.Event(), threading.Event(), []

def stand_still(frame, event, argument):
    if frame.f_code.co_filename.endswith("obstore/__init__.py") and event == "line":
        if "obstore.store" in sys.modules and hasattr(sys.modules["obstore.store"], "LocalStore") and not half.is_set():
            half.set()
            done.wait(1)
    return stand_still

def importing():
    sys.settrace(stand_still)
    import obstore

def using():
    half.wait(10)
    try:
        ArtifactStore(sys.argv[1]).put("t", b"x")
    except BaseException as error:
        failures.append(repr(error))
    done.set()

threads = [threading.Thread(target=work) for work in (importing, using)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert half.is_set(), "nobody stood still in the middle"
print("".join(failures))
"""


def test_a_thread_that_comes_while_another_one_imports_the_library(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
