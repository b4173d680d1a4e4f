"""A store that is slow for one tenant, on a real S3 server: nobody else waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from artifact_gateway import ArtifactGateway
from penstock.common.artifacts import ArtifactStore
from s3_proxy import S3Proxy
from support import wait_until

PATH = "/v1/artifacts"
SLOW = 30


@pytest.fixture
def proxy(s3_server: Any) -> Iterator[S3Proxy]:
    made = S3Proxy(s3_server.url, only="/acme")
    yield made
    made.stop()


def test_slow_calls_of_one_tenant_keep_no_other_waiting(proxy: S3Proxy, bucket: Any, tmp_path: Path) -> None:
    """Lists, descriptions and deletions of one tenant hang, more than a gateway has threads."""
    store = ArtifactStore(bucket.location, options={**bucket.options, "aws_endpoint": proxy.url})
    with ArtifactGateway(store, tmp_path) as serving, ThreadPoolExecutor(SLOW) as callers:
        acme, globex = serving.clients["acme"], serving.clients["globex"]
        kept = acme.post(PATH, content=b"1").json()["id"]
        proxy.begin("hangs")
        calls = [callers.submit(acme.get, f"{PATH}/{kept}" if one % 2 else PATH) for one in range(SLOW)]
        try:
            wait_until(lambda: proxy.struck["hangs"] >= 6, describe="the store is slow")
            made = globex.post(PATH, content=b"2", timeout=10).raise_for_status().json()["id"]
            assert [one["id"] for one in globex.get(PATH, timeout=10).json()["data"]] == [made]
            assert globex.get(f"{PATH}/{made}/content", timeout=10).content == b"2"
            assert globex.delete(f"{PATH}/{made}", timeout=10).status_code == 200
            assert not any(call.done() for call in calls)
        finally:
            proxy.heal()
        assert {call.result(60).status_code for call in calls} == {200}
