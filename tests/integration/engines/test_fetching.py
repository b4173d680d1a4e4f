"""A model comes from the hub: the hub's own client against a small server that speaks the hub's protocol."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kit.hub import FILES, Hub, HubServer, serving_hub
from penstock.processors.models.sizing import fetch
from penstock.schemas.errors import EngineFailed, InvalidRequest, PenstockError

pytest.importorskip("huggingface_hub")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with serving_hub(str(tmp_path)) as (server, env):
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.mark.usefixtures("hub")
async def test_a_revision_is_fetched_and_tells_how_far_it_is() -> None:
    told: list[float] = []
    folder = await fetch("owner/name", "v1", on_progress=told.append)
    assert {file.name for file in folder.iterdir()} == {"config.json", "model.safetensors"}, "no code and no pickle"
    assert (folder / "model.safetensors").stat().st_size == len(FILES["model.safetensors"])
    assert told == sorted(told)
    assert told[-1] == pytest.approx(1, abs=0.02)
    assert any(0 < part < 0.9 for part in told), told
    again: list[float] = []
    assert await fetch("owner/name", "v1", on_progress=again.append) == folder
    assert again == [], "what is there is not fetched again"
    assert (await fetch("owner/name", "v1", code=True) / "code.py").read_bytes() == FILES["code.py"]


def silent(hub: Hub) -> None:
    threading.Event().wait()


@pytest.mark.parametrize(
    ("ill", "kind", "why"),
    [
        (None, InvalidRequest, "RevisionNotFoundError: 404"),
        (lambda hub: hub.refuse(401, "GatedRepo"), InvalidRequest, "GatedRepoError: 401"),
        (lambda hub: hub.refuse(404, "RepoNotFound"), InvalidRequest, "RepositoryNotFoundError: 404"),
        (lambda hub: hub.refuse(503), EngineFailed, "503"),
        (lambda hub: hub.refuse(429), EngineFailed, "429"),
        (lambda hub: hub.connection.close(), EngineFailed, "RemoteProtocolError"),
        (silent, EngineFailed, "ReadTimeout"),
    ],
    ids=["no-revision", "gated", "no-model", "unavailable", "too-many", "closes", "silent"],
)
async def test_why_a_model_cannot_be_fetched(
    hub: HubServer, ill: Callable[[Hub], None] | None, kind: type[PenstockError], why: str
) -> None:
    """What may pass by itself is tried again (EngineFailed), what a configuration must mend is not."""
    hub.ill = ill
    with pytest.raises(PenstockError, match=f"owner/name could not be fetched from the hub: .*{why}") as raised:
        await asyncio.wait_for(fetch("owner/name", "v2"), 60)
    assert type(raised.value) is kind
    assert "\n" not in str(raised.value)


async def test_a_hub_that_does_not_answer_is_passed_over_when_the_model_is_there(hub: HubServer) -> None:
    folder = await fetch("owner/name", "v1")
    hub.ill = silent
    assert await asyncio.wait_for(fetch("owner/name", "v1"), 60) == folder
