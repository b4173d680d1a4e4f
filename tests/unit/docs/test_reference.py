"""The reference says what the code says: generated pages are up to date, and those by hand leave nothing out."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import CollectorRegistry

from penstock.common.certificates import Certificates
from penstock.common.configuration import TelemetrySection
from penstock.common.engine_kinds import KINDS, PROCESS_OPTIONS, REMOTE_OPTIONS
from penstock.common.model_entry import ModelEntry
from penstock.common.settings import KafkaSettings
from penstock.common.telemetry import register, tracing
from penstock.gateway.bridge import known
from penstock.gateway.bridge.app import BridgeMetrics
from penstock.gateway.dead_letters import letters
from penstock.gateway.document import error_codes
from penstock.gateway.metrics import GatewayMetrics
from penstock.gateway.openai.chat_bodies import PenstockOptions
from penstock.gateway.summarizer.app import SummarizerMetrics
from penstock.gateway.summarizer.summary_scheduler import SummaryScheduler
from penstock.gateway.view.frames import Frame
from penstock.gateway.webhooks.metrics import WebhookMetrics
from penstock.processors.metrics import Metrics
from penstock.schemas import topics
from penstock.schemas.errors import PenstockError
from penstock.schemas.records import WAITING_REASONS, InferenceRequest, SummarizePolicy
from penstock.schemas.tasks import BUILT_TASKS
from penstock.schemas.topics import TopicNames, request_key, topic_specs

if TYPE_CHECKING:
    from .conftest import Page

ROOT = Path(__file__).parents[3]


@pytest.fixture
def generate(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return import_module("generate")


REFERENCE = ["records.md", "settings.md", "errors.md", "cli.md", "asyncapi.json"]
GENERATED = [*(f"reference/{name}" for name in REFERENCE), "what-is-proven.md"]


@pytest.mark.parametrize("name", GENERATED)
def test_generated_pages_are_up_to_date(generate: ModuleType, name: str) -> None:
    assert set(generate.PAGES) == {*GENERATED}
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert text == generate.PAGES[name](), f"docs/{name} is stale: run `{generate.COMMAND}`"


def test_check_names_the_stale_page_and_writing_mends_it(
    generate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generate, "FOLDER", tmp_path)
    monkeypatch.setattr(generate, "PAGES", {"one.md": lambda: "one\n", "two.md": lambda: "two\n"})
    (tmp_path / "one.md").write_text("one\n")
    assert generate.main(["--check"]) == 1
    assert capsys.readouterr().err == f"docs/two.md is stale: run `{generate.COMMAND}`\n"
    assert generate.main([]) == 0
    assert generate.main(["--check"]) == 0
    assert generate.main(["--nothing-of-ours"]) == 2


def test_generated_pages_do_not_depend_on_the_terminal_or_the_place(
    generate: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("PENSTOCK_KAFKA__BOOTSTRAP_SERVERS", "elsewhere:1")
    for name, page in generate.PAGES.items():
        text = page()
        assert str(ROOT) not in text
        assert text == (ROOT / "docs" / name).read_text(encoding="utf-8")


def test_every_error_code_says_when() -> None:
    codes = {kind.code for kind in error_codes.tree(PenstockError)}
    assert set(error_codes.WHEN) == codes, "mend WHEN in gateway/penstock/gateway/document/error_codes.py"


def test_metrics(reference: dict[str, Page]) -> None:
    documented = {re.split(r"\{", span)[0] for span in reference["metrics.md"].spans if span.startswith("penstock_")}
    summarizer = SummarizerMetrics(SummaryScheduler(lambda _: SummarizePolicy(), 1))
    rooms = [Metrics(), GatewayMetrics(), BridgeMetrics(), WebhookMetrics(), summarizer]
    families = [family for room in rooms for family in room.registry.collect()]
    families += Certificates(KafkaSettings(), None).collect()
    with tracing(TelemetrySection(traces=True), "worker"):
        register(registry := CollectorRegistry())
        families += registry.collect()
    assert documented == {family.name + ("_total" if family.type == "counter" else "") for family in families}


def test_settings_name_every_engine(reference: dict[str, Page]) -> None:
    row = next(row for row in reference["settings.md"].text.splitlines() if row.startswith("| `engine` |"))
    kinds = {name for name, kind in KINDS.items() if not kind.built_in}
    assert set(re.findall(r"`(\w+)`", row)) - {"engine"} == kinds


def test_engine_options(reference: dict[str, Page]) -> None:
    sources = [*(ROOT / "processors/penstock/processors/engines").rglob("*.py")]
    sources += [ROOT / "processors/penstock/processors" / name for name in ("models/manager.py", "models/serving.py")]
    code = "\n".join(source.read_text() for source in sources)
    fields = {"granted_bytes", "address", "slots", *ModelEntry.model_fields}
    read = set(re.findall(r"options(?:\.get\(\s*|\[)[\"'](\w+)[\"']", code)) - fields
    rows = re.findall(r"^\| (`[^|]*`) \|", reference["engine-options.md"].text, re.MULTILINE)
    documented = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert read <= documented, f"docs/reference/engine-options.md lacks {read - documented}"
    assert not [name for name in documented if f'"{name}"' not in code and f"'{name}'" not in code]


def test_engine_options_are_those_of_the_kinds(reference: dict[str, Page]) -> None:
    """Each section has the options of its engine, with what they take; those that several share stand once."""
    sections = dict(section.split("\n", 1) for section in reference["engine-options.md"].text.split("\n## ")[1:])
    own = {
        name: {one: takes for one, takes in kind.options.items() if not (kind.openai and one in REMOTE_OPTIONS)}
        for name, kind in KINDS.items()
        if not kind.built_in
    }
    for section, options in {**own, "Every engine on this machine": PROCESS_OPTIONS, "remote": REMOTE_OPTIONS}.items():
        rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \| [^|]+ \| [^|]+ \|$", sections[section], re.MULTILINE))
        assert rows == {name: option.takes for name, option in options.items()}, section


def test_topics(reference: dict[str, Page]) -> None:
    specs = topic_specs(TopicNames(), partitions=64, shared_conversations=True)
    rows = {
        name: [cell.strip() for cell in row.split("|")[1:-1]]
        for row in reference["topics.md"].text.splitlines()
        if row.startswith("| `inference.")
        for name in re.findall(r"`(inference\.[\w.]+)`", row.split("|")[1])
    }
    assert set(rows) == {spec.name for spec in specs}
    for spec in specs:
        partitions, cleanup, kept = rows[spec.name][3:]
        days = int(spec.config.get("retention.ms", 0)) // 86_400_000
        assert (spec.partitions, spec.config["cleanup.policy"]) == (64 if partitions == "N" else 1, cleanup)
        assert kept == (f"{days} day{'s' if days > 1 else ''}" if days else "for good")
        segments = re.search(r"segments of (\d+) (min|h)", rows[spec.name][2])
        minutes = int(segments[1]) * {"min": 1, "h": 60}[segments[2]] if segments else 0
        assert int(spec.config.get("segment.ms", 0)) == minutes * 60_000


def test_topics_that_are_flushed(reference: dict[str, Page], pages: list[Page]) -> None:
    specs = topic_specs(TopicNames(), durability="fsync", shared_conversations=True)
    unflushed = {spec.name for spec in specs if "flush.messages" not in spec.config}
    runbook = next(page for page in pages if page.name.endswith("runbook.md"))
    for page in (reference["topics.md"], runbook):
        (names,) = re.findall(r"all topics but ((?:(?:, | and )?`inference\.\w+`)+)", page.text)
        assert set(re.findall(r"`(.+?)`", names)) == unflushed, page.name


def test_keys_of_request_topics(reference: dict[str, Page]) -> None:
    cells = {
        re.split(r"\| ", row)[1]: re.split(r"\| ", row)[2]
        for row in reference["topics.md"].text.splitlines()
        if row.startswith("| `inference.")
    }
    keys = {name: key.strip() for names, key in cells.items() for name in re.findall(r"`(inference[\w.]+)`", names)}
    names = {b"talk": "conversation key, else request id", b"one": "request id"}
    for task in BUILT_TASKS:
        turn = InferenceRequest(request_id="one", task=task, conversation_id="talk", created_at=1)
        assert keys[TopicNames().request(task, 5)] == names[request_key(turn)]


def test_headers(reference: dict[str, Page]) -> None:
    table = reference["topics.md"].text.partition("## Headers")[2].partition("## Requests as JSON")[0]
    documented = {
        name for row in re.findall(r"^\| (`[^|]*`) \|", table, re.M) for name in re.findall(r"`([\w-]+)`", row)
    }
    events = {"ce_specversion", "ce_id", "ce_source", "ce_type"}
    ours = {value for room in (topics, letters, known) for name, value in vars(room).items() if name[:7] == "HEADER_"}
    assert documented == ours | events | {"penstock-not-before"}


def test_reasons_to_wait(reference: dict[str, Page], pages: list[Page]) -> None:
    how_to = next(page for page in pages if page.name.endswith("how-to/operation.md"))
    for page, begins in ((reference["http.md"], "| `reason` |"), (how_to, "| reason | what helps |")):
        table = page.text.partition(begins)[2].partition("\n\n")[0]
        assert set(re.findall(r"^\| `(\w+)` \|", table, re.M)) == set(WAITING_REASONS)


def test_fields_that_openai_routes_take_beside(reference: dict[str, Page]) -> None:
    sentence = reference["http.md"].text.partition('`extra_body={"penstock": {…}}` takes')[2].partition("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", sentence)) == set(PenstockOptions.model_fields)


def test_frames(reference: dict[str, Page]) -> None:
    text = reference["http.md"].text
    table = text[text.index("### Frames from the gateway") : text.index("### Close codes")]
    rows = {row.split("`")[1]: row for row in table.splitlines() if row.startswith("| `") and "type" not in row[:8]}
    kinds: list[type[Any]] = [kind for kind in Frame.__subclasses__() if kind.__module__ == Frame.__module__]
    assert {kind.type for kind in kinds} <= set(rows)
    for kind in kinds:
        fields = kind.__dataclass_fields__
        own = [name for name in fields if fields[name].repr and name not in Frame.__dataclass_fields__]
        assert not [name for name in own if f"`{name}`" not in rows[kind.type]]
