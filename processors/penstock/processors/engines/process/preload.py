"""What the fork server imports before any engine is forked from it: heavy modules, without touching CUDA or OpenMP."""

import importlib
import os
import signal
import threading

signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the worker decides when this ends

os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported: engines have no terminal for its bars

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
