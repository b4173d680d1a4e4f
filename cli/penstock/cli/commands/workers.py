"""`penstock workers`: which workers are there, with what they hold and run."""

from __future__ import annotations

import time
from datetime import datetime

import typer

from penstock.cli.commands.common import DEFAULT_URL, AsJson, Gateway, Key, Url, print_json, print_table

app = typer.Typer(no_args_is_help=True, help="The workers and what they do.")


@app.command("list")
def list_workers(url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> None:
    """Each worker with its models, queues and work. Example: penstock workers list --json"""
    with Gateway(url, key) as gateway:
        found = gateway.call("GET", "/v1/admin/stats").get("workers", [])
    if as_json:
        for worker in found:
            print_json(worker)
        return
    rows = [
        [
            worker["worker_id"],
            worker["state"],
            ", ".join(f"{m['model']} ({m['state']})" for m in worker.get("models", [])),
            " ".join(f"{name}:{count}" for name, count in worker.get("queued", {}).items()),
            worker.get("running"),
            f"{time.time() - datetime.fromisoformat(worker['updated_at']).timestamp():.0f} s ago",
        ]
        for worker in found
    ]
    print_table(["worker", "state", "models", "queued", "running", "seen"], rows, "no workers")
