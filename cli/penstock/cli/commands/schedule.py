"""`penstock bench schedule`: traces replayed over a simulated fleet, by the worker's policy and by simpler ones."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from penstock.cli.commands.common import AsJson, errors, print_json, print_table
from penstock.cli.config import load, use_config
from penstock.cli.failures import CliFailure, ExitCode
from penstock.processors.replay import builtin, figures
from penstock.processors.replay import trace as traces


class BuiltIn(StrEnum):
    """The traces that come along."""

    TURNS = "turns"
    CHAT = "chat"
    BATCH = "batch"


def schedule(
    trace: Annotated[
        list[Path] | None,
        typer.Option(help="Trace to replay, JSON lines; may be given again."),
    ] = None,
    built_in: Annotated[
        list[BuiltIn] | None, typer.Option(help="Only this built-in trace; may be given again.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Another seed for the built-in traces.")] = None,
    scale: Annotated[float, typer.Option(min=0.01, max=10, help="Length of the built-in traces.")] = 1.0,
    write: Annotated[
        Path | None, typer.Option(file_okay=False, help="Write the traces here, as --trace reads them, and end.")
    ] = None,
    fleet: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Take the devices of this penstock.toml ([[devices]]) for the traces' own."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Replay traces over a simulated fleet in virtual time: no Kafka, no GPU, seconds in place of hours.

    Policies: penstock (the worker's own scheduler, memory ledger and placement), fifo (in the order of arrival; who
    is first and whose model is not loaded makes all wait, as Ollama does), strict (the same by class first), and bound,
    what none can beat.

    Columns: switches (loads of a model), makespan_s (first arrival to last end), p95_wait_s by class (arrival to
    start), deadline_misses, utilisation (of the fleet's memory and time).

    A trace is JSON lines. The first is the fleet, bytes and seconds; all others are requests, or what other programs
    use of a device from then on:

    {"trace": "mine", "devices": [{"device": "cuda:0", "kind": "cuda", "total_bytes": 85899345920}],
    "models": [{"model": "a", "bytes": 42949672960, "load_s": 20, "slots": 8}]}

    {"at_s": 0.5, "model": "a", "priority": 1, "run_s": 2.5, "tenant": "t", "ttl_s": 600}

    {"at_s": 60, "device": "cuda:0", "foreign_bytes": 8589934592}

    Example: penstock bench schedule --built-in turns

    Example: penstock bench schedule --write traces; penstock bench schedule --trace traces/chat.jsonl --json

    With --fleet the devices are those that a worker with that configuration would have: its simulated ones, else the
    GPUs of this machine, and main memory.

    Example: penstock bench schedule --fleet penstock.toml --trace mine.jsonl
    """
    chosen = _traces(trace or [], built_in, seed, scale)
    if fleet is not None:
        chosen = _on_fleet(chosen, fleet)
    if write is not None:
        write.mkdir(parents=True, exist_ok=True)
        for one in chosen:
            path = write / f"{one.name}.jsonl"
            path.write_text("".join(f"{line}\n" for line in traces.written(one)))
            typer.echo(f"{path}: {len(one.requests)} requests", err=True)
        return
    rows: list[figures.Row] = []
    with Progress(console=errors, transient=True) as progress:
        bar = progress.add_task("replaying", total=len(chosen))
        for one in chosen:
            progress.update(bar, description=one.name)
            rows += figures.replay(one)
            progress.advance(bar)
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    cells = [
        [
            ", ".join(f"{k} {v:g}" for k, v in row.p95_wait_s.items()) if c == "p95_wait_s" else getattr(row, c)
            for c in figures.COLUMNS
        ]
        for row in rows
    ]
    print_table(figures.COLUMNS, cells, "no trace")
    typer.echo("\n" + figures.plot(rows))


def _traces(files: list[Path], names: list[BuiltIn] | None, seed: int | None, scale: float) -> list[traces.Trace]:
    """The files, and the built-in ones that are named; all built-in ones when nothing is."""
    found = [traces.read(path.read_text().splitlines(), path.stem) for path in files]
    if not files and names is None:
        names = list(BuiltIn)
    seeds = {} if seed is None else {"seed": seed}
    return found + [builtin.TRACES[name.value](scale=scale, **seeds) for name in names or []]


def _on_fleet(chosen: list[traces.Trace], config: Path) -> list[traces.Trace]:
    """The traces on the devices that a worker with this configuration would have."""
    from penstock.processors.models.machine import Machine, UnknownDevice
    from penstock.processors.replay.fleet import on_devices
    from penstock.processors.settings import WorkerSettings

    use_config(config)
    settings = load(WorkerSettings)
    memory = settings.memory
    try:
        machine = Machine(
            settings.devices,
            cpu_bytes=memory.cpu_bytes,
            cpu_reserve_bytes=memory.cpu_reserve_bytes,
            gpu_reserve_bytes=memory.gpu_reserve_bytes,
        )
    except UnknownDevice as error:
        raise CliFailure(str(error), exit_code=ExitCode.USAGE) from error
    return [on_devices(one, machine.capacities, settings.devices) for one in chosen]
