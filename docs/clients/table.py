"""Makes the tables of docs/clients.md: starts a Penstock and runs all stock clients against it.

    PYTHONPATH=tests python docs/clients/table.py [--tiny] [CLIENT …]

`local` and `local-embeddings` are real models of its worker. `remote` and `remote-embeddings` are the same ones asked
through a remote server, which is the same gateway: a request for `remote` comes back as one for `local`, over HTTP.
With `--tiny` the model of text is the tiny one of the tests: what it writes makes no sense, but it is fast.
Environments of the clients are made in the cache when they are missing. Every outcome goes to standard error as it
comes, the tables to standard output.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from check_node import FOLDER, NODE
from checks import AGENT, BATCHES, LENIENT, PICTURES, UNKNOWN
from environments import PYTHON, node_folder, python_environment

from penstock.cli.assets import ASSETS, prepare_model
from penstock.cli.embedded_kafka import EmbeddedKafka
from penstock.cli.paths import free_port
from system import System, running

TABLES: dict[str, tuple[str, ...]] = {
    "Chats": (
        "chat", "stream", "tools", "tools, streamed", "tools, strict", AGENT, "JSON schema", "n, logprobs",
        "seed", UNKNOWN,
    ),
    "Responses and completions": (
        "responses", "responses, streamed", "responses, tools", "responses, JSON schema", "background",
        "prompt lists, echo, logprobs",
    ),
    "Embeddings and images": (
        "embeddings", BATCHES, "images", "images, streamed", "image edits", *PICTURES,
    ),
}  # fmt: skip
REAL = {"local": "smollm2-135m", "local-embeddings": "all-minilm-l6-v2"}
TINY_IMAGES = ("tiny-image-generation", "tiny-image-editing", "tiny-image-to-text")


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
        for name, asset in {**REAL, **dict(zip(TINY_IMAGES, TINY_IMAGES, strict=True))}.items()
    ]


def with_tiny_text(models: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """The tiny model in the place of `local`, with a window for what agents ask."""
    shutil.copytree(prepare_model("tiny-lm", print_error), folder)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 16_384}))
    (folder / "penstock-manifest.json").unlink()
    return [one | {"source": str(folder)} if one["id"] == "local" else one for one in models]


def remote_models(url: str) -> list[dict[str, Any]]:
    served = {"remote": ("local", "text_generation"), "remote-embeddings": ("local-embeddings", "embedding")}
    return [
        {"id": name, "source": url, "engine": "remote", "tasks": [task], "options": {"remote_model": model}}
        for name, (model, task) in served.items()
    ]


def print_error(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def outcomes(client: str, url: str) -> Iterator[dict[str, str]]:
    """What `check.py` says, in the client's own environment."""
    python = sys.executable if client == NODE else str(python_environment(client))
    env = {**os.environ, FOLDER: str(node_folder())} if client == NODE else os.environ
    command = [python, str(Path(__file__).with_name("check.py")), url, client]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as running_check:
        for line in running_check.stdout or ():
            print_error(line.strip())
            if line.startswith('{"client"'):  # some clients print from threads of their own
                yield json.loads(line)


def cell(found: Sequence[str]) -> str:
    """The outcomes of one feature, local and remote."""
    both = list(dict.fromkeys(found or ["–"]))
    return both[0] if len(both) == 1 or both[1] == "–" else " / ".join(both)


def table(told: Sequence[Mapping[str, str]], features: Sequence[str]) -> str:
    """A row for each client that does some of the features."""
    lines = [f"| client | {' | '.join(features)} |", f"| --- |{' --- |' * len(features)}"]
    for client in dict.fromkeys(one["client"] for one in told):
        own = [one for one in told if one["client"] == client]
        cells = [cell([one["outcome"] for one in own if one["feature"] == feature]) for feature in features]
        if set(cells) != {"–"}:
            lines.append(f"| {client} {own[0]['version']} | {' | '.join(cells)} |")
    return "\n".join(lines)


@contextmanager
def serving(*, tiny: bool) -> Generator[str]:
    """The address of a whole system; that of its lenient gateway stands in the environment."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        broker = EmbeddedKafka(folder / "kafka", free_port())
        broker.start()
        stack.callback(broker.kill)
        port = free_port()
        url = f"http://127.0.0.1:{port}/v1"
        own = with_tiny_text(own_models(), folder / "tiny-lm") if tiny else own_models()
        models = [*own, *remote_models(url)]
        system = stack.enter_context(running(System(broker.bootstrap_servers, "clients-", folder / "system", models)))
        worker = system.worker()
        system.gateway(port=port).wait_ready(300)
        lenient = system.gateway("lenient", env={"PENSTOCK_GATEWAY__UNKNOWN_FIELDS": "ignore"}).wait_ready(300)
        os.environ[LENIENT] = f"{lenient.url}/v1"
        worker.wait_ready(600)
        yield url


def main() -> None:
    wanted = sys.argv[1:]
    tiny = "--tiny" in wanted
    clients = [one for one in wanted if one != "--tiny"] or [*PYTHON, NODE]
    with serving(tiny=tiny) as url:
        told = [one for client in clients for one in outcomes(client, url)]
    for name, features in TABLES.items():
        print(f"{name}:\n\n{table(told, features)}\n")


if __name__ == "__main__":
    main()
