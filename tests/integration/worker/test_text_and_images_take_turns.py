"""A text model and an image model, both real, on one simulated device that holds only one of them, under load.

They take turns; what a waiting request says it waits for is so; memory comes back.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.cli.assets import prepare_model
from support import engine_processes, wait_until
from system import Process, System
from worker_requests import outcome, send

pytestmark = [pytest.mark.slow, pytest.mark.model]

GB = 10**9
TURNS = 3 if os.environ.get("PENSTOCK_TEST_LONG") else 1
"""So often each model is given up for the other."""
DEADLINE_S = 240
REASONS = {"class", "model_loading", "memory", "tenant_share"}


class Watch:
    """Looks at the device and at each request that is not done, all the while."""

    def __init__(self, url: str, ids: list[str]) -> None:
        self._url, self._ids = url, ids
        self.false: list[Any] = []
        self.reasons = Counter[str]()
        self.holders = Counter[tuple[str, ...]]()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look_on)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(30)

    def _look_on(self) -> None:
        with httpx.Client(base_url=self._url, timeout=30) as http:
            while not self._over.wait(0.1):
                self._look(http)

    def _look(self, http: httpx.Client) -> None:
        device = next((one for one in http.get("/v1/admin/devices").json()["data"] if one["device"] == "sim0"), None)
        if device is not None:
            self.holders[tuple(sorted({one["model"].partition(" ")[0] for one in device["holders"]}))] += 1
            if device["reserved_bytes"] > device["limit_bytes"]:
                self.false.append(device)
        for request_id in self._ids[-8:]:
            found = http.get(f"/v1/requests/{request_id}").json()
            waiting = found.get("waiting_for") if not found.get("done") else None
            if waiting is None:
                continue
            self.reasons[waiting["reason"]] += 1
            if waiting["reason"] not in REASONS or (waiting.get("free_bytes") or 0) >= (waiting.get("need_bytes") or 1):
                self.false.append(found)


def test_text_and_image_models_take_turns_on_one_device(make_system: Callable[..., System], tiny_lm: Path) -> None:
    painter = prepare_model("tiny-image-generation", lambda text: None)
    place = {"device": "simulated", "preload": False}
    text_options = {"cache_tokens": 4096, "slots": 4, "max_batch_tokens": 128}
    models = [
        {
            "id": "chat",
            "source": str(tiny_lm),
            "engine": "text",
            "vram_bytes": 60 * GB,
            "options": text_options,
            **place,
        },
        {"id": "painter", "source": str(painter), "engine": "diffusers", "vram_bytes": 50 * GB, **place},
    ]
    card = {"kind": "simulated", "name": "sim0", "total_bytes": 80 * GB}
    system = make_system(models=models, devices=[card], worker_options={"state_interval_s": 0.5})
    worker, gateway = system.worker(env={"PENSTOCK_SCHEDULER__TURN_FACTOR": "1"}), system.gateway()
    worker.wait_ready()
    gateway.wait_ready()

    sent: list[str] = []
    with Watch(gateway.url, sent) as watch:
        # Both always wait: neither finds the device idle.
        wait_until(lambda: _goes_on(system, worker, sent), DEADLINE_S, lambda: (evictions(worker), worker.tail()))
        for request_id in list(sent):
            done = outcome(system, request_id, 120)
            assert (done.status, done.device) == ("completed", "sim0"), (done.error, worker.tail())
    assert not watch.false, watch.false[:3]
    assert watch.reasons, "nothing was looked at while it waited"
    for model in ("chat", "painter"):
        assert watch.holders[(model,)], watch.holders
    assert set(watch.holders) <= {(), ("chat",), ("painter",)}, watch.holders

    def books() -> Any:
        return next(
            one for one in httpx.get(gateway.url + "/v1/admin/devices").json()["data"] if one["device"] == "sim0"
        )

    # Grants of runs have come back: what is held is the model that stayed, as large as it is.
    size = {"chat": 60 * GB, "painter": 50 * GB}
    wait_until(lambda: [size[one["model"]] for one in books()["holders"]] == [books()["reserved_bytes"]], 60, books)
    assert len(engine_processes(worker.popen.pid)) == 1
    print(
        f"{len(sent)} requests; given up {dict(evictions(worker))}; "
        f"reasons {dict(watch.reasons)}; holders {dict(watch.holders)}"
    )
    assert worker.stop() == 0, worker.tail()


def _goes_on(system: System, worker: Process, sent: list[str]) -> bool:
    """Two requests of each model are under way, until each model was given up `TURNS` times. Whether it was."""
    given_up = evictions(worker)
    if min(given_up["chat"], given_up["painter"]) >= TURNS:
        return True
    done = system.outcomes()
    under_way = [one for one in sent if one not in done]
    for kind in ("text", "image"):
        for _ in range(2 - sum(one.startswith(kind) for one in under_way)):
            request_id = f"{kind}{len(sent)}"
            if kind == "text":
                request: dict[str, Any] = {"model": "chat", "payload": {"prompt": "word " * 20, "max_tokens": 100}}
            else:
                payload = {"prompt": "a red house", "width": 64, "height": 64, "inference_steps": 8}
                request = {"task": "image_generation", "model": "painter", "payload": payload}
            send(system, {"request_id": request_id, **request})
            sent.append(request_id)
    return False


def evictions(worker: Process) -> Counter[str]:
    """How often each model was given up for the other."""
    found = Counter[str]()
    for line in httpx.get(f"{worker.url}/metrics").text.splitlines():
        if line.startswith("penstock_model_evictions_total{"):
            model = line.partition('model="')[2].partition('"')[0]
            found[model] += int(float(line.rpartition(" ")[2]))
    return found
