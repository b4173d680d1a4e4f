"""`penstock bench`: a load generator against a running gateway: rate or concurrency, priorities, table, plot."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.progress import Progress

from penstock.cli.commands.common import (
    AsJson,
    BuiltTask,
    Gateway,
    auth_headers,
    errors,
    print_json,
    print_table,
)
from penstock.cli.commands.fault_table import faults
from penstock.cli.commands.submitting import MaxTokens
from penstock.cli.failures import CliFailure, ExitCode
from penstock.cli.option_groups import with_fields
from penstock.schemas.topics import priority_class

CLASSES = ("high", "medium", "low")

app = typer.Typer()
app.command("faults")(faults)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One request as its client saw it; `started_s` since the run began."""

    klass: str
    started_s: float
    latency_ms: float
    status: str


@dataclass(kw_only=True)
class Load:
    """What to send and how; the same seed sends the same mix."""

    rate: Annotated[float | None, typer.Option(help="Requests per second, open loop; without it --concurrency.")] = None
    concurrency: Annotated[int, typer.Option(min=1, help="Clients that each wait for their answer.")] = 8
    duration: Annotated[float, typer.Option(min=0.1, help="Seconds of sending.")] = 10
    task: Annotated[BuiltTask, typer.Option(help="What to ask for.")] = BuiltTask.TEXT_GENERATION
    model: Annotated[str | None, typer.Option(help="Model id or alias; without it the best for the task.")] = None
    prompt: Annotated[str, typer.Option(help="What each request says.")] = "Say a word about rivers."
    max_tokens: MaxTokens = 16
    priorities: Annotated[str, typer.Option(help="Mix of priorities with shares.")] = "1:1,5:1,9:1"
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait for each outcome.")] = 300

    def __post_init__(self) -> None:
        self.mix = parse_priorities(self.priorities)
        self.samples: list[Sample] = []
        self.random = random.Random(0)

    def body(self) -> tuple[str, dict[str, Any]]:
        numbers, weights = zip(*self.mix, strict=True)
        priority = self.random.choices(numbers, weights)[0]
        payload: dict[str, Any] = (
            {"input": self.prompt}
            if self.task is BuiltTask.EMBEDDING
            else {"messages": [{"role": "user", "content": self.prompt}], "max_tokens": self.max_tokens}
        )
        body = {"task": self.task, "model": self.model, "priority": priority, "payload": payload}
        return priority_class(priority), body


def parse_priorities(text: str) -> list[tuple[int, float]]:
    """`1:10,5:60,9:30`: priority and its share of the mix; a bare number has share 1."""
    try:
        pairs = [[*part.split(":"), "1"][:2] for part in text.split(",")]
        found = [(int(priority), float(share)) for priority, share in pairs]
    except ValueError:
        found = []
    if not found or any(share <= 0 or priority < 0 for priority, share in found):
        raise CliFailure(f"--priorities {text}: write it like 1:10,5:60,9:30", exit_code=ExitCode.USAGE)
    return found


async def one(load: Load, http: httpx.AsyncClient, began: float) -> None:
    klass, body = load.body()
    started = time.perf_counter()
    try:
        accepted = await http.post("/v1/requests", json=body)
        status = "refused" if accepted.is_error else "accepted"
        give_up = time.perf_counter() + load.timeout
        while status not in ("completed", "failed", "cancelled", "expired", "dead_lettered", "refused"):
            if time.perf_counter() > give_up:
                status = "timed_out"
                break
            found = (await http.get(f"/v1/requests/{accepted.json()['request_id']}", params={"wait": 30})).json()
            status = found.get("status", "refused")
    except httpx.HTTPError:
        status = "unreachable"
    ended = time.perf_counter()
    load.samples.append(
        Sample(klass=klass, started_s=started - began, latency_ms=1000 * (ended - started), status=status)
    )


async def generate(load: Load, url: str, headers: dict[str, str], progress: Progress) -> float:
    """Runs the load to its end; returns the seconds that it took until the last outcome."""
    bar = progress.add_task("sending", total=load.duration)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60, limits=limits, trust_env=False) as http:
        began = time.perf_counter()

        def elapsed() -> float:
            now = time.perf_counter() - began
            progress.update(bar, completed=min(now, load.duration), description=f"{len(load.samples)} done")
            return now

        async def closed_loop() -> None:
            while elapsed() < load.duration:
                await one(load, http, began)

        if load.rate is None:
            await asyncio.gather(*(closed_loop() for _ in range(load.concurrency)))
        else:  # open loop: a slow answer does not hold back the next request, so that waiting shows in the figures
            tasks: list[asyncio.Task[None]] = []
            for number in range(int(load.rate * load.duration)):
                await asyncio.sleep(max(0.0, began + number / load.rate - time.perf_counter()))
                tasks.append(asyncio.create_task(one(load, http, began)))
                elapsed()
            await asyncio.gather(*tasks)
        return time.perf_counter() - began


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def summarize(samples: Sequence[Sample], elapsed_s: float) -> list[dict[str, Any]]:
    """One row for each class that was sent, and one for all: counts, rate and latencies of what completed."""
    rows: list[dict[str, Any]] = []
    for name in (*CLASSES, "all"):
        chosen = [s for s in samples if name in (s.klass, "all")]
        done = [s.latency_ms for s in chosen if s.status == "completed"]
        if not chosen:
            continue
        row: dict[str, Any] = {"class": name, "sent": len(chosen), "completed": len(done)}
        row["other"] = {s: sum(x.status == s for x in chosen) for s in {x.status for x in chosen} - {"completed"}}
        row["per_s"] = round(len(done) / elapsed_s, 1)
        row |= {f"p{int(q * 100)}_ms": round(percentile(done, q), 1) if done else None for q in (0.5, 0.95, 0.99)}
        rows.append(row)
    return rows


def plot(samples: Sequence[Sample], path: Path) -> None:
    """Latencies by class: over the run, and as cumulative shares. Needs the extra `bench`."""
    try:
        import matplotlib
    except ImportError as error:
        raise CliFailure("the plot needs matplotlib: install penstock[bench]") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as pyplot

    figure, (over_time, shares) = pyplot.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    colours = {"high": "#c0392b", "medium": "#2471a3", "low": "#7d8a95"}
    for name in CLASSES:
        done = [s for s in samples if s.klass == name and s.status == "completed"]
        if not done:
            continue
        over_time.scatter([s.started_s for s in done], [s.latency_ms for s in done], s=8, c=colours[name], label=name)
        ordered = sorted(s.latency_ms for s in done)
        shares.plot(ordered, [(n + 1) / len(ordered) for n in range(len(ordered))], c=colours[name], label=name)
    over_time.set(xlabel="submitted at (s)", ylabel="submit to outcome (ms)", yscale="log", title="Latency by class")
    shares.set(xlabel="submit to outcome (ms)", ylabel="share of requests", xscale="log", title="Cumulative")
    for axes in (over_time, shares):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


@app.callback(invoke_without_command=True)
@with_fields
def bench(
    context: typer.Context,
    load: Load,
    gateway: Gateway,
    png: Annotated[Path | None, typer.Option("--plot", help="Write a PNG of the latencies by class.")] = None,
    as_json: AsJson = False,
) -> None:
    """Send load to a running gateway and print latencies by class.

    Example: penstock bench --rate 20 --duration 30 --priorities 1:10,5:60,9:30 --plot latencies.png
    """
    if context.invoked_subcommand is not None:
        return
    gateway.call("GET", "/healthz")  # one clear line now rather than thousands of failed requests
    with Progress(console=errors, transient=True) as progress:
        elapsed_s = asyncio.run(generate(load, gateway.base_url, auth_headers(gateway.key), progress))
    rows = summarize(load.samples, elapsed_s)
    if as_json:
        print_json({"elapsed_s": round(elapsed_s, 2), "classes": rows})
    else:
        columns = ["class", "sent", "completed", "other", "per_s", "p50_ms", "p95_ms", "p99_ms"]
        cells = [
            [", ".join(f"{n} {s}" for s, n in r["other"].items()) if c == "other" else r[c] for c in columns]
            for r in rows
        ]
        print_table(columns, cells, "nothing was sent")
    if png is not None:
        plot(load.samples, png)
        typer.echo(f"plot: {png}", err=True)
    if any(sample.status != "completed" for sample in load.samples):
        raise CliFailure("not every request completed; see the column `other`")
