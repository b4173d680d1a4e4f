"""`penstock devices` and `workers`: who is there, and who holds which memory."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from penstock.cli.commands.common import AsJson, Gateway, print_list
from penstock.cli.commands.models import size_text
from penstock.cli.option_groups import App

MEMORY = ("limit", "reserved", "measured", "foreign")


def devices(gateway: Gateway, as_json: AsJson = False) -> None:
    """The devices of all workers: what may be granted, what is, and which models hold it.

    The key needs the scope admin.

    Example: penstock devices --json
    """
    found = gateway.call("GET", "/v1/admin/devices")["data"]
    columns = ["device", *MEMORY, "models"]
    print_list(found, as_json=as_json, columns=columns, row=_device_row, empty="no worker is there")


def _device_row(device: Mapping[str, Any]) -> list[str | None]:
    return [
        f"{device['worker_id']} {device['device']}",
        *(size_text(device[f"{name}_bytes"]) for name in MEMORY),
        ", ".join(f"{one['model']} {size_text(one['bytes'])}" for one in device["holders"] or []),
    ]


app = App(no_args_is_help=True, help="The workers and what they do.")


@app.command("list")
def list_workers(gateway: Gateway, as_json: AsJson = False) -> None:
    """Each worker with its models, queues and work. Example: penstock workers list --json"""
    found = gateway.call("GET", "/v1/admin/stats").get("workers", [])
    columns = ["worker", "state", "models", "queued", "running", "seen"]
    print_list(found, as_json=as_json, columns=columns, row=_row, empty="no workers")


def _row(worker: dict[str, Any]) -> list[Any]:
    return [
        worker["worker_id"],
        worker["state"],
        ", ".join(f"{m['model']} ({m['state']})" for m in worker.get("models", [])),
        " ".join(f"{name}:{count}" for name, count in worker.get("queued", {}).items()),
        worker.get("running"),
        f"{time.time() - datetime.fromisoformat(worker['updated_at']).timestamp():.0f} s ago",
    ]
