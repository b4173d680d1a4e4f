"""Checks of openai for Node, which check.mjs does."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from checks import AGENT, BATCHES, PICTURES, UNKNOWN, Check, embedding, of, png, text

NODE = "openai (Node)"
FOLDER = "NODE_FOLDER"
"""The variable with the folder in whose `node_modules` the client is."""


def version() -> str:
    return str(json.loads(Path(os.environ[FOLDER], "node_modules/openai/package.json").read_text())["version"])


def node() -> None:
    script = Path(__file__).with_name("check.mjs")

    def check(feature: str) -> Check:
        def run(where: str) -> str:
            model = embedding(where) if feature.startswith("embeddings") else text(where)
            command = ["node", str(script), os.environ["OPENAI_BASE_URL"], feature, model, where]
            picture = PICTURES.get(feature, png())  # on standard input: 5 MB are too many for a variable
            done = subprocess.run(command, cwd=os.environ[FOLDER], capture_output=True, check=False, input=picture)
            if done.returncode:
                raise RuntimeError(done.stderr.decode()[-300:])
            return done.stdout.decode().strip()

        return run

    for feature in (
        "chat", "stream", "tools", AGENT, "tools, streamed", "JSON schema", "n, logprobs", UNKNOWN, "responses",
        "responses, streamed", "background", "prompt lists, echo, logprobs", "embeddings", BATCHES, "images",
        "image edits", *PICTURES,
    ):  # fmt: skip
        of(NODE, feature)(check(feature))
