"""Which changes of a model need another engine: each field has a decision here."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.common.model_entry import ModelEntry, parse_entry
from penstock.processors.models.catalog import ModelConfig, engine_identity
from penstock.processors.models.serving import Serving
from penstock.processors.settings import WorkerSettings
from penstock.schemas.errors import InvalidRequest
from penstock.schemas.topics import TopicNames

# field → (another value, whether that makes another engine)
OF_ENTRY: dict[str, tuple[Any, bool]] = {
    "id": ("other", False),
    "source": ("/other", True),
    "engine": ("noop", True),
    "tasks": (["summarization"], True),
    "aliases": (["default"], False),
    "pool": ("p", False),
    "revision": ("v2", True),
    "dtype": ("bfloat16", True),
    "quantization": ("int8", True),
    "adapters": (["a/b"], True),
    "device": ("cuda", True),
    "replicas": (2, False),
    "vram_bytes": (10**9, True),
    "max_batch_size": (9, True),
    "window": (512, True),
    "priority": (1, False),
    "pinned": (True, False),
    "preload": (False, False),
    "keep_alive": ("5m", False),
    "max_execution_s": (60.0, False),
    "max_attempts": (2, False),
    "retries": ({"first_s": 1.0}, False),
    "trust_remote_code": (True, True),
    "defaults": ({"max_tokens": 3}, False),
    "options": ({"threads": 2}, True),
}
ENTRY: dict[str, Any] = {"id": "m", "source": "/m", "engine": "text"}


def test_every_field_has_a_decision() -> None:
    assert set(OF_ENTRY) == set(ModelEntry.model_fields)


def spec_of(entry: dict[str, Any]) -> Any:
    """What the flow compares when a model is configured."""
    models = [parse_entry({**entry, "id": "m", "pool": None})]
    serving = Serving(
        WorkerSettings.model_validate({"models": models}),
        publish=lambda topic, key, record: None,
        names=TopicNames(),
        reports=None,  # pyright: ignore[reportArgumentType]
        clock_ms=lambda: 0,
        clock=lambda: 0.0,
    )
    return serving.specs()["m"].options


@pytest.mark.parametrize("name", [name for name in OF_ENTRY if name not in ("id", "pool")])
def test_a_field_of_an_entry_makes_another_engine_or_not(name: str) -> None:
    value, other_engine = OF_ENTRY[name]
    assert (spec_of({**ENTRY, name: value}) != spec_of(ENTRY)) == other_engine


def test_the_order_of_options_makes_no_other_engine() -> None:
    orders = {"a": 1, "b": 2}, {"b": 2, "a": 1}
    one, two = (engine_identity(ModelConfig(id="m", source="/m", engine="text", options=made)) for made in orders)
    assert one == two


def test_a_field_that_is_missing_is_told_in_plain_words() -> None:
    with pytest.raises(InvalidRequest, match=r"^source: is missing$"):
        parse_entry({"id": "m", "engine": "noop"})
