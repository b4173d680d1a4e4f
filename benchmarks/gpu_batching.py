"""Tokens per second of an engine and of the bare manager, as gpu_check.py asks: MODEL OPTIONS WARM ROUNDS.

A process of its own, so that it can be ended when the time is over.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from text import Direct, EngineAlone


def main(folder: str, options_json: str, warm: str, rounds: str) -> None:
    options = json.loads(options_json)
    engine, direct = EngineAlone(Path(folder), options), Direct(Path(folder), options)
    try:
        measured = [(engine.measure()["rate"], direct.measure()["rate"]) for _ in range(int(warm) + int(rounds))]
    finally:
        direct.close()
        engine.close()
    print(json.dumps(measured[int(warm) :]))


if __name__ == "__main__":
    main(*sys.argv[1:])
