"""What tests of the console do with its pages."""

from __future__ import annotations

import io
import os
import time
from pathlib import Path
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from PIL import Image
from playwright.sync_api import TimeoutError as Late

from system import Process

TELLS_S = 10.0
"""The first screen tells of a fault within so long after a gateway can know it, and lets it go as soon."""
FITS_S = 5.0
"""A page has its new width within so long."""
NAME = "penstock.test"
"""A name of this machine that a browser does not know for its own: no secure context over plain http."""
COLORS = 128
"""Of a picture in the docs: it is a third as large as with all."""
PHONE = {"width": 390, "height": 800}
HOSTILE = f'<img src=x onerror="document.title=1">\u202e\U0001f409{"x" * 63}'


class Opener:
    """Opens pages of a gateway's console. When it ends, no page may have reported an error."""

    def __init__(self, browser: Any) -> None:
        self.browser = browser
        self.pages: list[Any] = []
        self.errors: list[str] = []

    def __enter__(self) -> Opener:
        return self

    def __call__(self, gateway: Process, place: str = "", **options: Any) -> Any:
        page = self.browser.new_page(**options)
        self.pages.append(page)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda line: self.errors.append(line.text) if line.type == "error" else None)
        page.goto(f"{gateway.url}/{place}")
        return page

    def expect(self, *words: str) -> None:
        """The browser reports each answer that is no success: these were meant, as "404"."""
        self.errors[:] = [one for one in self.errors if not any(word in one for word in words)]

    def __exit__(self, *raised: object) -> None:
        for page in self.pages:
            page.close()
        assert not self.errors, self.errors


def log_in(page: Any, key: str) -> None:
    page.get_by_role("textbox", name="Key").fill(key)
    page.keyboard.press("Enter")


def told(page: Any, text: str, within_s: float = TELLS_S, *, state: str = "visible") -> None:
    try:
        page.get_by_text(text).first.wait_for(timeout=within_s * 1000, state=state)
    except Late:
        raise AssertionError(f"{text!r} is not {state}; the page says:\n{page.inner_text('body')}") from None


def gone(page: Any, text: str, within_s: float = TELLS_S) -> None:
    told(page, text, within_s, state="detached")


def violations(page: Any) -> list[Any]:
    return [(one["id"], [node["html"] for node in one["nodes"]]) for one in Axe().run(page).response["violations"]]


_BEGIN_TABS = """() => {
    const shown = (one) => one.checkVisibility() && !one.disabled && !(one.type === "radio" && !one.checked);
    const usable = "a[href], button, input, select, textarea, summary, [tabindex='0']";
    window.toReach = [...document.querySelectorAll(usable)].filter(shown);
    window.reached = new Set();
    document.body.tabIndex = -1;  // the next Tab goes to what is first on the page
    document.body.focus();
    document.body.removeAttribute("tabindex");
}"""
_TABBED = """() => {
    const one = document.activeElement, style = getComputedStyle(one), box = one.getBoundingClientRect();
    if (one === window.newest) return "";  // a field of a date has several stops
    if (one === document.body || window.reached.has(one)) return null;
    window.reached.add(window.newest = one);
    const seen = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0;
    return seen && box.bottom > 0 && box.top < innerHeight ? "" : one.outerHTML.slice(0, 200);
}"""
_NOT_REACHED = """() => window.toReach.filter((one) => one.isConnected && !window.reached.has(one))
    .map((one) => one.outerHTML.slice(0, 200))"""


def out_of_reach(page: Any) -> list[str]:
    """What is for use and Tab does not reach, or reaches without a visible focus."""
    page.evaluate(_BEGIN_TABS)
    unseen: list[str] = []
    while True:
        page.keyboard.press("Tab")
        if (found := page.evaluate(_TABBED)) is None:
            return [*unseen, *page.evaluate(_NOT_REACHED)]
        unseen += [found] if found else []


def focused(page: Any) -> str:
    """The name of what has the focus."""
    label = "(one) => one.ariaLabel ?? one.labels?.[0]?.innerText ?? one.innerText"
    return (page.evaluate(f"({label})(document.activeElement)") or "").strip()


def tab_to(page: Any, name: str) -> None:
    """Press Tab until what has this name has the focus."""
    page.evaluate(_BEGIN_TABS)
    found: list[str] = []
    while (label_now := focused(page)) != name:
        page.keyboard.press("Tab")
        found.append(label_now)
        assert page.evaluate(_TABBED) is not None, f"Tab does not reach {name!r}, but {found}"


def keep_screenshot(page: Any, name: str) -> None:
    """As `NAME.png` in the folder that `PENSTOCK_SCREENSHOTS` names, if it names one."""
    if folder := os.environ.get("PENSTOCK_SCREENSHOTS"):
        page.set_viewport_size({"width": 1280, "height": 1100})
        page.evaluate("scrollTo(0, 0)")
        page.wait_for_timeout(2_500)  # charts are drawn again
        end = page.evaluate("document.querySelector('main').getBoundingClientRect().bottom")
        part = {"x": 0, "y": 0, "width": 1280, "height": min(end, 1100)}
        shown = Image.open(io.BytesIO(page.screenshot(clip=part))).convert("RGB")
        shown.quantize(COLORS, Image.Quantize.FASTOCTREE).save(Path(folder) / f"{name}.png", optimize=True)


def wider_than(page: Any, size: dict[str, int]) -> list[str]:
    """What does not fit on a screen of that size, but what scrolls on its own. Charts are drawn anew a moment later."""
    page.set_viewport_size(size)
    wide = "(one) => one.scrollWidth > innerWidth && !one.closest('.scroll')"
    look = f"[...document.querySelectorAll('*')].filter({wide}).map((one) => one.outerHTML.slice(0, 200))"
    give_up = time.monotonic() + FITS_S
    while (found := page.evaluate(look)) and time.monotonic() < give_up:
        page.wait_for_timeout(50)
    return found
