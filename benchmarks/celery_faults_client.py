"""The peer's clients for `celery_faults.py`: what they send and hear, as lines of a history on standard output.

The first line of standard input is the job. They end when each request has its outcome and no task is left, or when
standard input ends. Half of the requests read their stream; all learn of their outcome from the result backend.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

from celery_faults_app import app, store, write

AGAIN_S, BLOCK_MS = 0.005, 50
_lock = threading.Lock()


def say(what: str, request_id: str | None = None, **facts: Any) -> None:
    line = json.dumps({"what": what, "request_id": request_id, "at": round(time.time(), 4), **facts})
    with _lock:
        print(line, flush=True)


class Clients:
    def __init__(self, job: dict[str, Any]) -> None:
        self.asked: list[dict[str, Any]] = job["asked"]
        self._pace = {"piece_chars": job["piece_chars"], "delay_s": job["delay_s"]}
        self._waiting: set[str] = set()
        self._cursors: dict[str, str] = {}
        """Of the streams that are read: the last entry's id."""
        self._ended: set[str] = set()
        """Streams that have their outcome, and are read once more behind it."""
        self.sent = threading.Event()

    def send(self) -> None:
        for one in self.asked:
            name, known = one["name"], {"text": one["text"], "streams": one["streams"]}
            if one["streams"]:
                self._cursors[name] = "0-0"
            write.apply_async(kwargs={**known, **self._pace}, task_id=name)
            say("expected", name, **known, client="stream" if one["streams"] else "poll", webhook=False)
            say("acknowledged", name)
            self._waiting.add(name)
        self.sent.set()

    def look(self) -> None:
        """Hear pieces and outcomes. A stream's pieces were written before its result."""
        outcomes = results(sorted(self._waiting))
        ended, self._ended = self._ended, set()
        self._hear()  # waits for a piece, but not for long: outcomes may have come
        for name in ended:
            del self._cursors[name]
        for name, outcome in outcomes.items():
            say("outcome", name, **outcome)
            self._waiting.discard(name)
            if name in self._cursors:
                self._ended.add(name)

    def _hear(self) -> None:
        cursors = {f"pieces:{name}": cursor for name, cursor in self._cursors.copy().items()}
        heard = store.xread(cursors, block=BLOCK_MS) if cursors else []
        for key, entries in dict(heard).items():
            name = key.removeprefix("pieces:")
            for entry_id, piece in entries:
                run, before = entry_id.split("-")[0], self._cursors[name].split("-")[0]
                if before not in ("0", run):
                    say("restarted", name)
                self._cursors[name] = entry_id
                say("piece", name, text=piece["text"], offset=int(piece["offset"]))

    def settled(self) -> bool:
        return self.sent.is_set() and not self._waiting and not self._ended and left() == 0


def results(names: list[str]) -> dict[str, dict[str, Any]]:
    """Status and text of those that have ended, as AsyncResult would read them."""
    keys = [app.backend.get_key_for_task(name) for name in names]
    metas = {
        name: app.backend.decode_result(raw)
        for name, raw in zip(names, store.mget(keys) if keys else [], strict=True)
        if raw is not None
    }
    return {
        name: {"status": "completed", "text": meta["result"]}
        if meta["status"] == "SUCCESS"
        else {"status": "failed", "text": "", "error": str(meta["result"])}
        for name, meta in metas.items()
        if meta["status"] in ("SUCCESS", "FAILURE", "REVOKED")
    }


def left() -> int:
    """Tasks that wait in the queue or are not acknowledged."""
    return store.llen("celery") + store.hlen("unacked")


def main() -> None:
    clients, over = Clients(json.loads(sys.stdin.readline())), threading.Event()
    threading.Thread(target=lambda: (os.read(0, 1), over.set()), daemon=True).start()
    threading.Thread(target=clients.send, daemon=True).start()
    while not over.is_set() and not clients.settled():
        clients.look()
        time.sleep(AGAIN_S)
    for name, outcome in results([one["name"] for one in clients.asked]).items():
        say("result", name, **outcome)
        say("outcome_again", name, **outcome)
    for one in clients.asked:
        for run in range(store.scard(f"runs:{one['name']}")):
            say("status", one["name"], partition=0, offset=run, status="running", epoch=1, attempt=run + 1)
    say("lag", records=left())


if __name__ == "__main__":
    main()
