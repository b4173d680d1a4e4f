"""llama.cpp's own server, as the package xllamacpp carries it: an OpenAI-compatible server in C++ for GGUF models.

usage: python -m penstock.cli.llama_server FILE_OR_FOLDER --port PORT [--slots 4] [--window 4096] [--threads 1]

A folder holds one .gguf file, and the package beside it (as `prepare_model` makes it); else the package is installed.
It is a command for a `[[models]]` entry with engine = "managed"; whoever has `llama-server` names that in its place.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from pathlib import Path
from typing import Any


def serve(model: Path, *, port: int, slots: int, window: int, threads: int) -> None:
    """Serve until a signal ends the process."""
    if model.is_dir():
        sys.path.insert(0, str(model))
        model = next(iter(sorted(model.glob("*.gguf"))), model)
    llama: Any = importlib.import_module("xllamacpp")
    params = llama.CommonParams()
    params.model.path = str(model)
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.n_parallel = slots
    params.n_ctx = window * slots  # of all slots together
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    server = llama.Server(params)
    print(f"serving {model.name} on {server.listening_address}", flush=True)
    signal.pause()


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="penstock.cli.llama_server", description="llama.cpp's server")
    parser.add_argument("model", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--window", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args(argv)
    serve(given.model, port=given.port, slots=given.slots, window=given.window, threads=given.threads)


if __name__ == "__main__":
    main(sys.argv[1:])
