"""The console in a real browser: what its tests share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import sync_playwright

from kit.console import NAME, Opener
from stock_clients import tool


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A file's own: while it is open its event loop runs in this thread, where asynchronous tests need theirs."""
    with sync_playwright() as playwright:
        args = ["--no-sandbox", f"--host-resolver-rules=MAP {NAME} 127.0.0.1"]
        running = playwright.chromium.launch(executable_path=tool("chromium"), args=args)
        yield running
        running.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Opener]:
    """Opens the console of a gateway. An error of the page or its console, CSP violations too, fails the test."""
    with Opener(browser) as opener:
        yield opener
