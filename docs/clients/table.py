"""Makes the table of docs/clients.md: starts a Penstock and runs all stock clients against it.

    PYTHONPATH=tests python docs/clients/table.py [CLIENT …]

`local` and `local-embeddings` are real models of its worker. `remote` and `remote-embeddings` are the same ones asked
through a remote server, which is the same gateway: a request for `remote` comes back as one for `local`, over HTTP.
Environments of the clients are made in the cache when they are missing. Every outcome goes to standard error as it
comes, the table to standard output.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from checks import LENIENT
from environments import PYTHON, node_folder, python_environment

from penstock.cli.assets import ASSETS, prepare_model
from penstock.cli.embedded_kafka import EmbeddedKafka
from penstock.cli.paths import free_port
from system import System, running

FEATURES = (
    "chat", "stream", "tools", "tools, streamed", "tools, strict", "JSON schema", "n, logprobs", "seed", "responses",
    "responses, streamed", "responses, tools", "responses, JSON schema", "embeddings", "images",
    "images, streamed", "image edits", "chat with images", "tools, three turns", "unknown fields, both modes",
)  # fmt: skip
NODE = "openai (Node)"
REAL = {"local": "smollm2-135m", "local-embeddings": "all-minilm-l6-v2"}
TINY = ("tiny-image-generation", "tiny-image-editing", "tiny-image-to-text")


def own_models() -> list[dict[str, Any]]:
    """Real ones for text and embeddings, tiny ones for images."""
    return [
        {
            "id": name,
            "source": str(prepare_model(asset, print_error)),
            "engine": ASSETS[asset].engine,
            "tasks": list(ASSETS[asset].tasks),
            "options": {"load_timeout_s": 900},
        }
        for name, asset in {**REAL, **dict(zip(TINY, TINY, strict=True))}.items()
    ]


def remote_models(url: str) -> list[dict[str, Any]]:
    served = {"remote": ("local", "text_generation"), "remote-embeddings": ("local-embeddings", "embedding")}
    return [
        {"id": name, "source": url, "engine": "remote", "tasks": [task], "options": {"remote_model": model}}
        for name, (model, task) in served.items()
    ]


def print_error(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def outcomes(client: str, url: str) -> list[dict[str, str]]:
    """What `check.py` says, in the client's own environment."""
    python = sys.executable if client == NODE else str(python_environment(client))
    command = [python, str(Path(__file__).with_name("check.py")), url, client]
    command += [str(node_folder())] if client == NODE else []
    told: list[dict[str, str]] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running_check:
        for line in running_check.stdout or ():
            print_error(line.strip())
            told.append(json.loads(line))
    return told


def row(told: list[dict[str, str]]) -> str:
    found: Mapping[str, Mapping[str, str]] = {}
    for one in told:
        found = {**found, one["feature"]: {**found.get(one["feature"], {}), one["where"]: one["outcome"]}}
    cells = [f"{told[0]['client']} {told[0]['version']}"]
    for feature in FEATURES:
        both = list(dict.fromkeys(found.get(feature, {"local": "–"}).values()))
        cells.append(both[0] if len(both) == 1 or both[1] == "–" else " / ".join(both))
    return f"| {' | '.join(cells)} |"


def main() -> None:
    wanted = sys.argv[1:]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        broker = EmbeddedKafka(folder / "kafka", free_port())
        broker.start()
        stack.callback(broker.kill)
        port = free_port()
        url = f"http://127.0.0.1:{port}/v1"
        system = System(
            broker.bootstrap_servers,
            "clients-",
            folder / "system",
            models=[*own_models(), *remote_models(url)],
        )
        stack.enter_context(running(system))
        worker = system.worker()
        system.gateway(port=port).wait_ready(300)
        lenient = system.gateway("lenient", env={"PENSTOCK_GATEWAY__UNKNOWN_FIELDS": "ignore"}).wait_ready(300)
        os.environ[LENIENT] = f"{lenient.url}/v1"
        worker.wait_ready(600)
        print(f"| client | {' | '.join(FEATURES)} |\n| --- |{' --- |' * len(FEATURES)}")
        for client in wanted or [*PYTHON, NODE]:
            print(row(outcomes(client, url)), flush=True)


if __name__ == "__main__":
    main()
