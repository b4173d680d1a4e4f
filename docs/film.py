"""Makes docs/kill.gif from a running `penstock up`: a worker is killed, and its answer goes on.

    penstock up --detach && python docs/film.py && penstock down

It asks a question in the console, kills the worker that answers (-9) when the answer has begun, and ends when the
answer is whole and `up` has started another worker.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

HERE = Path(__file__).parent
SIZE = {"width": 1180, "height": 880}
SHOWN = ["state", "pipeline", "try"]
"""Sections in the film."""
QUESTION = "Tell me the story of a river, from its spring to the sea."
FRAME_S, HOLD_S = 0.4, 4.0
LONGEST_S = 300.0
COLOURS = 48


def status() -> dict[str, Any]:
    told = subprocess.run([penstock(), "status", "--json"], capture_output=True, text=True, check=False)
    return json.loads(told.stdout)


def penstock() -> str:
    return str(Path(sys.executable).parent / "penstock")


def film(page: Any, worker: int) -> list[Image.Image]:
    """Frames of the question, the kill and the whole answer. Raises SystemExit if it is not whole in time."""
    frames: list[Image.Image] = []

    def take() -> None:
        frames.append(Image.open(io.BytesIO(page.screenshot())))

    # The film shows what changes.
    page.evaluate(
        "(kept) => document.querySelectorAll('main section')"
        ".forEach((one) => { one.hidden = !kept.includes(one.getAttribute('aria-labelledby') ?? 'state') })",
        SHOWN,
    )
    answer = page.locator(".answer")
    page.get_by_label("Question").fill(QUESTION)
    take()
    page.get_by_role("button", name="Ask").click()
    give_up, killed = time.monotonic() + LONGEST_S, False
    while "completed" not in page.inner_text("section[aria-labelledby=try]"):
        take()
        if not killed and len(answer.inner_text()) > 60:
            os.kill(worker, signal.SIGKILL)
            killed = True
        if time.monotonic() > give_up:
            raise SystemExit(f"the answer is not whole:\n{page.inner_text('body')}")
        time.sleep(FRAME_S)
    take()
    assert killed, "the answer was whole before the worker could be killed"
    return frames


def write_gif(frames: list[Image.Image], path: Path) -> None:
    """One palette for all frames, so that only what changes is written."""
    palette = frames[-1].convert("RGB").quantize(COLOURS)
    drawn = [frame.convert("RGB").quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    shown_ms = [int(FRAME_S * 1000)] * (len(drawn) - 1) + [int(HOLD_S * 1000)]
    drawn[0].save(path, save_all=True, append_images=drawn[1:], duration=shown_ms, loop=0, optimize=True)


def main() -> None:
    running = status()
    worker = next(part["pid"] for part in running["parts"] if part["name"] == "worker")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE)  # type: ignore[arg-type]
        page.goto(running["url"])
        page.get_by_text("All well").wait_for(timeout=60_000)
        write_gif(film(page, worker), HERE / "kill.gif")
        browser.close()


if __name__ == "__main__":
    main()
