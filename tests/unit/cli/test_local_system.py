"""What `penstock up` decides by itself: which model, which settings, and one line with the cure for what is wrong."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from penstock.cli import local_system, paths
from penstock.cli.chosen_models import chat_model, remote_model
from penstock.cli.failures import CliFailure, ExitCode
from penstock.cli.local_system import LocalSystem, Options, card
from penstock.cli.paths import free_port
from penstock.cli.state import Home, PartState, SystemState
from penstock.cli.up import noted
from penstock.common.desired import Desired
from penstock.common.model_entry import ModelEntry, parse_entry
from penstock.schemas.desired import MODEL, desired_key, ordered


class Broker:
    """The topic of orders of a test: nothing was ordered, until it is."""

    orders: dict[str, Desired]

    def __init__(self) -> None:
        self.orders = {}

    def order(self, name: str, action: str, kind: str = MODEL, **options: Any) -> None:
        key, revision = desired_key(kind, name, None), len(self.orders)
        former = self.orders[key].state if key in self.orders else None
        state = ordered(former, kind=kind, name=name, pool=None, action=action, now_ms=revision, **options)
        self.orders[key] = Desired(state, revision)


@pytest.fixture(autouse=True)
def broker(monkeypatch: pytest.MonkeyPatch) -> Broker:
    made = Broker()
    monkeypatch.setattr(local_system, "read_orders", lambda settings: made.orders)
    return made


def entry(name: str, **fields: Any) -> dict[str, Any]:
    return {"id": name, "source": "owner/name", "engine": "text", **fields}


def test_the_model_that_is_waited_for_is_the_first_that_is_wanted_now(tmp_path: Path, broker: Broker) -> None:
    """After `models unload` or `remove`, and a restart, it waited ten minutes for what nobody wanted."""
    system = LocalSystem(Options(data_dir=tmp_path), print)
    system.models = [entry("later", preload=False), entry("a"), entry("b"), entry("c")]
    assert system._wanted_model() == "a"
    broker.order("a", "unload")
    assert system._wanted_model() == "b"
    broker.order("b", "remove")
    assert system._wanted_model() == "c"
    broker.order("c", "pause")
    assert system._wanted_model() is None
    system._await_model()  # comes back at once
    broker.order("d", "add", entry=json.dumps(entry("d")))
    assert system._wanted_model() == "d"
    broker.order("a", "load")
    assert system._wanted_model() == "a"


def test_the_card_tells_what_is_served_now(tmp_path: Path, broker: Broker) -> None:
    """It listed models that were removed, omitted those that were added, and said that nothing processed images."""
    system = LocalSystem(Options(data_dir=tmp_path), print)
    imaging = {"id": "imaging", "source": "pillow", "engine": "imaging"}
    system.ports["worker"] = free_port()  # and not where another Penstock of this machine may have its worker
    system.models = [entry("gone"), entry("stays"), imaging]
    broker.order("gone", "remove")
    broker.order("new", "add", entry=json.dumps(entry("new", tasks=["summarization"])))
    text = card(system)
    assert "models  stays, imaging, new" in text
    assert '"model":"stays"' in text
    (lacking,) = re.findall("no model for (.*) \\(", text)
    broker.order("stays", "remove")
    assert "curl" not in card(system), "it shows how to chat, and no model can"
    assert {"image_processing", "summarization", "text_generation", "conversation_items"}.isdisjoint(
        lacking.split(", ")
    )


def test_a_hub_id_a_folder_and_nonsense(tmp_path: Path) -> None:
    assert chat_model("Qwen/Qwen3-0.6B", print) == {
        "id": "qwen3-0.6b",
        "source": "Qwen/Qwen3-0.6B",
        "engine": "text",
        "tasks": ["text_generation"],
        "aliases": ["default"],
    }
    folder = tmp_path / "My Model"
    folder.mkdir()
    with pytest.raises(CliFailure, match=r"no config\.json"):
        chat_model(str(folder), print)
    (folder / "config.json").write_text("{}")
    assert chat_model(str(folder), print)["id"] == "my-model"
    with pytest.raises(CliFailure, match="no such file"):
        chat_model(str(tmp_path / "none.gguf"), print)
    with pytest.raises(CliFailure, match="is no folder") as caught:
        chat_model("???", print)
    assert caught.value.exit_code is ExitCode.USAGE


class Answers(BaseHTTPRequestHandler):
    """Writes JSON, and no log."""

    def answer(self, status: int, body: dict[str, Any]) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, format: str, *args: object) -> None:
        return


class Models(Answers):
    def do_GET(self) -> None:
        names = {"object": "list", "data": [{"id": "llama"}, {"id": "other"}]}
        self.answer(200 if self.path == "/v1/models" else 404, names)


@contextmanager
def answering(handler: type[BaseHTTPRequestHandler]) -> Iterator[int]:
    """A server of such answers; its port."""
    http = HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    try:
        yield http.server_port
    finally:
        http.shutdown()
        thread.join(10)
        http.server_close()


@pytest.fixture
def server() -> Iterator[str]:
    with answering(Models) as port:
        yield f"http://127.0.0.1:{port}"


def test_a_remote_server_names_its_model(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    found = remote_model(f"{server}/v1/", None)
    assert (found["id"], found["source"], found["engine"]) == ("llama", f"{server}/v1", "remote")
    assert remote_model(server, None) == found
    assert remote_model(f"{server}/v1", "mine")["options"] == {"remote_model": "mine"}
    with pytest.raises(CliFailure, match="check the URL") as caught:
        remote_model(f"{server}/elsewhere", None)
    assert caught.value.exit_code is ExitCode.UNREACHABLE


def test_a_port_in_use_is_found_before_anything_is_started(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        system = LocalSystem(Options(data_dir=tmp_path, port=port), print)
        with pytest.raises(CliFailure, match=rf"port {port} is in use: .*--port"):
            system.start()
        assert system.supervisor.parts == []


def started_nothing(system: LocalSystem, reason: str) -> None:
    with pytest.raises(CliFailure, match=reason):
        system.start()
    assert system.supervisor.parts == []


def test_a_model_that_is_not_there_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    def system(**options: Any) -> LocalSystem:
        return LocalSystem(Options(data_dir=tmp_path, port=free_port(), kafka_port=free_port(), **options), print)

    started_nothing(system(model="/nope"), "/nope is no folder")
    started_nothing(system(model="models/none.gguf"), "no such file")
    started_nothing(system(remote=f"http://127.0.0.1:{free_port()}/v1"), "check the URL")
    config = tmp_path / "penstock.toml"
    config.write_text('[[models]]\nid = "mine"\nsource = "/nope"\nengine = "text"\n')
    started_nothing(system(config=config), "the model mine: its source /nope is not there")


def test_the_workers_port_is_the_one_that_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "penstock.toml"
    monkeypatch.delenv("PENSTOCK_CONFIG", raising=False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config.write_text(f"[worker]\nhealth_port = {port}\n")
        options = Options(data_dir=tmp_path, port=free_port(), kafka_port=free_port(), model="/nope", config=config)
        started_nothing(LocalSystem(options, print), f"port {port} for the worker's health is in use")
        monkeypatch.setitem(local_system.HEALTH_PORTS, "worker", port)
        other = LocalSystem(Options(data_dir=tmp_path, port=free_port(), model="/nope"), print)
        started_nothing(other, "is no folder")  # nobody named the port: another one is taken, and shown
        assert other.ports["worker"] != port
        assert f"http://127.0.0.1:{other.ports['worker']}/readyz" in card(other)
    monkeypatch.setenv("PENSTOCK_WORKER__HEALTH_PORT", str(port))
    named = LocalSystem(Options(data_dir=tmp_path, port=free_port(), model="/nope"), print)
    started_nothing(named, "is no folder")
    assert named.ports["worker"] == port
    asked = LocalSystem(Options(data_dir=tmp_path, port=free_port(), config=config, worker_port=free_port()), print)
    asked._check()
    assert asked.ports["worker"] == asked.options.worker_port, "the option wins over the file"


def test_the_bridges_port_matters_only_where_queues_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "penstock.toml"
    monkeypatch.setenv("PENSTOCK_CONFIG", str(config))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        bridge = f"[bridge]\nhealth_port = {port}\n"
        options = Options(data_dir=tmp_path, port=free_port(), kafka_port=free_port(), model="/nope", config=config)
        config.write_text(bridge)
        started_nothing(LocalSystem(options, print), "is no folder")
        config.write_text(f'{bridge}[[queues]]\ntopic = "jobs"\n')
        started_nothing(LocalSystem(options, print), f"port {port} for the bridge's health is in use")


def test_a_place_for_artifacts_that_was_named_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "penstock.toml"
    config.write_text('[artifacts]\nlocation = "s3://bucket/mine"\n')
    found = LocalSystem(Options(data_dir=tmp_path, config=config), print)._write_settings()
    assert found["PENSTOCK_ARTIFACTS__LOCATION"] == "s3://bucket/mine"
    found = LocalSystem(Options(data_dir=tmp_path), print)._write_settings()
    assert found["PENSTOCK_ARTIFACTS__LOCATION"] == str(tmp_path / "artifacts")


def test_tiny_models_answer_where_no_other_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny reader of images knows a few words: it answered chats that named no model."""
    monkeypatch.setattr(local_system, "prepare_model", lambda name, progress: tmp_path / name)
    tiny = LocalSystem(Options(data_dir=tmp_path, tiny_models=True), print)._tiny_models()
    assert [one["id"] for one in tiny] == list(local_system.TINY_MODELS)
    assert all(parse_entry(one).priority > ModelEntry.model_fields["priority"].default for one in tiny)
    assert LocalSystem(Options(data_dir=tmp_path), print)._tiny_models() == []


def test_commands_on_the_card_name_their_instance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my data"
    system = LocalSystem(Options(data_dir=folder), print)
    assert f"penstock logs -f --data-dir '{folder}'" in card(system)
    assert f"penstock status --data-dir '{folder}'" in card(system)
    monkeypatch.setenv("PENSTOCK_DATA", str(folder))
    assert "--data-dir" not in card(system)


def test_the_card_is_short_and_says_what_to_type(tmp_path: Path) -> None:
    system = LocalSystem(Options(data_dir=tmp_path, port=8123), print)
    system.models = [entry("smollm2-135m")]
    text = card(system)
    for word in ("http://127.0.0.1:8123", "curl ", "OpenAI(base_url=", "smollm2-135m", str(tmp_path), "logs"):
        assert word in text
    assert len(text.splitlines()) < 14


@pytest.mark.parametrize("by_variable", [False, True])
def test_where_keys_are_asked_for_the_card_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_variable: bool
) -> None:
    """What it told to type was answered with 401."""
    config = tmp_path / "penstock.toml"
    config.write_text("" if by_variable else '[auth]\nkeys_file = "keys.json"\n')
    if by_variable:
        monkeypatch.setenv("PENSTOCK_AUTH__KEYS_FILE", "keys.json")
    system = LocalSystem(Options(data_dir=tmp_path, config=config), print)
    system.models = [entry("m")]
    text = card(system)
    assert "authorization: Bearer KEY" in text
    assert 'api_key="KEY"' in text
    assert "--key KEY" in text


class Asked(Answers):
    """A gateway that wants a key, and a worker that loads its model the third time it is asked."""

    looked = 0

    def do_GET(self) -> None:
        if self.path == "/v1/models?task=all":
            self.answer(401, {})
        else:
            Asked.looked += 1
            self.answer(200, {"ready": True, "models": {"m": "ready" if Asked.looked > 2 else "loading"}})


def test_the_first_model_is_waited_for_though_the_gateway_wants_keys(tmp_path: Path) -> None:
    with answering(Asked) as port:
        system = LocalSystem(Options(data_dir=tmp_path, port=port), print)
        system.ports["worker"] = port
        system.models = [entry("later", preload=False), entry("m")]
        system._await_model()
        assert Asked.looked == 3
        system.models = system.models[:1]
        system._await_model()
        assert Asked.looked == 3, "nobody waits for what is loaded when it is asked for"


class Fails(Answers):
    """A gateway whose model fails, is tried again once, and then stays failed."""

    looked = 0

    def do_GET(self) -> None:
        if self.path == "/readyz":
            self.answer(200, {"status": "degraded", "reason": "m could not be loaded (its folder is empty)"})
            return
        Fails.looked += 1
        state = "loading" if Fails.looked == 2 else "failed"
        self.answer(200, {"data": [{"id": "m", "state": state, "created": 1 << 40}]})


def test_a_model_that_stays_failed_is_named_with_its_reason_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_system, "FAILED_S", 0.1)
    with answering(Fails) as port:
        said: list[str] = []
        system = LocalSystem(Options(data_dir=tmp_path, port=port), said.append)
        system.models = [entry("m"), entry("other")]
        system._await_model()
        assert Fails.looked > 3, "the first failure is tried again"
        reason = f"m could not be loaded (its folder is empty) (log: {tmp_path}/logs/worker.log)"
        assert (system.failed, said) == ({"m": reason}, [f"{reason}; asking for it tries again"])
        text = card(system)
        assert "Penstock is up without the model m: " in text
        assert " --model other\n" in text
        assert '"model":"other"' in text
        system.models = [entry("m")]
        assert "curl" not in card(system)


def test_a_data_folder_belongs_to_one(tmp_path: Path) -> None:
    first, second = Home(tmp_path), Home(tmp_path)
    first.acquire()
    first.write(
        SystemState(
            pid=77,
            phase="ready",
            url="http://127.0.0.1:1",
            bootstrap_servers="b",
            models=["m"],
            started_at=1.0,
            parts=[PartState(name="worker", pid=78, restarts=0, log="l", ready_url=None)],
        )
    )
    assert second.held()
    assert second.read() == first.read()
    with pytest.raises(CliFailure, match=r"already runs on .* \(pid 77, .*penstock down"):
        second.acquire()
    first.release()
    assert not second.held()
    assert second.read() is None
    second.acquire()
    second.release()


def test_a_folder_that_cannot_be_made_names_the_option(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CliFailure, match="--data-dir"):
        Home(tmp_path / "file" / "data").acquire()


def test_a_free_port_is_free() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", port := free_port()))
    assert port < 32_768, "a broker that starts again would find it taken by an outgoing connection"


def test_two_processes_never_get_the_same_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both found it free before either had bound it, and one's clients asked the other's server."""
    monkeypatch.setattr(paths, "SERVERS_PORTS", (31_000, 31_100))
    command = (
        "from penstock.cli import paths; paths.SERVERS_PORTS = (31_000, 31_100);"
        " print(*(paths.free_port() for _ in range(20)), flush=True); input()"
    )
    other = subprocess.Popen([sys.executable, "-c", command], stdin=PIPE, stdout=PIPE, text=True)
    try:
        assert other.stdout is not None
        theirs = {int(port) for port in other.stdout.readline().split()}
        ours = [free_port() for _ in range(20)]
    finally:
        other.communicate("\n", timeout=20)
    assert len(theirs) == 20
    assert len({*ours, *theirs}) == 40


class Ready(Answers):
    """A worker's /readyz."""

    def do_GET(self) -> None:
        states = {"chat": "ready", "drawing": "loading", "elsewhere": "ready", "idle": "absent"}
        self.answer(200, {"models": states, "devices": {"chat": ["cuda:0", "cuda:1"], "elsewhere": []}})


def test_the_card_says_where_the_models_are(tmp_path: Path) -> None:
    with answering(Ready) as port:
        system = LocalSystem(Options(data_dir=tmp_path), print)
        system.ports["worker"] = port
        system.models = [entry(name) for name in ("chat", "drawing", "elsewhere", "idle", "new")]
        where = "chat (on cuda:0 cuda:1), drawing (loading), elsewhere, idle (loaded when asked for)"
        assert where in card(system)
    assert "models  chat, drawing, elsewhere, idle, new" in card(system), "a worker that does not answer"


def test_a_disk_that_takes_no_line_of_progress_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Detached, progress goes to a file beside the data."""
    full = open("/dev/full", "w", buffering=1)  # noqa: SIM115
    monkeypatch.setattr(sys, "stderr", full)
    try:
        noted("the broker ended")
    finally:
        with suppress(OSError):
            full.close()
