"""One tenant floods every route and socket while others work: none of theirs is refused, they hardly wait longer."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import httpx
import pytest

import flooder
from load import percentile
from penstock.gateway.keys import create_key
from system import NOOP, Process, System, running

OTHERS = int(os.environ.get("PENSTOCK_TEST_TENANTS", "10"))
"""Tenants that work beside the flood; the issue's figure is 50."""
LOAD_S = float(os.environ.get("PENSTOCK_TEST_LOAD_S", "8"))
EVERY_S = 0.5
TEXT = {**NOOP, "id": "text", "aliases": ["default"], "options": {"tokens": 1, "delay_ms": 200, "slots": 64}}


async def work(gateway: Process, keys: list[str], seconds: float) -> list[tuple[int, float]]:
    """(status, seconds) of each of the tenants' calls: a chat, and a look at what it has, at a steady rate."""
    seen: list[tuple[int, float]] = []

    async def call(http: httpx.AsyncClient, number: int) -> None:
        await asyncio.sleep(number * EVERY_S)
        began = time.perf_counter()
        answer = await http.post("/v1/chat/completions", json=flooder.CHAT)
        seen.append((answer.status_code, time.perf_counter() - began))
        if number % 4 == 0:
            listed = await http.get("/v1/requests", params={"limit": 5})
            assert listed.status_code == 200, listed.text

    async def tenant(key: str, place: int) -> None:
        async with httpx.AsyncClient(base_url=gateway.url, headers={"x-api-key": key}, timeout=60) as http:
            await asyncio.sleep(EVERY_S * place / len(keys))
            await asyncio.gather(*(call(http, number) for number in range(int(seconds / EVERY_S))))

    await asyncio.gather(*(tenant(key, place) for place, key in enumerate(keys)))
    return seen


@pytest.mark.slow
def test_a_tenant_that_floods_everything_hurts_no_other(kafka: Any, tmp_path: Path) -> None:
    keys_file = tmp_path / "keys.json"
    flood = create_key(keys_file, tenant="flood")
    others = [create_key(keys_file, tenant=f"tenant{number}") for number in range(OTHERS)]
    system = System(
        kafka.bootstrap_servers,
        f"f{uuid.uuid4().hex[:6]}-",
        tmp_path / "system",
        models=[TEXT],
        auth={"keys_file": str(keys_file)},
    )
    with running(system):
        worker, gateway = system.worker(), system.gateway()
        worker.wait_ready()
        gateway.wait_ready()
        asyncio.run(work(gateway, others, 2))
        alone = asyncio.run(work(gateway, others, LOAD_S))
        flooding = subprocess.Popen(
            [sys.executable, flooder.__file__, gateway.url, flood, str(LOAD_S + 4)], stdout=subprocess.PIPE
        )
        import psutil

        def cpu():
            out = {}
            for n, pid in (("worker", worker.popen.pid), ("gateway", gateway.popen.pid), ("flood", flooding.pid)):
                try:
                    p = psutil.Process(pid)
                    ps = [p, *p.children(recursive=True)]
                    out[n] = sum(x.cpu_times().user + x.cpu_times().system for x in ps)
                except Exception:
                    out[n] = 0
            for p in psutil.process_iter():
                try:
                    if p.name() == "java":
                        out["java%d" % p.pid] = p.cpu_times().user + p.cpu_times().system
                except Exception:
                    pass
            me = psutil.Process()
            out["me"] = me.cpu_times().user + me.cpu_times().system
            c = psutil.cpu_times()
            out["all busy"] = c.user + c.system + c.nice
            out["steal"] = c.steal
            out["t"] = time.time()
            return out

        c0 = cpu()
        try:
            time.sleep(2)  # the flood's first second of permits is spent
            beside = asyncio.run(work(gateway, others, LOAD_S))
            c1 = cpu()
            print("\nCPU", {k: round((c1[k] - c0.get(k, 0)) / (c1["t"] - c0["t"]), 2) for k in c1})
            told, _ = flooding.communicate(timeout=60)
        finally:
            flooding.kill()
        answers = json.loads(told)
        print(gateway.tail(60))
        print(sorted(t for _, t in alone)[-5:], sorted(t for _, t in beside)[::20], {s for s, _ in beside}, answers)
        assert answers.get("429", 0) > 0, f"it was no flood: {answers}"
        assert not set(answers) & {"500", "internal"}, answers
        print(
            f"p95 {percentile([t for _, t in alone], 0.95):.3f} {percentile([t for _, t in beside], 0.95):.3f}", answers
        )
        assert {status for status, _ in [*alone, *beside]} == {200}, f"refused; the flood saw {answers}"
        before, after = (percentile([taken for _, taken in one], 0.95) for one in (alone, beside))
        assert after <= 1.5 * before, f"p95 {before:.3f} s alone, {after:.3f} s beside the flood, which saw {answers}"
