"""The light client as a service installs it: the built wheel in an empty environment, beside new and old libraries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.paths import free_port
from penstock.common.settings import KafkaSettings
from stock_clients import missing

ROOT = Path(__file__).parents[3]
UV = Path(sys.executable).with_name("uv")
OLDEST = ("confluent-kafka==2.10.0", "obstore==0.8.0")
SERVICE = """
import json, sys
from pathlib import Path
from penstock.producers import BrokerUnavailable, Client, KafkaSettings, PenstockError

servers, prefix, nobody, folder = sys.argv[1:]
with Client(KafkaSettings(bootstrap_servers=servers, topic_prefix=prefix), artifacts=folder) as client:
    submitted = client.submit(task="text_generation", payload={"prompt": "a text of a service"}, stream=True)
    told = [type(event).__name__ for event in client.follow(submitted, timeout=60)]
    text = client.result(submitted, timeout=10).output_text
    kept = client.artifacts.put(b"bytes")
    assert client.artifacts.get(kept.artifact_id) == b"bytes"
with Client(KafkaSettings(bootstrap_servers=nobody), timeout_s=1) as client:
    try:
        client.submit(task="text_generation", payload={"prompt": "x"})
    except BrokerUnavailable as error:
        away = str(error)
heavy = sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "faust", "fastapi", "transformers"})
print(json.dumps({"text": text, "told": sorted({*told}), "away": away, "heavy": heavy}))
"""


def uv(*arguments: str) -> None:
    done = subprocess.run([str(UV), *arguments], capture_output=True, text=True, timeout=280, env=environment())
    if done.returncode != 0 and any(word in done.stderr for word in ("dns error", "tcp connect", "Connection refused")):
        missing(f"a package index ({done.stderr.strip().splitlines()[-1]})")
    assert done.returncode == 0, done.stderr


def environment() -> dict[str, str]:
    """Nothing of this checkout: no folders of it, no environment of its own."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not UV.exists():
        missing("uv")
    folder = tmp_path_factory.mktemp("wheel")
    uv("build", "--quiet", "--wheel", "--out-dir", str(folder), str(ROOT))
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.slow
@pytest.mark.parametrize("beside", [(), OLDEST], ids=["newest", "oldest"])
def test_a_service_with_the_wheel_alone_submits_and_follows(
    beside: tuple[str, ...], wheel: Path, settings: KafkaSettings, worker: Any, tmp_path: Path
) -> None:
    python = tmp_path / "v" / "bin" / "python"
    uv("venv", "--quiet", "--python", sys.executable, str(tmp_path / "v"))
    uv("pip", "install", "--quiet", "--python", str(python), str(wheel), *beside)

    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(python), *argv], capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment()
        )

    nobody = f"127.0.0.1:{free_port()}"
    places = (settings.bootstrap_servers, settings.topic_prefix, nobody, str(tmp_path / "artifacts"))
    done = run("-c", SERVICE, *places)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    told = json.loads(done.stdout)
    assert (told["text"], told["heavy"]) == ("a text of a service", [])
    assert {"Chunk", "Result"} <= set(told["told"])
    assert nobody in told["away"]
    versions = run("-c", "from importlib.metadata import version as v; print(v('confluent-kafka'), v('obstore'))")
    assert all(name.partition("==")[2] in versions.stdout.split() for name in beside)

    refused = run("-m", "penstock.cli.main", "worker", "--bootstrap-servers", settings.bootstrap_servers)
    assert refused.returncode == 2, refused.stderr
    assert refused.stderr.endswith(f"pip install 'penstock[worker] @ {wheel.as_uri()}'\n")
