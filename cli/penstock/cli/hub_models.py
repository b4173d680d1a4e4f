"""Models of the hub for tasks that no package carries a model for: what `penstock up --with` adds after asking.

Sizes are of the files that are fetched, and of the memory that an engine takes, about.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import typer

from penstock.cli.failures import CliFailure, ExitCode
from penstock.cli.paths import Progress
from penstock.common.model_entry import PRIORITY


@dataclass(frozen=True, kw_only=True, slots=True)
class HubModel:
    """An entry of `[[models]]`, and what somebody wants to know before it is fetched."""

    id: str
    source: str
    engine: str
    tasks: tuple[str, ...]
    fetches: str
    memory: str
    licence: str
    options: dict[str, Any] = field(default_factory=dict[str, Any])

    def entry(self) -> dict[str, Any]:
        """Loaded when somebody asks for it. A chat that names no model shall not wait for it, nor be answered by it."""
        table = {"id": self.id, "source": self.source, "engine": self.engine, "tasks": list(self.tasks)}
        return {
            **table,
            "preload": False,
            "priority": PRIORITY + 1,
            **({"options": self.options} if self.options else {}),
        }


BUNDLES: dict[str, tuple[HubModel, ...]] = {
    "images": (
        HubModel(
            id="painter",
            source="stable-diffusion-v1-5/stable-diffusion-v1-5",
            engine="diffusers",
            tasks=("image_generation", "image_editing"),
            fetches="2.7 GB",
            memory="4 GB on a GPU, or 7 GB of main memory",
            licence="CreativeML Open RAIL-M",
            options={"variant": "fp16"},
        ),
        HubModel(
            id="eyes",
            source="HuggingFaceTB/SmolVLM-256M-Instruct",
            engine="vision",
            tasks=("image_to_text", "text_generation"),
            fetches="0.5 GB",
            memory="2 GB of either",
            licence="Apache-2.0",
        ),
    )
}


def chosen(names: Sequence[str]) -> list[HubModel]:
    """The models of these bundles. Raises CliFailure (usage) for a name that there is not."""
    for name in names:
        if name not in BUNDLES:
            text = f"--with {name}: there is no such bundle of models; there are: {', '.join(BUNDLES)}"
            raise CliFailure(text, exit_code=ExitCode.USAGE)
    return [model for name in dict.fromkeys(names) for model in BUNDLES[name]]


def agree(models: Sequence[HubModel], *, yes: bool, say: Progress) -> None:
    """Show what would be fetched, and ask. Raises CliFailure where nobody can be asked, or the answer is no."""
    if not models:
        return
    say("from the hub, when they are asked for first:")
    for model in models:
        tasks = ", ".join(model.tasks)
        say(f"  {model.id}: {model.source} ({tasks}): fetches {model.fetches}, takes {model.memory}; {model.licence}")
    if yes:
        return
    if not sys.stdin.isatty():
        raise CliFailure("nobody can be asked here: add --yes to fetch these models", exit_code=ExitCode.USAGE)
    if not typer.confirm("Fetch them, and accept their licences?", err=True):
        raise CliFailure("nothing was started: leave --with out to go on without these models")
