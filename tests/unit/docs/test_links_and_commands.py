"""What the documentation points at exists: links and anchors, commands and their options, make targets, routes."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer.main

from penstock.cli.config import ClusterSettings
from penstock.cli.main import app as command_line
from penstock.gateway.app import create_app
from penstock.gateway.bridge.settings import BridgeSettings
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.summarizer.settings import SummarizerSettings
from penstock.gateway.webhooks.settings import WebhooksSettings
from penstock.processors.settings import WorkerSettings

if TYPE_CHECKING:
    from .conftest import Page

ROOT = Path(__file__).parents[3]
Route = tuple[str, str]
NOT_FOR_CALLERS = {("GET", "/docs/oauth2-redirect")}


# --- links


def anchors(text: str) -> set[str]:
    """As GitHub makes them; a heading that is there twice gets a number."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M):
        bare = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
        name = re.sub(r"[^\w\- ]", "", bare).replace(" ", "-")
        number = next(n for n in range(100) if (f"{name}-{n}" if n else name) not in found)
        found.add(f"{name}-{number}" if number else name)
    return found


def broken_links(page: Page) -> Iterator[str]:
    for target in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", re.sub(r"`[^`\[\]]*`", "", page.prose)):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        path = (page.path.parent / file).resolve() if file else page.path
        if not path.exists():
            yield f"{page.name}: {target}: no such file"
        elif anchor and anchor not in anchors(path.read_text(encoding="utf-8")):
            yield f"{page.name}: {target}: no such heading"


def test_links_resolve(pages: list[Page]) -> None:
    assert [problem for page in pages for problem in broken_links(page)] == []


def test_every_page_is_linked_from_another(pages: list[Page]) -> None:
    targets = {
        (page.path.parent / target.partition("#")[0]).resolve()
        for page in pages
        for target in re.findall(r"\]\(([^)\s]+)\)", page.prose)
    }
    assert [page.name for page in pages if page.path not in targets and page.path.name != "README.md"] == []


def test_the_how_to_lists_all_its_sections_in_their_order(pages: list[Page]) -> None:
    """In its index, and each page its own."""
    (index,) = (page.text for page in pages if page.path.name == "how-to.md")
    recipes = {page.path.stem: page.text for page in pages if page.path.parent.name == "how-to"}
    found = {name: re.findall(r"^## (.+)$", text, re.M) for name, text in recipes.items()}
    assert {name: re.findall(r"^- \[([^\]]+)\]\(#", text, re.M) for name, text in recipes.items()} == found
    assert {name: re.findall(rf"^- \[([^\]]+)\]\(how-to/{name}.md#", index, re.M) for name in recipes} == found


# --- commands


@pytest.fixture(scope="module")
def root() -> Any:
    return typer.main.get_command(command_line)


def problem_of(root: Any, words: list[str], *, whole: bool) -> str | None:
    """Why a command line is none of ours; only a `whole` one must have its arguments too."""
    command, path, rest = root, "penstock", [word for word in words if not re.fullmatch(r"\[.*\]|…", word)]
    while hasattr(command, "commands") and rest:
        default = getattr(command, "default", None)
        if default is not None and rest[0] not in (*command.commands, "--help", "-h"):
            command = command.commands[default]
            continue
        if rest[0].startswith("-"):
            break
        context = command.make_context(path, [], resilient_parsing=True)
        inner = command.get_command(context, rest[0])
        if inner is None:
            return f"`{path}` has no command {rest[0]}"
        path, command, rest = f"{path} {rest[0]}", inner, rest[1:]
    known = {"--help", "-h"} | {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    unknown = [word for word in rest if re.match(r"--?[a-zA-Z]", word) and word.partition("=")[0] not in known]
    if unknown:
        return f"`{path}` has no option {unknown[0]}"
    only_a_group = hasattr(command, "commands") and not command.invoke_without_command
    if not whole or only_a_group or {"--help", "-h"} & set(rest):
        return None
    try:
        command.make_context(path, rest)  # parses, and calls nothing
    except Exception as error:  # the parser's own, which Typer keeps private
        return f"`{path} {' '.join(rest)}`: {getattr(error, 'message', error)}"
    return None


@pytest.mark.parametrize("whole", [True, False], ids=["in code they parse", "in the text they exist"])
def test_commands(root: Any, pages: list[Page], whole: bool) -> None:
    lines = [(page, words) for page in pages for words in (page.commands if whole else page.mentions)("penstock")]
    assert len(lines) > (50 if whole else 20)
    found = [(page.name, problem_of(root, words, whole=whole)) for page, words in lines]
    assert [(name, problem) for name, problem in found if problem] == []


@pytest.mark.parametrize(
    "words", [["nothing"], ["keys", "make"], ["up", "--nothing"], ["watch"], ["bench", "--rate", "fast"], ["up", "x"]]
)
def test_the_check_itself_finds_mistakes(root: Any, words: list[str]) -> None:
    assert problem_of(root, words, whole=True)


def test_make_targets_exist(pages: list[Page]) -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.M))
    used = {
        (page.name, word)
        for page in pages
        for words in page.commands("make") + page.mentions("make")
        for word in words
        if "=" not in word and not word.startswith("-")
    }
    assert {"up", "test", "check", "bench"} <= {word for _, word in used}
    assert {(name, word) for name, word in used if word not in targets} == set()


# --- code blocks


def test_code_blocks_are_what_they_say(pages: list[Page]) -> None:
    """Python compiles, JSON and TOML parse, and TOML holds only settings that there are."""
    for page in pages:
        for language, text in page.fences:
            if language == "python":
                compile(text, page.name, "exec")
            elif language == "json":
                json.loads(text)
            elif language == "toml":
                check_settings(page.name, tomllib.loads(text))


def check_settings(page: str, tables: dict[str, Any]) -> None:
    processes = (ClusterSettings, WorkerSettings, GatewaySettings, BridgeSettings, WebhooksSettings, SummarizerSettings)
    known = [settings.model_fields for settings in processes]
    for section in tables:
        assert any(section in fields for fields in known), f"{page}: there is no section [{section}]"
    for settings, fields in list(zip(processes, known, strict=True))[:3]:
        settings(**{name: table for name, table in tables.items() if name in fields})


# --- routes


@pytest.fixture(scope="module")
def routes() -> set[Route]:
    """(method, path) of all that the gateway serves; WS for a WebSocket."""
    found: set[Route] = set()
    for entry in create_app(GatewaySettings()).routes:
        inner: Any = getattr(entry, "original_router", None)  # FastAPI keeps included routers as they are
        served: list[Any] = [entry] if inner is None else inner.routes
        for route in served:
            path = re.sub(r":\w+\}", "}", route.path)
            found |= {(method, path) for method in (getattr(route, "methods", None) or {"WS"}) if method != "HEAD"}
    return found - NOT_FOR_CALLERS


def named_routes(page: Page) -> set[Route]:
    matches = [re.fullmatch(r"([A-Z]+) (/\S*)", span) for span in page.spans]
    return {(match[1], match[2].partition("?")[0]) for match in matches if match}


def test_the_http_page_names_every_route_and_no_other(routes: set[Route], reference: dict[str, Page]) -> None:
    assert len(routes) > 40
    assert named_routes(reference["http.md"]) == routes
    bare = {span.partition("?")[0] for span in reference["http.md"].spans if span.startswith("/")}
    assert bare <= {path for _, path in routes}


def test_routes_of_all_pages_exist(routes: set[Route], pages: list[Page]) -> None:
    def known(method: str | None, path: str) -> bool:
        patterns = [re.sub(r"\{\w+\}", "[^/]+", route) for verb, route in routes if method in (None, verb)]
        return any(re.fullmatch(pattern, path) for pattern in patterns)

    named = {(page.name, *route) for page in pages for route in named_routes(page)}
    assert {route for route in named if not known(route[1], route[2])} == set()
    url = re.compile(r"(?:http|ws)://127\.0\.0\.1:8000(/[\w/$]+)")
    urls = {(page.name, path) for page in pages for path in url.findall(page.text)}
    assert {(name, path) for name, path in urls if path not in ("/v1", "/registry") and not known(None, path)} == set()
