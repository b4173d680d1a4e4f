"""Which models `penstock up` serves: what was named is checked early, and made into `[[models]]` entries."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from penstock.cli.assets import ASSETS, prepare_gguf, prepare_model
from penstock.cli.failures import CliFailure, ExitCode
from penstock.cli.paths import Progress


def check_chat_model(name: str) -> None:
    """Raises CliFailure (usage) for what cannot be a chat model; the hub is not asked."""
    path = Path(name).expanduser()
    if name in ASSETS or is_hub_id(name):
        return
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise CliFailure(f"no such file: {path}", exit_code=ExitCode.USAGE)
    elif not path.is_dir():
        raise CliFailure(
            f"--model {name} is no folder, no .gguf file, no hub id (owner/name) and none of {', '.join(ASSETS)}",
            exit_code=ExitCode.USAGE,
        )
    elif not (path / "config.json").is_file():
        raise CliFailure(f"{path} holds no config.json: --model wants a model's folder", exit_code=ExitCode.USAGE)


def check_source(model: Mapping[str, Any]) -> None:
    """Raises CliFailure (usage) for a `[[models]]` entry whose folder or file is not there."""
    source = str(model.get("source", ""))
    if model.get("engine") not in ("text", "embedding") or is_hub_id(source):
        return
    if not Path(source).expanduser().exists():
        name = model.get("id")
        raise CliFailure(f"the model {name}: its source {source} is not there", exit_code=ExitCode.USAGE)


def is_hub_id(name: str) -> bool:
    """Whether it has the form owner/name, and nothing of that name lies here."""
    form = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) is not None
    return form and not name.lower().endswith(".gguf") and not Path(name).exists()


def chat_model(name: str, progress: Progress) -> dict[str, Any]:
    """The `[[models]]` entry of a chat model named as an id of ours, a folder, a GGUF file or a hub id."""
    check_chat_model(name)
    path = Path(name).expanduser()
    if name in ASSETS:
        return ASSETS[name].model_table(prepare_model(name, progress))
    if is_hub_id(name):
        progress(f"the model {name} comes from the hub; the worker fetches it when it is not in its cache")
        return _text_model(model_id(name.rpartition("/")[2]), name)
    if path.suffix.lower() == ".gguf":
        return _text_model(model_id(path.stem), str(prepare_gguf(path, progress)))
    return _text_model(model_id(path.absolute().name), str(path.absolute()))


def _text_model(identity: str, source: str) -> dict[str, Any]:
    tasks, aliases = ["text_generation"], ["default"]
    return {"id": identity, "source": source, "engine": "text", "tasks": tasks, "aliases": aliases}


def model_id(name: str) -> str:
    return re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-")


def remote_model(url: str, model: str | None) -> dict[str, Any]:
    """The `[[models]]` entry of an OpenAI-compatible server; its first model unless one is named.

    Raises CliFailure when the server does not answer.
    """
    base = url.rstrip("/").removesuffix("/v1") + "/v1"
    if not base.startswith(("http://", "https://")):
        raise CliFailure(
            f"--remote {url}: give the server's URL, as http://127.0.0.1:11434/v1", exit_code=ExitCode.USAGE
        )
    key = os.environ.get("OPENAI_API_KEY")
    if model is None:
        offered = _remote_models(base, key)
        model = offered[0]
    options: dict[str, Any] = {"remote_model": model}
    if key:
        options["api_key_env"] = "OPENAI_API_KEY"
    return {
        "id": model,
        "source": base,
        "engine": "remote",
        "tasks": ["text_generation", "embedding"],
        "aliases": ["default"],
        "options": options,
    }


def _remote_models(base: str, key: str | None) -> Sequence[str]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.get(f"{base}/models", headers=headers, timeout=10)
        answer.raise_for_status()
        found = [str(entry["id"]) for entry in answer.json()["data"]]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise CliFailure(
            f"{base}/models does not answer as an OpenAI-compatible server does ({error}): check the URL,"
            " set OPENAI_API_KEY if it wants a key, or name the model with --model",
            exit_code=ExitCode.UNREACHABLE,
        ) from error
    if not found:
        raise CliFailure(f"{base} offers no model: load one there, or name it with --model")
    return found
