"""Runs one stock client against a gateway; prints a line of JSON for each feature and model.

    python docs/clients/check.py http://127.0.0.1:8000/v1 LangChain
    python docs/clients/check.py http://127.0.0.1:8000/v1 "openai (Node)" NODE_FOLDER

`table.py` makes the environments, starts what is asked, and makes the table of docs/clients.md of these lines. Each
model has a name in both worlds: `local` is served by this gateway's own worker, `remote` through another server.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import check_agents
import check_frameworks
import check_openai
from checks import CHECKS, HERE_ONLY, Check

PACKAGES = {
    "openai (Python)": "openai",
    "LangChain": "langchain-openai",
    "LlamaIndex": "llama-index-llms-openai-like",
    "LiteLLM": "litellm",
    "Instructor": "instructor",
    "openai-agents": "openai-agents",
}


def version(client: str, node: Path) -> str:
    if client in PACKAGES:
        return importlib.metadata.version(PACKAGES[client])
    return str(json.loads((node / "node_modules/openai/package.json").read_text())["version"])


def outcome(check: Check, where: str) -> str:
    try:
        found = check(where)
        return "–" if found == HERE_ONLY else "yes" if found else "EMPTY"
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return "refused" if "is not supported" in text else text.replace("\n", " ")[:300]


def main() -> None:
    url, client = sys.argv[1:3]
    folder = Path(sys.argv[3] if len(sys.argv) > 3 else ".")
    os.environ.update(OPENAI_API_KEY="unused", OPENAI_BASE_URL=url, OPENAI_AGENTS_DISABLE_TRACING="1")
    defines: dict[str, Callable[[], None]] = {
        "openai (Python)": check_openai.python,
        "openai (Node)": lambda: check_openai.node(url, folder),
        "LangChain": check_frameworks.langchain,
        "LlamaIndex": check_frameworks.llama_index,
        "LiteLLM": check_frameworks.litellm,
        "Instructor": check_frameworks.instructor,
        "openai-agents": check_agents.openai_agents,
    }
    defines[client]()
    for feature, check in CHECKS[client].items():
        for where in ("local", "remote"):
            told = {"client": client, "version": version(client, folder), "feature": feature, "where": where}
            print(json.dumps({**told, "outcome": outcome(check, where)}, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    main()
