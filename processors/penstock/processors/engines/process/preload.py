"""What the fork server imports before any engine is forked from it: heavy modules, without touching CUDA or OpenMP."""

import atexit
import gc
import importlib
import os
import signal
import threading

signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the worker decides when this ends

os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported: engines have no terminal for its bars

gc.disable()  # all that is imported stays: the collector would walk over a million objects again and again
for name in (
    "tokenizers",
    "torch",
    "transformers",
    "transformers.generation.continuous_batching",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
):
    importlib.import_module(name)

# Its own lock is a semaphore between processes, which engines that end at once would seem to leak.
importlib.import_module("tqdm").tqdm.set_lock(threading.RLock())

gc.freeze()  # neither do engines walk over it, nor copy its pages by that
gc.enable()
atexit.register(gc.unfreeze)  # else native modules report at the end that their objects leaked
