"""Runs one stock client against a gateway; prints a line of JSON for each feature and model.

    python docs/clients/check.py http://127.0.0.1:8000/v1 LangChain
    NODE_FOLDER=… python docs/clients/check.py http://127.0.0.1:8000/v1 "openai (Node)"

`table.py` makes the environments, starts what is asked, and makes the table of docs/clients.md of these lines. Each
model has a name in both worlds: `local` is served by this gateway's own worker, `remote` through another server.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable

import check_agents
import check_frameworks
import check_langchain
import check_node
import check_openai
import check_programs
from checks import CHECKS, HERE_ONLY, Check

CLIENTS: dict[str, tuple[str, Callable[[], None]]] = {
    "openai (Python)": ("openai", check_openai.python),
    "openai (Node)": ("openai", check_node.node),
    "LangChain": ("langchain-openai", check_langchain.langchain),
    "LlamaIndex": ("llama-index-llms-openai-like", check_frameworks.llama_index),
    "LiteLLM": ("litellm", check_frameworks.litellm),
    "Haystack": ("haystack-ai", check_frameworks.haystack),
    "Instructor": ("instructor", check_frameworks.instructor),
    "openai-agents": ("openai-agents", check_agents.openai_agents),
    "pydantic-ai": ("pydantic-ai-slim", check_agents.pydantic_ai),
    "smolagents": ("smolagents", check_agents.smolagents),
    "CrewAI": ("crewai", check_agents.crewai),
    "DSPy": ("dspy", check_agents.dspy),
    "aider": ("aider-chat", check_programs.aider),
    "llm": ("llm", check_programs.llm),
}
"""The package that has each client's version, and what registers its checks."""


def version(client: str) -> str:
    if client == check_node.NODE:
        return check_node.version()
    return importlib.metadata.version(CLIENTS[client][0])


def outcome(check: Check, where: str) -> str:
    try:
        with contextlib.redirect_stdout(sys.stderr):  # some clients print
            found = check(where)
        return "–" if found == HERE_ONLY else "yes" if found else "EMPTY"
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return "refused" if "is not supported" in text else text.replace("\n", " ")[:300]


def main() -> None:
    url, client = sys.argv[1:3]
    os.environ.update(OPENAI_API_KEY="unused", OPENAI_BASE_URL=url, OPENAI_AGENTS_DISABLE_TRACING="1")
    CLIENTS[client][1]()
    for feature, check in CHECKS[client].items():
        for where in ("local", "remote"):
            told = {"client": client, "version": version(client), "feature": feature, "where": where}
            print(json.dumps({**told, "outcome": outcome(check, where)}, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    main()
