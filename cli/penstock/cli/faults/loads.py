"""What the requests of a row ask for, with the texts that must come of them, and the models that answer."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.cli.assets import ASSETS, prepare_model
from penstock.cli.faults.clients import KINDS, Asked
from penstock.cli.faults.matrix import Plan
from penstock.cli.makers.tiny_lm import ANIMALS, COLORS, NAMES

MODEL = "mass"
REFERENCE = "reference"
"""The same real model under another name, which writes the texts down before the load."""
TINY = "tiny-lm"
_PIECE_CHARS = 16
"""Of the no-op engine's echo."""
_LARGE_CHARS, _LARGE_TOKENS, _LENGTHS = 4_096, 65, 16
"""The shortest output is just over the 256 KiB above which one goes to the store; there are so many lengths."""
_STORIES = 64
_PREFERENCE = 6.0
"""Added to the logits of a story's words: enough for each to be chosen, too little for one to stand anywhere else."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """One row's requests. `faults`: of the worker's first life."""

    models: list[dict[str, Any]]
    asked: list[Asked]
    faults: str = ""
    prompts: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Fields of requests whose texts REFERENCE writes before the load."""


def load_of(plan: Plan, count: int, url: str, chance: random.Random) -> Load:
    """`url`: of the server of others, and of the receiver of webhooks."""
    faults = {
        "accepted": "stop:intake",
        "result_commit": f"stop:before_commit@{chance.randint(1, 1 + count // 10)}",
    }.get(plan.moment, "")
    if plan.control == "planted bug":
        faults = "plant:commit_first"
    preload = plan.moment != "loading"
    if plan.row == "engine":
        folder = prepare_model(TINY)
        model = ASSETS[TINY].model_table(folder)
        models = [{**model, "id": MODEL, "preload": preload}, {**model, "id": REFERENCE, "preload": False}]
        prompts = _stories(folder)[:count]
        asked = [_asked(number, prompts[number % len(prompts)], "", plan, url) for number in range(count)]
        return Load(models=models, asked=asked, faults=faults, prompts=prompts)
    if plan.moment == "retry_wait":
        # Longer than it takes until each was refused once: attempts that are made again come before first ones.
        wait_s = max(6.0, 0.03 * count)
        again = {"backoff": "fixed", "first_s": wait_s, "longest_s": wait_s}
        model = {"engine": "remote", "source": url, "options": {"slots": 64}, "retries": again}
    elif plan.row == "store":
        tokens = _LARGE_TOKENS + _LENGTHS
        model = _noop(tokens=tokens, chars=_LARGE_CHARS, delay_ms=_delay_ms(count), slots=2 * count)
    elif plan.moment == "loading":
        # The load lasts until all requests are acknowledged.
        model = _noop(echo=True, delay_ms=5, slots=256, load_ms=8_000 + 20 * count)
    else:
        model = _noop(echo=True, **_PACES.get(plan.moment, {"delay_ms": _delay_ms(count), "slots": 2 * count}))
    model = {**model, "id": MODEL, "tasks": ["text_generation"], "preload": preload}
    make = _large if plan.row == "store" else _echoed
    return Load(models=[model], asked=[make(number, plan, url) for number in range(count)], faults=faults)


_PACES: dict[str, dict[str, Any]] = {
    "queued": {"delay_ms": 20, "slots": 4},
    "result_commit": {"delay_ms": 20, "slots": 256},
    "webhook": {"delay_ms": 20, "slots": 256},
}
"""Of the no-op engine, where it is not to last."""


_PIECES = {"mid_stream": 60, "drain": 60}
"""Where streams are to last: all have begun before the first has ended."""


def _delay_ms(count: int) -> int:
    """A stream lasts for 15 s at least, and all together make 1,000 pieces a second at most.

    With half of this pace 900 of 1,000 streams had ended on two cores before the last had begun.
    """
    return max(250, count)


def _noop(**options: Any) -> dict[str, Any]:
    return {"engine": "noop", "source": "noop", "options": options}


def _echoed(number: int, plan: Plan, url: str) -> Asked:
    text = f"request {number} says: " + " ".join(f"{number}.{word}" for word in range(300))
    text = text[: _PIECES.get(plan.moment, 20) * _PIECE_CHARS]
    return _asked(number, {"payload": {"prompt": text}}, text, plan, url)


def _large(number: int, plan: Plan, url: str) -> Asked:
    """Of different lengths, so that one in place of another is seen."""
    tokens = _LARGE_TOKENS + number // len(KINDS) % _LENGTHS
    text = "".join(f"word{word} ".ljust(_LARGE_CHARS) for word in range(tokens))
    return _asked(number, {"payload": {"prompt": f"{number}", "max_tokens": tokens}}, text, plan, url)


def _stories(folder: Path) -> list[dict[str, Any]]:
    """Stories of different animals, colours and names. Left alone the model tells nearly everybody the same one."""
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    payload = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 80, "temperature": 0}
    stories: list[dict[str, Any]] = []
    for number in range(_STORIES):
        words = ANIMALS[number // len(COLORS)], COLORS[number % len(COLORS)], NAMES[number % len(NAMES)]
        bias = {vocabulary[f"Ġ{word}"]: _PREFERENCE for word in words if f"Ġ{word}" in vocabulary}
        stories.append({"payload": payload, "extra": {"logit_bias": json.dumps(bias)}})
    return stories


def _asked(number: int, fields: dict[str, Any], text: str, plan: Plan, url: str) -> Asked:
    body: dict[str, Any] = {"task": "text_generation", "model": MODEL, **fields}
    if number % 10 == 0 or plan.moment == "webhook":
        body["callback_url"] = f"{url}/hook"
    return Asked(number=number, body=body, text=text)
