"""How to install one more room of Penstock, from where this installation came."""

from __future__ import annotations

import json
import shlex
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from penstock.cli.failures import CliFailure, ExitCode


@contextmanager
def importing(room: str) -> Generator[None]:
    """Around the imports of a room, which may not be installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        text = f"the {room} is not installed here (no module {error.name}): {install_command(room)}"
        raise CliFailure(text, exit_code=ExitCode.USAGE) from error


def install_command(extra: str) -> str:
    """A command that adds the extra to this installation. Penstock is on no public index: a bare name finds nothing."""
    try:
        written = distribution("penstock").read_text("direct_url.json")
    except PackageNotFoundError:
        written = None
    return command_from(None if written is None else json.loads(written), extra)


def command_from(origin: Mapping[str, Any] | None, extra: str) -> str:
    """The command by what installers write of the origin (PEP 610); None for a package of an index. Pure."""
    if origin is None:
        return f"pip install 'penstock[{extra}]'"
    url = str(origin["url"])
    if "dir_info" not in origin:
        return f"pip install 'penstock[{extra}] @ {url}'"
    folder = Path(unquote(urlsplit(url).path))
    editable = "-e " if origin["dir_info"].get("editable") else ""
    return f"pip install {editable}{shlex.quote(f'{folder}[{extra}]')}"
