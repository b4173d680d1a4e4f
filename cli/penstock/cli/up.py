"""`penstock up`, `status`, `logs` and `down`: the whole of Penstock on this machine."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import subprocess
import sys
import time
import webbrowser
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from penstock.cli.children import rotate_log, tail
from penstock.cli.commands.common import Key, auth_headers, checked_url
from penstock.cli.config import ClusterSettings, load, use_config
from penstock.cli.config_commands import checked
from penstock.cli.failures import CliFailure, ExitCode
from penstock.cli.hub_models import agree, chosen
from penstock.cli.instances import elsewhere_text
from penstock.cli.local_system import LocalSystem, Options, card, where_models_are
from penstock.cli.log_options import LogOptions
from penstock.cli.ordered import read_orders
from penstock.cli.paths import default_data_dir
from penstock.cli.readiness import Readiness, ask, ask_processes, readiness_of_part
from penstock.cli.run_config import RunConfig
from penstock.cli.state import Home, PartState, SystemState
from penstock.common import log_setup
from penstock.common.orders import in_force, order_lines

logger = logging.getLogger(__name__)

DETACH_DEADLINE_S = 1800.0
DOWN_DEADLINE_S = 150.0
STOP_S = 10.0
"""The bound of a stop, besides the graces of the parts."""

DataDir = Annotated[
    Path | None,
    typer.Option(help="Topics, view, journal, logs (default: PENSTOCK_DATA, ~/.local/share/penstock)."),
]


def up(
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return once it serves; it goes on.")] = False,
    bootstrap_servers: Annotated[
        str | None,
        typer.Option(
            "--bootstrap-servers", "-b", envvar="PENSTOCK_KAFKA__BOOTSTRAP_SERVERS", help="Use this Kafka, run none."
        ),
    ] = None,
    data_dir: DataDir = None,
    model: Annotated[
        str | None, typer.Option(help="The chat model: a hub id, a folder or a .gguf file (default: smollm2-135m).")
    ] = None,
    remote: Annotated[
        str | None, typer.Option(help="Serve through this OpenAI-compatible server instead of loading models.")
    ] = None,
    tiny_models: Annotated[
        bool,
        typer.Option(
            "--tiny-models", help="Add tiny models, made in code, for tasks without a real one: to try every route."
        ),
    ] = False,
    bundles: Annotated[
        list[str] | None,
        typer.Option(
            "--with", help="Add models of the hub for more tasks, after asking: images (generate, edit, describe)."
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Agree to what --with would ask.")] = False,
    port: Annotated[
        int | None,
        typer.Option(envvar="PENSTOCK_GATEWAY__PORT", help="The gateway's port (default: [gateway], else 8000)."),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            envvar="PENSTOCK_GATEWAY__HOST", help="The gateway's address (default: [gateway], else 127.0.0.1)."
        ),
    ] = None,
    kafka_port: Annotated[int | None, typer.Option(help="The embedded broker's port (default: 9092).")] = None,
    worker_port: Annotated[
        int | None,
        typer.Option(help="The port of the worker's health and metrics (default: [worker] health_port, else 8001)."),
    ] = None,
    open_console: Annotated[bool, typer.Option("--open", help="Open the console in a browser once it serves.")] = False,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="penstock.toml for everything else.")] = None,
    *,
    log: LogOptions,
) -> None:
    """Run everything on this machine: a real Kafka, a worker with small real models, the gateway. Ctrl-C stops it.

    With [[queues]] in the configuration also a bridge, which reads those topics of other systems; missing ones are
    created. It is up once every part is ready, and ends with the reason if one does not become so. Webhooks are signed
    by webhooks.secret, else by a secret that is made in the data folder.

    A model that cannot be loaded does not stop the others. With --detach the command then names it with the reason
    and ends with 1, and what is up goes on.

    Examples:

      penstock up

      penstock up --detach --port 8080

      penstock up --model ./my-model.gguf

      penstock up --tiny-models

      penstock up --with images

      penstock up --remote http://127.0.0.1:11434/v1 --model llama3.2

      penstock up --bootstrap-servers kafka-1:9092,kafka-2:9092
    """
    home = Home(data_dir or default_data_dir())
    hub_models = chosen(bundles or [])
    if not is_detached():
        agree(hub_models, yes=yes, say=say)
    if detach:
        start_detached(home)
        return
    found = use_config(config)
    if log.log_section().format == "json":
        log.set_up_logging()
    checked()
    configured = RunConfig(found)
    options = Options(
        data_dir=home.data_dir,
        host=host or configured.value("gateway", "host") or "127.0.0.1",
        port=configured.port(port),
        kafka_port=kafka_port,
        worker_port=worker_port,
        bootstrap_servers=bootstrap_servers or configured.value("kafka", "bootstrap_servers"),
        open_console=open_console,
        model=model,
        remote=remote,
        tiny_models=tiny_models,
        hub_models=hub_models,
        config=found,
    )
    run(LocalSystem(options, noted if is_detached() else say))


def run(system: LocalSystem) -> None:
    """Start the system, keep it up, stop it in order on SIGINT or SIGTERM; a second signal kills at once.

    The stop is bounded: a step of the start can be in a library that does not let the signal interrupt it.
    """
    system.home.acquire()
    supervisor = system.supervisor

    def asked(number: int, frame: FrameType | None) -> None:
        if supervisor.stopping:
            supervisor.kill()
            log_setup.drain()
            os._exit(ExitCode.INTERRUPTED)
        supervisor.stopping = True
        signal.alarm(round(sum(part.grace_s for part in supervisor.parts) + STOP_S))
        if system.phase == "starting":
            # The long steps of the start wait in libraries of others: leave them at once.
            raise StopAsked

    def out_of_time(number: int, frame: FrameType | None) -> None:
        say("Penstock did not stop in time: all parts are killed")
        faulthandler.dump_traceback(all_threads=True)
        supervisor.kill()
        log_setup.drain()
        os._exit(ExitCode.FAILED)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, asked)
    signal.signal(signal.SIGALRM, out_of_time)
    try:
        system.start()
        # Of a detached one the card is shown up to the moment at which it says that it serves.
        say(card(system) + f"  stop  {f'penstock down{system.home.option}' if is_detached() else 'Ctrl-C'}\n")
        system.serves()
        if system.options.open_console:
            webbrowser.open(system.local_url)
        supervisor.run()
    except StopAsked:
        say(f"stopping; the last step of the start was: {system.step}")
    finally:
        supervisor.stopping = True
        system.stop()
        system.home.release()
    say("Penstock has stopped")


class StopAsked(BaseException):
    """A signal came while the system was starting."""


def is_detached() -> bool:
    return os.environ.get("PENSTOCK_DETACHED") == "1"


def start_detached(home: Home) -> None:
    """Run `penstock up` as a process of its own, show its progress, return when it serves."""
    if home.held():
        home.acquire()  # says who runs there
    home.logs.mkdir(parents=True, exist_ok=True)
    log = home.logs / "up.log"
    rotate_log(log)
    arguments = [argument for argument in sys.argv[1:] if argument not in ("--detach", "-d")]
    with log.open("ab") as out:
        shown = out.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock.cli.main", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PENSTOCK_DETACHED": "1", "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
    give_up = time.monotonic() + DETACH_DEADLINE_S
    while time.monotonic() < give_up:
        ended = process.poll() is not None
        state = home.read()
        serves = state is not None and state.pid == process.pid and state.phase == "ready"
        with log.open("rb") as file:  # after it was asked whether it serves: the card is written before it says so
            file.seek(shown)
            text = file.read().decode(errors="replace")
            shown = file.tell()
        typer.echo(text, nl=False, err=True)
        if ended:
            raise typer.Exit(process.returncode or int(ExitCode.FAILED))
        if state is not None and serves:
            if state.failed:
                raise CliFailure(
                    f"{'; '.join(state.failed.values())}. Everything else is up and goes on:"
                    f" `penstock status{home.option}` shows it, `penstock down{home.option}` stops it"
                )
            return
        time.sleep(0.2)
    raise CliFailure(f"Penstock is still starting; see {log}", exit_code=ExitCode.TIMED_OUT)


def status(
    data_dir: DataDir = None,
    url: Annotated[
        str | None, typer.Option("--url", help="Ask this gateway instead of what `penstock up` runs on this machine.")
    ] = None,
    key: Key = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what runs, and what was ordered; with --url what a gateway says of itself.

    Ends with 0 when everything is ready, 1 when something is not or is degraded, 3 when nothing runs.

    Examples:

      penstock status --json

      penstock status --url http://gateway:8000
    """
    if url is not None:
        raise typer.Exit(0 if gateway_status(checked_url(url), key, as_json=as_json) else int(ExitCode.FAILED))
    home = Home(data_dir or default_data_dir())
    state = running(home)
    looked = [(part, readiness_of_part(part)) for part in state.parts]
    parts = [{**asdict(part), "ready": found.serves, "readiness": asdict(found)} for part, found in looked]
    ready = state.phase == "ready" and all(found.status == "ready" for _, found in looked)
    orders = orders_of(home, state)
    if as_json:
        shown = {**asdict(state), "parts": parts, "ready": ready, "orders": orders, "data_dir": str(home.data_dir)}
        typer.echo(json.dumps(shown))
    else:
        whole = "ready" if ready else "not all ready" if state.phase == "ready" else state.phase
        typer.echo(f"{state.url}  {whole}  (pid {state.pid}, up {time.time() - state.started_at:.0f} s)")
        for part, found in looked:
            word = "down, restarting" if part.pid is None else found.status
            restarts = f"  restarts {part.restarts}" if part.restarts else ""
            typer.echo(f"  {part.name:<10} {word:<16} pid {part.pid or '-'}{restarts}")
            if found.status != "ready":
                log = home.logs / ("worker.log" if found.models_without_worker else f"{part.name}.log")
                typer.echo(f"  {'':<10} {found.text()}; log: {log}")
        facts = [("models", models_of(state, looked)), ("kafka", state.bootstrap_servers)]
        for name, text in [*facts, *(("ordered", line) for line in orders), ("data", home.data_dir)]:
            typer.echo(f"  {name:<10} {text}")
    raise typer.Exit(0 if ready else int(ExitCode.FAILED))


def gateway_status(url: str, key: str | None, *, as_json: bool) -> bool:
    """Print what the gateway says of itself; whether it is ready. Raises CliFailure (unreachable)."""
    found = ask(url, headers=auth_headers(key))
    if found.status == "unreachable":
        raise CliFailure(f"no gateway at {url} ({found.reason})", exit_code=ExitCode.UNREACHABLE)
    ready = found.status == "ready"
    lines = [f"{url}  {found.text()}", *(f"  {waiting.text()}" for waiting in found.waiting)]
    if not as_json and (processes := ask_processes(url, auth_headers(key))) is not None:
        lines.append(f"  processes: {processes}")
    typer.echo(json.dumps({"url": url, **asdict(found), "ready": ready}) if as_json else "\n".join(lines))
    return ready


def models_of(state: SystemState, looked: Sequence[tuple[PartState, Readiness]]) -> str:
    """As the worker serves them now; where it does not answer, those that it was started with."""
    answering = (one.ready_url for one, found in looked if one.name == "worker" and found.status != "unreachable")
    url = next(answering, None)
    return ", ".join(state.models) if url is None else where_models_are(url.removesuffix("/readyz"), state.models)


def orders_of(home: Home, state: SystemState) -> list[str]:
    """A line for each order that is in force, or one that says why nobody knows them."""
    written = home.data_dir / "run.toml"
    use_config(written if written.exists() else None)
    found = read_orders(load(ClusterSettings).kafka_settings(state.bootstrap_servers))
    return ["unknown: the broker does not answer"] if found is None else order_lines(in_force(found))


def down(data_dir: DataDir = None) -> None:
    """Stop what `penstock up` started, in order.

    Example:  penstock down
    """
    home = Home(data_dir or default_data_dir())
    if not home.held():
        typer.echo(f"Penstock is not running{elsewhere_text()}")
        return
    state = home.read()
    if state is None:
        raise CliFailure(f"Penstock is only beginning to start on {home.data_dir}: try again in a second")
    os.kill(state.pid, signal.SIGTERM)
    if not home.wait_released(DOWN_DEADLINE_S):
        raise CliFailure(
            f"Penstock (pid {state.pid}) did not stop within {DOWN_DEADLINE_S:.0f} s; `kill -9 {state.pid}` ends it"
            " with all its parts, and what was accepted is kept",
            exit_code=ExitCode.TIMED_OUT,
        )
    typer.echo("Penstock has stopped")


def logs(
    part: Annotated[
        str | None,
        typer.Argument(help="broker, worker, gateway, bridge, webhooks, summarizer or up; all when left out."),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as lines come, until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", help="How many of the last lines.")] = 20,
    data_dir: DataDir = None,
) -> None:
    """Print the logs of the parts.

    Example:  penstock logs worker -f
    """
    home = Home(data_dir or default_data_dir())
    files = sorted(home.logs.glob(f"{part or '*'}.log"))
    if not files:
        raise CliFailure(f"there is no {part or ''} log in {home.logs}: has `penstock up` run with this --data-dir?")
    offsets: dict[Path, int] = {}
    for file in files:
        offsets[file] = file.stat().st_size
        for line in tail(file, lines).splitlines():
            typer.echo(labelled(file, line, many=len(files) > 1))
    while follow:
        time.sleep(0.3)
        for file in files:
            offsets[file] = print_new(file, offsets[file], many=len(files) > 1)


def print_new(file: Path, offset: int, *, many: bool) -> int:
    """Print the whole lines behind `offset`; returns the new offset. A log that was rotated is begun anew."""
    if not file.exists():
        return 0
    if file.stat().st_size < offset:
        offset = 0
    with file.open("rb") as log:
        log.seek(offset)
        text = log.read()
    whole = text[: text.rfind(b"\n") + 1]
    for line in whole.decode(errors="replace").splitlines():
        typer.echo(labelled(file, line, many=many))
    return offset + len(whole)


def labelled(file: Path, line: str, *, many: bool) -> str:
    return f"{file.stem:<8} {line}" if many else line


def running(home: Home) -> SystemState:
    """The state of the system that runs on this folder. Raises CliFailure (unreachable) when none does."""
    state = home.running()
    if state is None:
        raise CliFailure(
            f"Penstock is not running on {home.data_dir}: start it with `penstock up{home.option}`{elsewhere_text()}",
            exit_code=ExitCode.UNREACHABLE,
        )
    return state


def noted(line: str) -> None:
    """Progress into up.log: as the other logs have it, with its time."""
    if log_setup.in_force().format == "json":
        say(line)
        return
    say(f"{datetime.now(UTC).isoformat(timespec='milliseconds').replace('+00:00', 'Z')} {line}")


def say(line: str) -> None:
    """Progress and the card go to stderr: stdout is for data. That may be a file on a full disk, which ends nothing."""
    if log_setup.in_force().format == "json":
        logger.info("%s", line)
        return
    with suppress(OSError):
        typer.echo(line, err=True)
