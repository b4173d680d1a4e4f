"""Environments of the stock clients for `table.py`: made once in the user's cache, apart from Penstock's own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.cli.paths import cache_dir, exclusive

PYTHON: dict[str, tuple[str, ...]] = {
    # One environment for each client: they ask for different releases of openai, and pip would search for hours.
    "openai (Python)": ("openai",),
    "LangChain": ("langchain-openai",),
    "LlamaIndex": ("llama-index-llms-openai-like", "llama-index-embeddings-openai-like"),
    "LiteLLM": ("litellm", "mcp"),
    "Haystack": ("haystack-ai",),
    "Instructor": ("instructor",),
    "openai-agents": ("openai-agents",),
    "pydantic-ai": ("pydantic-ai-slim[openai]",),
    "smolagents": ("smolagents[openai]",),
    "CrewAI": ("crewai",),
    "DSPy": ("dspy[numpy]",),
    "aider": ("aider-chat",),
    "llm": ("llm",),
}
NODE = ("openai", "zod")


def python_environment(name: str) -> Path:
    """The Python of a client's environment with the newest releases of its clients. Raises CalledProcessError."""

    def make(folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--upgrade", "pip"], check=True)  # what comes with Python resolves slowly
        subprocess.run([*pip, *PYTHON[name]], check=True)

    return _made("python", PYTHON[name], make) / "bin" / "python"


def node_folder() -> Path:
    """A folder in whose `node_modules` openai for Node is. Raises CalledProcessError."""

    def make(folder: Path) -> None:
        folder.mkdir(parents=True)
        options = ["--no-audit", "--no-fund", "--ignore-scripts"]
        subprocess.run(["npm", "install", "--prefix", str(folder), *options, *NODE], check=True)

    return _made("node", NODE, make)


def _made(name: str, packages: Sequence[str], make: Callable[[Path], None]) -> Path:
    """The folder that `make` fills, once. Remove it from the cache to get newer releases."""
    folder = cache_dir() / "clients" / f"{name}-{'-'.join(packages)}"
    with exclusive(folder.with_suffix(".lock")):
        done = folder / ".installed"
        if not done.exists():
            print(f"installing {', '.join(packages)} into {folder}", file=sys.stderr, flush=True)
            shutil.rmtree(folder, ignore_errors=True)
            make(folder)
            done.touch()
    return folder
