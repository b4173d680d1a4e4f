"""Fetches a model from the hub into the hub's cache: `progress 0.42` lines, then a line with its folder, or `failed …`
when a configuration must be mended, `away …` when another try may help.

Run as a module, with the model's id, a revision (or nothing) and `code` when its Python files shall come along. A
program of its own, so that a worker which ends can end it.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
CODE_FILES = ("*.py",)
PR_SET_PDEATHSIG = 1
PROGRESS, FAILED, AWAY = "progress ", "failed ", "away "
STEP = 0.01
"""A line is printed when so much more of all bytes is there."""


class DownloadProgress:
    """Adds up the bytes of files that come side by side; `say` is called with the part of all of them that is there."""

    def __init__(self, total_bytes: int, say: Callable[[float], None]) -> None:
        self._total = total_bytes
        self._say = say
        self._done = 0
        self._said = -STEP
        self._lock = threading.Lock()

    def add(self, size: float) -> None:
        with self._lock:
            self._done += int(size)
            fraction = min(1.0, self._done / self._total) if self._total > 0 else 1.0
            if fraction - self._said >= STEP:
                self._said = fraction
                self._say(fraction)

    def bar(self) -> type[Any]:
        """A progress bar as the hub's client wants one: it draws nothing and reports bytes."""
        from tqdm import tqdm

        progress = self

        class Bar(tqdm):  # pyright: ignore[reportMissingTypeArgument, reportUnknownVariableType]
            def __init__(self, *arguments: Any, **options: Any) -> None:
                self._counts_bytes = options.get("unit") == "B"
                options.pop("name", None)
                super().__init__(*arguments, **{**options, "disable": True})

            def update(self, n: float | None = 1) -> bool | None:
                if self._counts_bytes:
                    progress.add(n or 0)
                return None

        return Bar


def fetch(source: str, revision: str | None, *, code: bool, say: Callable[[float], None]) -> str:
    """The folder of a hub id in the hub's cache. Raises what the hub's client does."""
    from huggingface_hub import get_session, snapshot_download
    from huggingface_hub.constants import HF_HUB_DOWNLOAD_TIMEOUT
    from huggingface_hub.errors import HfHubHTTPError

    def bound(request: Any) -> None:  # the client asks without a time limit what a model has
        limits = request.extensions["timeout"]
        request.extensions["timeout"] = {name: limits[name] or HF_HUB_DOWNLOAD_TIMEOUT for name in limits}

    get_session().event_hooks["request"].append(bound)
    wanted: dict[str, Any] = {"revision": revision, "allow_patterns": [*HUB_FILES, *(CODE_FILES if code else ())]}
    silent = DownloadProgress(0, lambda fraction: None).bar()
    try:
        files: Any = snapshot_download(source, **wanted, dry_run=True, tqdm_class=silent)
        missing = sum(file.file_size for file in files if file.will_download)
    except (HfHubHTTPError, OSError):  # offline: what is in the cache must do
        missing = 0
    return snapshot_download(source, **wanted, tqdm_class=DownloadProgress(missing, say).bar() if missing else silent)


def _is_final(error: Exception) -> bool:
    """It was refused, or names no model; else the hub, or the way to it, is away."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if isinstance(error, HfHubHTTPError):
        return 400 <= error.response.status_code < 500 and error.response.status_code not in (408, 429)
    return isinstance(error, HFValidationError)


def main(source: str, revision: str = "", kind: str = "") -> int:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # it ends with the worker
    try:
        folder = fetch(
            source,
            revision or None,
            code=kind == "code",
            say=lambda fraction: print(f"{PROGRESS}{fraction:.3f}", flush=True),
        )
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        print((FAILED if _is_final(error) else AWAY) + why)
        return 1
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
