"""The pages name states, log events, methods and files as the code does, and the tests that they point at exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.processors.core.work.states import Stage

if TYPE_CHECKING:
    from .conftest import Page

ROOT = Path(__file__).parents[3]
METHOD = re.compile(r"^([A-Z]\w+)\.(\w+)(?:\(\))?$", re.MULTILINE)
NAME = re.compile(r"[A-Za-z_][\w.]*(\(\))?")
UNREAD = ("CHANGELOG.md", "benchmarks.md", "settings.md", "cli.md", "records.md", "errors.md")
"""History, and what is generated."""
OF_OTHERS = {
    "AZURE_STORAGE_ACCOUNT_KEY",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "OTEL_EXPORTER_OTLP_CERTIFICATE",
    "OTEL_EXPORTER_OTLP_COMPRESSION",
    "OTEL_RESOURCE_ATTRIBUTES",
    "OTEL_TRACES_SAMPLER_ARG",
    "parentbased_traceidratio",
    "_bulk",
    "error_page",
    "proxy_request_buffering",
    "acks_late",
    "final_answer",
    "pause_partitions()",
    "read_committed",
    "request_format",
    "retain",
}
"""Names of other software, and of what was decided against."""
EVENT = re.compile(r"^([a-z]+\.[a-z_]+)(?: .*)?$")


def page_of(pages: list[Page], name: str) -> Page:
    return next(page for page in pages if page.name == name)


def test_every_state_of_a_request_is_drawn(pages: list[Page]) -> None:
    diagram = next(text for _, text in page_of(pages, "docs/how-it-works.md").fences if "publishing" in text)
    words = set(re.findall(r"[a-z_]+", diagram))
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
    path = re.compile(r"[\w./]+\.(py|avsc)|tests/[\w/.]+")
    named = {(page.name, span) for page in pages for span in page.spans if path.fullmatch(span)}
    files = [f"/{path.relative_to(ROOT)}" for path in sources()]
    assert len(named) > 80
    absent = {
        (name, span)
        for name, span in named
        if not any(file.endswith(f"/{span}") for file in files) and not (ROOT / span).is_dir()
    }
    assert absent == {("docs/fault-table.md", "kombu/transport/redis.py")}, "that one is another project's"


def test_named_methods_exist(pages: list[Page]) -> None:
    """`Class.method`, both in one file."""
    code = [path.read_text() for path in sources() if path.suffix == ".py"]
    found = {(page.name, *name) for page in pages for name in METHOD.findall("\n".join(page.spans))}
    assert len(found) > 20
    missing = {
        (page, kind, method)
        for page, kind, method in found
        if not any(f"class {kind}" in text and re.search(rf"\b{method}\b", text) for text in code)
    }
    assert missing == set()


def test_named_identifiers_are_in_the_code(pages: list[Page]) -> None:
    """A name that the code has lost is one that the page should lose too."""
    files = [path for path in sources() if path.suffix in (".py", ".avsc") and path != Path(__file__)]
    files += [ROOT / name for name in ("pyproject.toml", "constraints.txt", "docker-compose.yml")]
    files += [path for path in (ROOT / "deploy" / "helm").rglob("*") if path.is_file()]
    words = set(re.findall(r"\w+", "\n".join(f"{path.name}\n{path.read_text(encoding='utf-8')}" for path in files)))
    named = {span for page in pages if page.path.name not in UNREAD for span in page.spans if NAME.fullmatch(span)}
    absent = {span for span in named if not set(re.findall(r"\w+", span)) <= words}
    assert absent - OF_OTHERS == set()
