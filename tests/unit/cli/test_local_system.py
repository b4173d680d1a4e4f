"""What `penstock up` decides by itself: models, ports and settings, and one line with the cure for what is wrong."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from kit.cli import Json, scripted_gateway
from kit.refusals import refused
from penstock.cli import local_system, paths
from penstock.cli.chosen_models import chat_model, remote_model
from penstock.cli.failures import CliFailure, ExitCode
from penstock.cli.local_system import LocalSystem, Options, card
from penstock.cli.ordered import removed_lines
from penstock.cli.paths import free_port
from penstock.cli.readiness import readiness_of_part
from penstock.cli.run_config import variable
from penstock.cli.state import Home, PartState, SystemState
from penstock.cli.supervisor import Backoff, Part
from penstock.cli.up import noted
from penstock.common.desired import Desired
from penstock.common.model_entry import ModelEntry, parse_entry
from penstock.schemas.desired import MODEL, desired_key, ordered

Make = Callable[..., LocalSystem]


class Orders(dict[str, Desired]):
    """The topic of orders."""

    def add(self, name: str, action: str, **options: Any) -> None:
        key, revision = desired_key(MODEL, name, None), len(self)
        former = self[key].state if key in self else None
        state = ordered(former, kind=MODEL, name=name, pool=None, action=action, now_ms=revision, **options)
        self[key] = Desired(state, revision)


@pytest.fixture(autouse=True)
def orders(monkeypatch: pytest.MonkeyPatch) -> Orders:
    made = Orders()
    monkeypatch.setattr(local_system, "read_orders", lambda settings: made)
    monkeypatch.delenv("PENSTOCK_CONFIG", raising=False)
    return made


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Makes a system on free ports: `config` is the text of its file, `models` are ids or entries."""

    def make(*models: str | Json, say: Any = print, config: str | None = None, **options: Any) -> LocalSystem:
        if config is not None:
            options["config"] = tmp_path / "penstock.toml"
            options["config"].write_text(config)
        ports = {"port": free_port(), "kafka_port": free_port()}
        system = LocalSystem(Options(**{"data_dir": tmp_path, **ports, **options}), say)
        system.ports["worker"] = free_port()  # another Penstock may use the default
        system.models = [entry(one) if isinstance(one, str) else one for one in models]
        return system

    return make


@pytest.fixture
def taken() -> Iterator[int]:
    """A port in use."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def entry(name: str, **fields: Any) -> Json:
    return {"id": name, "source": "owner/name", "engine": "text", **fields}


LATER = entry("later", preload=False)
NOT_THERE = "is no folder"


def starts_nothing(system: LocalSystem, reason: str) -> None:
    with pytest.raises(CliFailure, match=reason):
        system.start()
    assert system.supervisor.parts == []


def test_start_waits_for_the_first_model_that_is_to_be_loaded(make: Make, orders: Orders) -> None:
    system = make(LATER, "a", "b", "c")
    assert system.wanted_model() == "a"
    for name, action, wanted in (("a", "unload", "b"), ("b", "remove", "c"), ("c", "pause", None)):
        orders.add(name, action)
        assert system.wanted_model() == wanted
    system.await_model()  # returns at once
    orders.add("d", "add", entry=json.dumps(entry("d")))
    assert system.wanted_model() == "d"
    orders.add("a", "load")
    assert system.wanted_model() == "a"


def test_start_waits_for_the_model_also_if_the_gateway_wants_keys(make: Make) -> None:
    states = [{"ready": True, "models": {"m": state}} for state in ("loading", "loading", "ready")]
    with scripted_gateway({"GET /v1/models?task=all": (401, {}), "GET /readyz": states}) as server:
        system = make(LATER, "m", port=server.server_port)
        system.ports["worker"] = server.server_port
        system.await_model()
        assert server.asked.count("GET /readyz") == 3
        system.models = [LATER]
        system.await_model()
        assert server.asked.count("GET /readyz") == 3, "a model without preload is not waited for"


def test_a_model_that_stays_failed_is_named_and_the_others_are_served(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_system, "FAILED_S", 0.1)
    states = [{"data": [{"id": "m", "state": one, "created": 1 << 40}]} for one in ("failed", "loading", "failed")]
    degraded = {"status": "degraded", "reason": "m could not be loaded (its folder is empty)"}
    said: list[str] = []
    with scripted_gateway({"GET /readyz": degraded, "GET /v1/models": states}) as server:
        system = make("m", "other", say=said.append, port=server.server_port)
        system.await_model()
        assert sum("/v1/models" in call for call in server.asked) > 3, "the first failure is tried again"
        reason = f"m could not be loaded (its folder is empty) (log: {tmp_path}/logs/worker.log)"
        assert (system.failed, said) == ({"m": reason}, [f"{reason}; asking for it tries again"])
        text = card(system)
        for part in ("Penstock is up without the model m: ", " --model other\n", '"model":"other"'):
            assert part in text
        system.models = [entry("m")]
        assert "curl" not in card(system)


def test_the_card_lists_the_models_that_are_served_now(make: Make, orders: Orders) -> None:
    system = make("gone", "stays", {"id": "imaging", "source": "pillow", "engine": "imaging"})
    orders.add("gone", "remove")
    orders.add("new", "add", entry=json.dumps(entry("new", tasks=["summarization"])))
    text = card(system)
    assert "models  stays, imaging, new" in text
    assert '"model":"stays"' in text
    (lacking,) = re.findall("no model for (.*) \\(", text)
    served = {"image_processing", "summarization", "text_generation", "conversation_items"}
    assert served.isdisjoint(lacking.split(", "))
    orders.add("stays", "remove")
    assert "curl" not in card(system), "no model is left for chat"


def test_models_that_an_order_removed_are_named_with_the_command_that_adds_them(orders: Orders) -> None:
    orders.add("paused", "pause")
    orders.add("gone", "remove")
    entries = [
        parse_entry(entry(name, source="/my model", tasks=["text_generation"])) for name in ("gone", "paused", "a")
    ]
    (line,) = removed_lines(entries, orders, None)
    assert line.startswith("gone is not served, it was removed by an order at 1970-01-01T")
    assert "`penstock models add gone --source '/my model' --engine text --task text_generation` adds it again" in line


def test_the_card_says_where_the_models_are(make: Make) -> None:
    states = {"chat": "ready", "drawing": "loading", "elsewhere": "ready", "idle": "absent"}
    ready = {"models": states, "devices": {"chat": ["cuda:0", "cuda:1"], "elsewhere": []}}
    system = make(*states, "new")
    with scripted_gateway({"GET /readyz": ready}) as server:
        system.ports["worker"] = server.server_port
        assert "chat (on cuda:0 cuda:1), drawing (loading), elsewhere, idle (loaded when asked for)" in card(system)
    system.ports["worker"] = free_port()
    assert "models  chat, drawing, elsewhere, idle, new" in card(system), "a worker that does not answer"


@pytest.mark.parametrize("by_variable", [False, True])
def test_the_card_names_the_key_that_the_gateway_asks_for(
    make: Make, monkeypatch: pytest.MonkeyPatch, by_variable: bool
) -> None:
    if by_variable:
        monkeypatch.setenv("PENSTOCK_AUTH__KEYS_FILE", "keys.json")
    text = card(make("m", config="" if by_variable else '[auth]\nkeys_file = "keys.json"\n'))
    assert all(part in text for part in ("authorization: Bearer KEY", 'api_key="KEY"', " PENSTOCK_API_KEY=KEY "))


def test_the_card_is_short_and_its_commands_name_their_instance(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "my data"
    system = make("smollm2-135m", data_dir=folder, port=8123)
    text = card(system)
    for word in (
        "export PENSTOCK_URL=http://127.0.0.1:8123\n",
        "curl ",
        "OpenAI(base_url=",
        "smollm2-135m",
        str(tmp_path),
    ):
        assert word in text
    assert len(text.splitlines()) < 15
    assert all(f"penstock {command} --data-dir '{folder}'" in text for command in ("logs -f", "status"))
    monkeypatch.setenv("PENSTOCK_DATA", str(folder))
    assert "--data-dir" not in card(system)


def test_models_by_hub_id_and_by_folder(tmp_path: Path) -> None:
    assert chat_model("Qwen/Qwen3-0.6B", print) == {
        "id": "qwen3-0.6b", "source": "Qwen/Qwen3-0.6B", "engine": "text", "tasks": ["text_generation"],
        "aliases": ["default"],
    }  # fmt: skip
    folder = tmp_path / "My Model"
    folder.mkdir()
    for name, reason in ((folder, r"no config\.json"), (tmp_path / "none.gguf", "no such file"), ("???", NOT_THERE)):
        with refused(CliFailure, match=reason, exit_code=ExitCode.USAGE):
            chat_model(str(name), print)
    (folder / "config.json").write_text("{}")
    assert chat_model(str(folder), print)["id"] == "my-model"


def test_a_remote_server_names_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with scripted_gateway({"GET /v1/models": {"object": "list", "data": [{"id": "llama"}, {"id": "other"}]}}) as server:
        found = remote_model(f"{server.url}/v1/", None)
        assert (found["id"], found["source"], found["engine"]) == ("llama", f"{server.url}/v1", "remote")
        assert remote_model(server.url, None) == found
        assert remote_model(f"{server.url}/v1", "mine")["options"] == {"remote_model": "mine"}
        with pytest.raises(CliFailure, match="check the URL") as caught:
            remote_model(f"{server.url}/elsewhere", None)
    assert caught.value.exit_code is ExitCode.UNREACHABLE


MINE = '[[models]]\nid = "mine"\nsource = "/nope"\nengine = "text"\n'
SECURITY = '[kafka.security]\n"security.protocol" = "SASL_SSL"\n'
IGNORED = "--kafka-port has no effect: the Kafka at 127.0.0.1:1 is used, none is run"


@pytest.mark.parametrize(
    ("options", "reason", "lines"),
    [
        ({"model": "/nope"}, "/nope is no folder", []),
        ({"model": "models/none.gguf"}, "no such file", []),
        ({"remote": "http://127.0.0.1:1/v1"}, "check the URL", []),
        ({"remote": "http://me:secret@127.0.0.1:1/v1", "model": "m"}, "--remote: source", []),
        ({"config": MINE}, "the model mine: its source /nope is not there", []),
        ({"config": SECURITY}, "security is for a Kafka of yours", []),
        ({"bootstrap_servers": "127.0.0.1:1", "model": "/nope"}, NOT_THERE, [IGNORED]),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_started(
    make: Make, options: Any, reason: str, lines: list[str]
) -> None:
    said: list[str] = []
    starts_nothing(make(**options, say=said.append), reason)
    assert said == lines


def test_ports_in_use_are_refused_before_anything_is_started(
    make: Make, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts_nothing(make(port=taken), rf"port {taken} is in use: .*--port")
    worker = f"[worker]\nhealth_port = {taken}\n"
    starts_nothing(make(model="/nope", config=worker), f"port {taken} for the worker's health is in use")
    bridge = f"[bridge]\nhealth_port = {taken}\n"
    for queues, reason in (("", NOT_THERE), ('[[queues]]\ntopic = "jobs"\n', f"port {taken} for the bridge's health")):
        system = make(model="/nope", config=bridge + queues)
        monkeypatch.setenv("PENSTOCK_CONFIG", str(system.options.config))
        starts_nothing(system, reason)


def test_the_port_of_the_worker_is_the_named_one_or_else_a_free_one(
    make: Make, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(local_system.HEALTH_PORTS, "worker", taken)
    system = make(model="/nope")
    starts_nothing(system, NOT_THERE)
    assert system.ports["worker"] != taken
    assert f"http://127.0.0.1:{system.ports['worker']}/readyz" in card(system)
    named, option = free_port(), free_port()
    monkeypatch.setenv("PENSTOCK_WORKER__HEALTH_PORT", str(named))
    for port, options in ((named, {}), (option, {"worker_port": option, "config": "[worker]\nhealth_port = 1\n"})):
        system = make(**options)
        system.check()
        assert system.ports["worker"] == port


WORKER = """
import http.server, os
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
try:
    server = http.server.HTTPServer(("127.0.0.1", int(os.environ["PENSTOCK_WORKER__HEALTH_PORT"])), Ready)
except OSError as error:
    print(f"penstock worker: its port cannot be bound ({error.strerror})")
    exit("2026-11-29T23:50:00.269Z INFO penstock.processors.app worker.stopped")
server.serve_forever()
"""
"""Binds the port that it was given, and logs one more line after the reason why it cannot."""


@pytest.fixture
def worker(make: Make, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[LocalSystem, Part]]:
    """A system whose worker is that program and is not started yet."""
    monkeypatch.setattr(local_system, "penstock_command", lambda name: [sys.executable, "-c", WORKER])
    system = make()
    part = system.part("worker", 1.0, os.environ)
    part.backoff = Backoff(first_s=0.05, limit_s=0.05)
    yield system, part
    system.supervisor.kill()


READY = {"GET /readyz": {"status": "ready"}}


def test_a_health_port_is_chosen_right_before_each_start(worker: tuple[LocalSystem, Part]) -> None:
    """It was chosen a minute before the start, and once."""
    system, part = worker
    system.check()
    with scripted_gateway(READY, port=system.ports["worker"]):
        system.supervisor.start(part)
        system.supervisor.wait_ready(part, 20)
    chosen = system.ports["worker"]
    assert part.process is not None
    part.process.kill()
    part.process.wait()
    with scripted_gateway(READY, port=chosen):
        system.supervisor.wait_ready(part, 20)
    assert system.ports["worker"] != chosen
    state = system.home.read()
    assert state is not None
    assert readiness_of_part(state.parts[0]).status == "ready"


def test_another_process_on_the_port_is_not_the_part(
    worker: tuple[LocalSystem, Part], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answered for the worker, which was started again for ever."""
    monkeypatch.setattr(local_system, "port_in_use", lambda port, host: False)
    system, part = worker
    with scripted_gateway(READY, port=system.ports["worker"]) as server:
        system.supervisor.start(part)
        with pytest.raises(CliFailure, match=r"the worker keeps ending while it starts: .*penstock worker: its port"):
            system.supervisor.wait_ready(part, 20)
        state = system.home.read()
        assert state is not None
        found = readiness_of_part(replace(state.parts[0], pid=os.getppid()))
        assert found.text().startswith(f"unreachable: its process (pid {os.getppid()}) does not listen on port")
        assert "Address already in use" in found.text()
        assert server.asked == []


def test_configured_places_hold_and_the_others_are_in_the_data_folder(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {
        ("artifacts", "location"): "artifacts", ("worker", "data_dir"): "worker",
        ("gateway", "view_path"): "gateway/view.sqlite", ("summarizer", "data_dir"): "summarizer",
    }  # fmt: skip
    for (section, name), own in places.items():
        found = make(config=f'[{section}]\n{name} = "/mine"\n').write_settings()
        assert variable(section, name) not in found
        assert make().write_settings()[variable(section, name)] == str(tmp_path / own)
        monkeypatch.setenv(variable(section, name), "/of-mine")
        assert make().write_settings()[variable(section, name)] == "/of-mine"
        monkeypatch.delenv(variable(section, name))
        monkeypatch.setenv(f"PENSTOCK_{section.upper()}", json.dumps({name: "/of-mine"}))
        assert variable(section, name) not in make().write_settings()


def test_models_by_a_variable_are_those_of_the_run(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_MODELS", json.dumps([entry("mine")]))
    system = make()
    assert system.config.models == [entry("mine")]
    assert "PENSTOCK_MODELS" not in system.write_settings(), "the file has them, with those of this run"


def test_configured_models_that_are_not_served_are_named(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    two = "".join(f'[[models]]\nid = "{name}"\nsource = "s"\nengine = "noop"\n' for name in ("a", "b"))
    said: list[str] = []
    make("other", "a", config=two, say=said.append)._say_models()
    assert said == ["--model takes the place of the configured model(s) b"]
    said.clear()
    make("a", "b", {**entry("far"), "pool": "gpu"}, config=two, say=said.append)._say_models()
    assert said == ["models of other pools than the worker's are not served here: far (gpu)"]


def test_the_health_of_a_part_is_asked_where_it_is_bound(make: Make) -> None:
    system = make(config='[worker]\nhealth_host = "127.0.0.2"\nhealth_port = 0\n')
    system.check()
    assert re.fullmatch(r"http://127\.0\.0\.2:[1-9]\d*", system.worker_url)


def test_tiny_models_answer_only_where_no_other_does(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tiny reader of images knows a few words: it answered chats that named no model."""
    monkeypatch.setattr(local_system, "prepare_model", lambda name, progress: tmp_path / name)
    tiny = make(tiny_models=True).tiny_entries()
    assert [one["id"] for one in tiny] == list(local_system.TINY_MODELS)
    assert all(parse_entry(one).priority > ModelEntry.model_fields["priority"].default for one in tiny)
    assert make().tiny_entries() == []


def test_a_data_folder_has_one_owner(tmp_path: Path) -> None:
    first, second = Home(tmp_path), Home(tmp_path)
    first.acquire()
    parts = [PartState(name="worker", pid=78, restarts=0, log="l", ready_url=None)]
    first.write(
        SystemState(
            pid=77, phase="ready", url="http://x", bootstrap_servers="b", models=["m"], started_at=1.0, parts=parts
        )
    )
    assert second.held()
    assert second.read() == first.read()
    with pytest.raises(CliFailure, match=r"already runs on .* \(pid 77, .*penstock down"):
        second.acquire()
    first.release()
    assert (second.held(), second.read()) == (False, None)
    second.acquire()
    second.release()


def test_a_folder_that_cannot_be_made_names_the_option(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CliFailure, match="--data-dir"):
        Home(tmp_path / "file" / "data").acquire()


def test_a_free_port_is_free() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", port := free_port()))
    assert port < 32_768, "an outgoing connection could take it before a broker starts again"


def test_two_processes_never_get_the_same_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "SERVERS_PORTS", (31_000, 31_100))
    command = (
        "from penstock.cli import paths; paths.SERVERS_PORTS = (31_000, 31_100);"
        " print(*(paths.free_port() for _ in range(20)), flush=True); input()"
    )
    other = subprocess.Popen([sys.executable, "-c", command], stdin=PIPE, stdout=PIPE, text=True)
    try:
        assert other.stdout is not None
        theirs = [int(port) for port in other.stdout.readline().split()]
        ours = [free_port() for _ in range(20)]
    finally:
        other.communicate("\n", timeout=20)
    assert len({*ours, *theirs}) == 40


def test_progress_that_cannot_be_written_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Detached, progress goes to a file beside the data, whose disk may be full."""
    full = open("/dev/full", "w", buffering=1)  # noqa: SIM115
    monkeypatch.setattr(sys, "stderr", full)
    try:
        noted("the broker ended")
    finally:
        with suppress(OSError):
            full.close()
