"""Fetches a model from the hub into the hub's cache and prints its folder. Run as a module, with the model's id.

A program of its own, so that a worker which ends can end it.
"""

from __future__ import annotations

import ctypes
import signal
import sys

HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
PR_SET_PDEATHSIG = 1


def main(source: str) -> int:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # it ends with the worker
    from huggingface_hub import snapshot_download

    try:
        print(snapshot_download(source, allow_patterns=HUB_FILES))
    except Exception as error:
        print(f"fetching {source} failed: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
