"""The examples of the tutorial and of the how-to run as they stand, by bash and Python, on a real `penstock up`.

Only addresses and what a reader puts in are replaced. Sections that do not run here say why (`ELSEWHERE`).
PENSTOCK_TEST_LONG=1 runs them on a `penstock up` without `--tiny-models` too, whose answers have their whole length.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from doc_blocks import SHELL, Block, blocks
from penstock.cli.assets import ASSETS, prepare_model
from penstock.cli.local_system import DEFAULT_CHAT, DEFAULT_EMBEDDING, DEFAULT_UPSCALER, IMAGING
from penstock.cli.paths import free_port, port_in_use
from support import wait_until
from system import toml_value

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

DOCS = Path(__file__).parents[3] / "docs"
ELSEWHERE = {
    "Talk to Penstock from a web page": "tests/integration/gateway/test_browser.py opens it in a browser",
    "Make keys while gateways run": "it takes a gateway with keys: tests/integration/gateway/test_admin_keys.py",
    "Traces": "its worker would be a second one on this machine; tests/integration/telemetry has a collector",
    "Logs": "its worker would be a second one on this machine; tests/integration/telemetry has all processes",
    "Use another chat model": "it takes a model of the reader's",
    "Models for every task": "no model hub is reachable",
    "Make a real picture": "no model hub is reachable",
    "Serve through an OpenAI-compatible server": "tests/integration/engines serve through one",
    "Give hosts different models": "tests/integration/worker/test_pools.py has pools",
    "Hold more conversations than a broker has topics for": "it comes before the first; test_topics_command.py has it",
    "Use an existing Kafka": "its brokers are the reader's; tests/integration/cli/test_topics_command.py has one",
    "Send messages as other services write them, and read results as JSON": "test_foreign_messages.py sends some",
    "Send requests with a stock Avro producer": "test_foreign_messages.py of stock runs examples/avro_request.py",
    "Merge the queues of other systems": "tests/integration/gateway/test_queues.py merges some",
}
DRAWING = {"Work with images", "In a conversation", "Submit from the command line"}
"""Without `--tiny-models` nothing draws, edits or describes images."""
VARIANTS = [["--tiny-models"], []] if os.environ.get("PENSTOCK_TEST_LONG") else [["--tiny-models"]]
LONGEST = 100
"""Tokens of an answer in the tutorial: SmolLM2 writes some twenty a second on two cores."""
LACKING = ("standardwebhooks import",)
"""Blocks with these words need what only a receiver has: tests/integration/gateway/test_webhooks.py is one."""

OPENAI = """
import json, os
from pathlib import Path
import httpx, pydantic
from openai import OpenAI
from penstock.producers import Client, KafkaSettings
settings = KafkaSettings()
client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
messages = [{"role": "user", "content": "Name a city, as JSON."}]
function = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
tools = [{"type": "function", "function": function}]
"""
"""What a block of Python that makes no client takes for given."""

FIRST = "python -c 'import json, sys; one = json.loads(sys.stdin.readline()); print({})'"
A_REQUEST = f"""
echo '{{"task": "text_generation", "stream": true, "payload": {{"prompt": "A", "max_tokens": 4}}}}' > request.json
id=$(curl -s http://127.0.0.1:8000/v1/requests -d @request.json | {FIRST.format('one["request_id"]')})
"""
RECIPE = "Interactive work beside a flood"
"""Its settings hold for the whole `penstock up`."""
BEFORE = {
    "Cancel": A_REQUEST,
    RECIPE: A_REQUEST,
    "Why does my request wait": A_REQUEST,
    "Stream over WebSocket, and resume": A_REQUEST
    + "cursor=$(curl -sN http://127.0.0.1:8000/v1/requests/$id/events | sed -n 's/^id: //p' | head -1)\n",
    "Run a batch": A_REQUEST + "cp request.json requests.ndjson",
    "Run dead letters again": """
echo '{"task": "no such task"}' | kcat -P -b 127.0.0.1:9092 -t inference.request.low
until [ -n "$(penstock dlq list --json)" ]; do sleep 0.2; done
""",
    "Set priorities": """
curl() { command curl "$@"; }  # the request has begun when it gets its second priority: 409
penstock models pause --class low --wait
id=$(penstock submit --no-wait --priority 9 "Later")
""",
    "Submit from the command line": """
for name in question page report; do echo 'What is a dam?' > $name.txt; done
penstock submit -c trip "Hello"
""",
}
RESUME = "penstock models resume --class low --wait"
CHOSEN = f"""
penstock models pause --class low --wait
id=$(penstock submit --no-wait --priority 9 "Later")
until curl -s http://127.0.0.1:8000/v1/requests/$id | grep -E '"ttl_ms": ?60000'; do sleep 0.2; done
{RESUME}
"""
"""A low request that waits gets the least time to live: those before it have hardly waited."""
AFTER = {"Change models while they run": RESUME, "Set priorities": RESUME, RECIPE: CHOSEN}


@dataclass
class Up:
    """A `penstock up` with the models that it has by default, and perhaps tiny ones beside them."""

    options: list[str]
    folder: Path
    process: subprocess.Popen[bytes]
    environment: dict[str, str]
    replaced: dict[str, str]

    def run(self, name: str, found: list[Block]) -> None:
        folder = self.folder / name.replace(" ", "-").replace("/", "-")
        folder.mkdir()
        Image.linear_gradient("L").convert("RGB").resize((64, 64)).save(folder / "dam.png")
        Image.linear_gradient("L").convert("RGB").resize((64, 64)).save(folder / "cat.png")
        parts = [part for block in found if (part := script_of(block))]
        assert parts, f"nothing of {name!r} runs"
        text = "\n".join([BEFORE.get(name, ""), *parts, AFTER.get(name, "")])
        for shown, here in self.replaced.items():
            text = text.replace(shown, here)
        script = folder / "script.sh"
        script.write_text('set -eu\ncurl() { command curl --fail-with-body "$@"; }\n' + text)
        (folder / "typed").write_text("What is the capital of France?\n")
        with (folder / "typed").open() as typed, (folder / "said").open("w") as said:
            done = subprocess.run(
                ["timeout", "300", "bash", "-x", script.name],
                cwd=folder,
                env=self.environment,
                stdin=typed,
                stdout=said,
                stderr=subprocess.STDOUT,
            )
        assert done.returncode == 0, (folder / "said").read_text()[-8_000:]


def script_of(block: Block) -> str:
    """What bash runs of a block: nothing, if its language is that of a file."""
    text = block.text
    if any(words in text for words in LACKING):
        return ""
    if block.language in SHELL:
        return "\n".join(line for line in text.splitlines() if not line.startswith(("make ", "pip ", "uv ")))
    if block.language != "python":
        return ""
    given = "" if "import" in text.partition("\n")[0] else OPENAI
    run = f"python -u - <<'END_OF_PYTHON'\n{given}{text}END_OF_PYTHON"
    if "while True" in text:  # until it has said something
        return run.replace("python -u", "timeout 60 python -u").replace("\n", " | grep -m 1 .\n", 1)
    return run


def models() -> Iterator[dict[str, Any]]:
    """Those that `penstock up` has by default, with short answers."""
    for name in (DEFAULT_CHAT, DEFAULT_EMBEDDING, DEFAULT_UPSCALER):
        table = ASSETS[name].model_table(prepare_model(name, print))
        yield {**table, **({"defaults": {**table["defaults"], "max_tokens": 64}} if name == DEFAULT_CHAT else {})}
    yield dict(IMAGING)


@pytest.fixture(scope="module", params=VARIANTS, ids=["tiny models", "default models"][: len(VARIANTS)])
def up(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    options: list[str] = request.param
    folder = tmp_path_factory.mktemp("examples")
    data, config, log = folder / "data", folder / "penstock.toml", folder / "up.log"
    port, kafka, worker, hook = free_port(), free_port(), free_port(), free_port()
    (recipe,) = [tomllib.loads(block.text) for block in HOW_TO[RECIPE] if block.language == "toml"]
    recipe["worker"] |= {"health_port": worker}
    recipe["webhooks"] = {"internal_hosts": [f"127.0.0.1:{hook}"]}
    lines: list[str] = []
    for section, values in recipe.items():
        lines += [f"[{section}]", *(f"{name} = {toml_value(value)}" for name, value in values.items())]
    for table in models() if options else []:
        lines += ["[[models]]", *(f"{name} = {toml_value(value)}" for name, value in table.items())]
    config.write_text("\n".join(lines))
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PENSTOCK_DATA": str(data),
        "PENSTOCK_URL": f"http://127.0.0.1:{port}",
        "PENSTOCK_CONFIG": str(config),
        "PENSTOCK_KAFKA__BOOTSTRAP_SERVERS": f"127.0.0.1:{kafka}",
        "PENSTOCK_ARTIFACTS__LOCATION": str(data / "artifacts"),
    }
    replaced = {
        "127.0.0.1:8000": f"127.0.0.1:{port}",
        "127.0.0.1:9092": f"127.0.0.1:{kafka}",
        "127.0.0.1:8001": f"127.0.0.1:{worker}",
        "127.0.0.1:8002": f"127.0.0.1:{worker}",
        "127.0.0.1:9100": f"127.0.0.1:{hook}",
        "http://registry:8081": f"http://127.0.0.1:{port}/registry",
        "http://gateway:8000": f"http://127.0.0.1:{port}",
        "--strength 0.6 ": "",  # the tiny models edit by instructions
        ", strength=0.6": "",
        "REQUEST_ID": "$id",
        "CURSOR'": "'$cursor",
        "CURSOR": "$cursor",
        "5f0c": "$id",
        "2/17": "$(penstock dlq list --json | " + FIRST.format('one["id"]') + ")",
        "0b7e8f6c-0f43-4d6e-9c35-1c6bb2d8f7a1": "$(penstock artifacts put cat.png)",
        "pk_…": "$(penstock keys create --file keys.json)",
        "3f9c0a1b2c3d": "$(penstock keys list --file keys.json --json | " + FIRST.format('one["id"]') + ")",
        "KafkaSettings()": f'KafkaSettings(bootstrap_servers="127.0.0.1:{kafka}")',
        "s3://my-bucket/penstock": str(data / "artifacts"),
        "/srv/penstock/artifacts": str(data / "artifacts"),
        "owner/encoder": str(ASSETS[DEFAULT_EMBEDDING].folder),
        "unload chat": "unload smollm2-135m",
        '"painter"': '"tiny-image-generation"',
        '"eyes"': '"tiny-image-to-text"',
        '"default"': '"smollm2-135m"',
        "range(1000)": "range(2)",
        '["a text"] * 500': '["a text"] * 200',
        "--duration 30": "--duration 2",
        "--rate 20": "--rate 2",
    }
    ports = ["--port", str(port), "--kafka-port", str(kafka)]
    with log.open("wb") as out:
        without = {name: value for name, value in environment.items() if name != "PENSTOCK_KAFKA__BOOTSTRAP_SERVERS"}
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock.cli.main", "up", *options, *ports, "--config", str(config)],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=without,
            start_new_session=True,
        )
    try:
        wait_until(lambda: "Penstock is up" in log.read_text(), 240, log.read_text)
        yield Up(options, folder, process, environment, replaced)
    finally:
        process.terminate()
        process.wait(60)
    assert not port_in_use(port)


def sections(pages: Iterable[Path]) -> dict[str, list[Block]]:
    found = chain.from_iterable(map(blocks, pages))
    return {name: list(same) for name, same in groupby(found, key=lambda block: block.section)}


HOW_TO = sections(sorted(DOCS.glob("how-to/*.md")))


def test_the_tutorial(up: Up) -> None:
    """From its first line to its last, in one shell. No answer is so long that its reader would wait for it."""

    def lengths() -> dict[str, int]:
        found = httpx.get(f"{up.environment['PENSTOCK_URL']}/v1/requests?limit=100&task=text_generation").json()["data"]
        # What a chat answers is up to who types.
        alone = [one for one in found if one["result"] and one["conversation_id"] is None]
        return {one["request_id"]: one["result"]["usage"]["completion_tokens"] for one in alone}

    before = lengths()  # of sections of the how-to that ran on the same system
    up.run("tutorial", list(blocks(DOCS / "tutorial.md")))
    told = {request_id: tokens for request_id, tokens in lengths().items() if request_id not in before}
    assert told
    assert max(told.values()) <= LONGEST, told


RUNNABLE = {name: found for name, found in HOW_TO.items() if any(map(script_of, found))}


@pytest.mark.parametrize("name", [name for name in RUNNABLE if name not in ELSEWHERE])
def test_how_to(up: Up, name: str) -> None:
    if name in DRAWING and not up.options:
        pytest.skip("it needs models that draw")
    up.run(name, RUNNABLE[name])


def test_only_sections_that_exist_are_left_out() -> None:
    assert {*ELSEWHERE, *DRAWING} <= set(RUNNABLE)
