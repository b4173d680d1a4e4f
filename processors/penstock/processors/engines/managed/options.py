"""What the options of a managed server say: its command with the grant filled in, its environment, its health. Pure."""

from __future__ import annotations

import math
import shlex
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.schemas.errors import InvalidRequest

HOST = "127.0.0.1"
PLACEHOLDERS = (
    "memory_fraction",
    "memory_bytes",
    "port",
    "host",
    "device",
    "devices",
    "model",
    "id",
    "slots",
    "threads",
)
OURS = "PENSTOCK_"
"""What begins so in the environment is for Penstock alone: keys of others are there too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ManagedOptions:
    """Times in seconds."""

    command: tuple[str, ...]
    model: str
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    health: str = "/health"
    port: int | None = None
    devices: int = 1
    load_timeout_s: float = 600.0
    grace_s: float = 5.0
    silent_s: float = 60.0
    """A server whose health fails for so long is ended, and one that shows no sign of life while it loads."""


def read_options(model: str, source: str, options: Mapping[str, Any]) -> ManagedOptions:
    """`command` is a list or one line; without it, `source` is the command. Raises InvalidRequest with the cure."""
    command = options.get("command")
    argv = _argv(model, source if command is None else command)
    env = options.get("env", {})
    if not isinstance(env, Mapping):
        raise InvalidRequest(f"{model}: options.env is a table of names and texts", param="models")
    devices = int(options.get("devices", 1))
    if devices < 1:
        raise InvalidRequest(f"{model}: options.devices is the number of its devices, at least 1", param="models")
    health = str(options.get("health", "/health"))
    read = ManagedOptions(
        command=argv,
        model="" if command is None else source,
        env={str(name): str(value) for name, value in env.items()},  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        health=health if health.startswith("/") else f"/{health}",
        port=None if options.get("port") is None else int(options["port"]),
        devices=devices,
        load_timeout_s=float(options.get("load_timeout_s", 600)),
        grace_s=float(options.get("grace_s", 5)),
        silent_s=float(options.get("silent_s", 60)),
    )
    values: dict[str, str] = dict.fromkeys(PLACEHOLDERS, "")  # an unknown name is refused before anything starts
    for text in (*read.command, *read.env.values()):
        fill(model, text, values)
    return read


def _argv(model: str, command: Any) -> tuple[str, ...]:
    try:
        argv = shlex.split(command) if isinstance(command, str) else [str(part) for part in command]
    except (TypeError, ValueError):
        argv = []
    if not argv or not argv[0]:
        raise InvalidRequest(
            f"{model}: a managed model needs a command, as options.command = "
            '["vllm", "serve", "{model}", "--port", "{port}", "--gpu-memory-utilization", "{memory_fraction}"]',
            param="models",
        )
    return tuple(argv)


def fill(model: str, text: str, values: Mapping[str, str]) -> str:
    """The text with its `{names}` replaced; `{{` is a brace. Raises InvalidRequest for a name that there is not."""
    try:
        pieces = list(string.Formatter().parse(text))
    except ValueError as error:
        raise InvalidRequest(
            f"{model}: {text!r} in its command: {error}; write {{{{ for a brace", param="models"
        ) from error
    made = ""
    for literal, name, form, conversion in pieces:
        made += literal
        if name is None:
            continue
        if name not in values or form or conversion:
            known = ", ".join(f"{{{one}}}" for one in PLACEHOLDERS)
            raise InvalidRequest(
                f"{model}: there is no {{{name}}} for its command; there are {known}, and {{{{ for a brace",
                param="models",
            )
        made += values[name]
    return made


def memory_fraction(granted_bytes: int, total_bytes: int) -> str:
    """Of a device's total, rounded down: a server is never configured to take more than its grant.

    Of a device that is not there it is nothing.
    """
    share = min(1.0, granted_bytes / total_bytes) if total_bytes > 0 else 0.0
    return f"{math.floor(share * 10_000) / 10_000:.4f}"


def server_environment(
    ours: Mapping[str, str], devices: Sequence[str], own: Mapping[str, str], addresses: Sequence[str] | None = None
) -> dict[str, str]:
    """The worker's environment without what is Penstock's; of the cards, the server sees only those of its grant.

    `addresses` is what CUDA_VISIBLE_DEVICES must list for `devices`, where numbers do not say it (MIG slices).
    """
    env = {name: value for name, value in ours.items() if not name.startswith(OURS)}
    env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # as NVML counts
    env["CUDA_VISIBLE_DEVICES"] = ",".join(_cards(ours, devices) if addresses is None else addresses)
    return {**env, **own}


def _cards(ours: Mapping[str, str], devices: Sequence[str]) -> list[str]:
    """Entries for `cuda:N`, where N counts what the worker itself sees."""
    numbers = [int(name.partition(":")[2] or 0) for name in devices if name.startswith("cuda")]
    shown = ours.get("CUDA_VISIBLE_DEVICES")
    if shown is None:
        return [str(number) for number in numbers]
    entries = [entry.strip() for entry in shown.split(",")]
    return [entries[number] for number in numbers if number < len(entries)]
