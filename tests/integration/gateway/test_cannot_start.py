"""What a person can mend ends a gateway with one line that names the place, and no traceback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from system import System, running


@pytest.mark.parametrize("variable", ["PENSTOCK_GATEWAY__VIEW_PATH", "PENSTOCK_ARTIFACTS__LOCATION"])
def test_a_place_that_cannot_be_written_is_named(kafka: Any, kafka_prefix: str, tmp_path: Path, variable: str) -> None:
    (tmp_path / "file").write_text("not a folder")
    with running(System(kafka.bootstrap_servers, kafka_prefix, tmp_path / "system")) as system:
        env = {variable: str(tmp_path / "file" / "below")}
        if variable == "PENSTOCK_ARTIFACTS__LOCATION":
            env["PENSTOCK_GATEWAY__ARTIFACTS_DIR"] = env[variable]
        gateway = system.gateway(env=env)
        assert gateway.wait_dead(60) == 1
        log = gateway.tail(200)
    assert "Traceback" not in log, log
    assert str(tmp_path / "file") in log
