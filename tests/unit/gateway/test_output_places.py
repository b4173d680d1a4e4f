"""`output {store, prefix}` of a request: refused by name at the gateway, and by a worker before it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kit.gateway_records import request
from penstock.common.artifacts import ArtifactStore, Place
from penstock.common.configuration import ArtifactsSection, StoreSection
from penstock.gateway.limits.callers import ANYBODY
from penstock.gateway.service.submitting import Submitter
from penstock.gateway.settings import GatewaySettings
from penstock.processors.outputs import Outputs
from penstock.schemas.errors import InvalidRequest
from penstock.schemas.records import OutputSpec

WRONG = [
    (OutputSpec(store="warm"), "output.store"),
    (OutputSpec(store="cold", prefix="../globex"), "output.prefix"),
    (OutputSpec(prefix="/etc"), "output.prefix"),
]


@pytest.mark.parametrize(("output", "param"), WRONG)
async def test_the_gateway_refuses_it_before_anything_else(output: OutputSpec, param: str, tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path, stores={"cold": Place(location=str(tmp_path / "cold"), options={})})
    nothing: Any = None
    submitter = Submitter(GatewaySettings(), nothing, nothing, nothing, nothing, nothing, nothing, store.check_place)
    with pytest.raises(InvalidRequest) as refused:
        await submitter.check(ANYBODY, request(task="image_generation", output=output))
    assert refused.value.param == param


@pytest.mark.parametrize(("output", "param"), WRONG)
def test_a_worker_refuses_it_without_opening_a_store(output: OutputSpec, param: str, tmp_path: Path) -> None:
    section = ArtifactsSection(stores={"cold": StoreSection(location=str(tmp_path / "cold"))})
    outputs = Outputs(tmp_path / "artifacts", section)
    with pytest.raises(InvalidRequest) as refused:
        outputs.check(output)
    assert refused.value.param == param
    outputs.check(OutputSpec(store="cold", prefix="renders/2026"))
    outputs.check(None)
    assert not list(tmp_path.iterdir())
