"""The configuration that `penstock up` was given: the file, and the variables that go before it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from penstock.cli.config import read_toml
from penstock.cli.failures import CliFailure, ExitCode
from penstock.cli.paths import free_port

MODELS = "PENSTOCK_MODELS"


def variable(section: str, name: str) -> str:
    return f"PENSTOCK_{section}__{name}".upper()


class RunConfig:
    """Raises CliFailure for a file that is not valid."""

    def __init__(self, path: Path | None) -> None:
        self.tables = {} if path is None else read_toml(path)

    def value(self, section: str, name: str) -> Any:
        """None if nobody has set it. Its variable goes before one of the whole section, and both before the file."""
        of_section = f"PENSTOCK_{section}".upper()
        try:
            given: Any = json.loads(os.environ.get(of_section) or "{}").get(name)
        except (ValueError, AttributeError):
            raise CliFailure(f"{of_section} must be a JSON object", exit_code=ExitCode.USAGE) from None
        own = os.environ.get(variable(section, name)) or None
        return next((one for one in (own, given) if one is not None), self.tables.get(section, {}).get(name))

    def port(self, asked: int | None) -> int:
        """That of the gateway; 0 means any that is free."""
        named = self.value("gateway", "port") if asked is None else asked
        return 8000 if named is None else int(named) or free_port()

    @property
    def models(self) -> list[dict[str, Any]]:
        if text := os.environ.get(MODELS):
            return json.loads(text)
        return self.tables.get("models", [])

    @property
    def pool(self) -> str | None:
        return self.value("worker", "pool")

    @property
    def keys_file(self) -> str | None:
        """That of the gateway, absolute; None if it asks for no key."""
        named = self.value("auth", "keys_file")
        return str(Path(named).absolute()) if named else None

    def health_host(self, part: str) -> str:
        return self.value(part, "health_host") or "127.0.0.1"

    def unset(self, own: dict[tuple[str, str], Path | str]) -> dict[str, str]:
        """Variables for those of these settings that nobody has set."""
        return {variable(*name): str(value) for name, value in own.items() if self.value(*name) is None}

    def refuse_for_own_kafka(self) -> None:
        """Raises CliFailure for settings that the embedded broker cannot follow."""
        security: dict[str, str] = self.tables.get("kafka", {}).get("security", {})
        if security.get("security.protocol", "PLAINTEXT").upper() != "PLAINTEXT":
            raise CliFailure(
                "[kafka] security is for a Kafka of yours: name it by [kafka] bootstrap_servers or --bootstrap-servers;"
                " the one that `penstock up` runs takes plain connections of this machine alone",
                exit_code=ExitCode.USAGE,
            )
