"""The pages name states, log events, methods and files as the code does, and the tests that they point at exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.processors.core.requests.states import Stage

if TYPE_CHECKING:
    from conftest import Page

ROOT = Path(__file__).parents[3]
EVENT = re.compile(r"^([a-z]+\.[a-z_]+)(?: .*)?$")


def page_of(pages: list[Page], name: str) -> Page:
    return next(page for page in pages if page.name == name)


def test_every_state_of_a_request_is_drawn(pages: list[Page]) -> None:
    diagram = next(text for _, text in page_of(pages, "docs/how-it-works.md").fences if "settling" in text)
    words = set(re.findall(r"[a-z]+", diagram))
    assert {str(stage) for stage in Stage} <= words


def test_the_runbook_s_log_events_exist(pages: list[Page]) -> None:
    spans = page_of(pages, "docs/runbook.md").spans
    source = "".join(path.read_text() for path in (ROOT / "processors").rglob("*.py"))
    shared = "".join(path.read_text() for path in (ROOT / "common").rglob("*.py"))
    rooms = set(re.findall(r'"([a-z_]+)\.[a-z_]+[ :"]', source))
    matches = [match[1] for span in spans if (match := EVENT.match(span)) and match[1].partition(".")[0] in rooms]
    setting = re.compile(r"(worker|gateway|conversations)\.[a-z_]+_(s|bytes|span)$")
    events = {event for event in matches if not setting.match(event)}
    assert len(events) > 20
    assert {event for event in events if not re.search(rf'"{re.escape(event)}[ :"]', source + shared)} == set()


def test_named_tests_exist(pages: list[Page]) -> None:
    named = {(page.name, span) for page in pages for span in page.spans if re.match(r"tests/[\w/.]+$", span)}
    assert len(named) > 40
    assert {(name, path) for name, path in named if not (ROOT / path).exists()} == set()


def sources() -> list[Path]:
    product = ("schemas", "common", "producers", "processors", "gateway", "cli")
    return [
        path
        for room in (*product, "benchmarks", "tests", "docs", "examples")
        for path in (ROOT / room).rglob("*")
        if path.is_file()
    ]


def test_named_files_exist(pages: list[Page]) -> None:
    """A page may leave out the beginning of a path, as in `core/flow.py`."""
    named = {(page.name, span) for page in pages for span in page.spans if re.fullmatch(r"[\w./]+\.(py|avsc)", span)}
    files = [f"/{path.relative_to(ROOT)}" for path in sources()]
    assert len(named) > 40
    absent = {(name, span) for name, span in named if not any(file.endswith(f"/{span}") for file in files)}
    assert absent == {("docs/fault-table.md", "kombu/transport/redis.py")}, "that one is another project's"


def test_names_in_how_it_works_exist(pages: list[Page]) -> None:
    """`Class.method` of the steps of a request."""
    code = {path: path.read_text() for path in sources() if path.suffix == ".py" and "processors" in path.parts}
    named = [re.fullmatch(r"([A-Z]\w+)\.(\w+)", span) for span in page_of(pages, "docs/how-it-works.md").spans]
    steps = {(found[1], found[2]) for found in named if found}
    assert len(steps) > 20
    missing = {
        step
        for step in steps
        if not any(f"class {step[0]}" in text and re.search(rf"\b(def )?{step[1]}\b", text) for text in code.values())
    }
    assert missing == set()
