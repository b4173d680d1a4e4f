"""Generating a codec's function takes some milliseconds: a process does it once for all that ask for the same one."""

from __future__ import annotations

from typing import Any

import pytest

from kit.records import status
from penstock.schemas import compiled
from penstock.schemas.codec import Codec, schema_text
from penstock.schemas.compiled.source import Source
from penstock.schemas.records import ResultEvent, StatusEvent

EVENT = status("queued")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is compiled from now on."""
    seen: list[str] = []
    compile_source = Source.compiled

    def noted(source: Source, function: str, about: str) -> Any:
        seen.append(about)
        return compile_source(source, function, about)

    monkeypatch.setattr(Source, "compiled", noted)
    for make in (compiled.make_encoder, compiled.make_decoder, compiled.make_head):
        make.cache_clear()
    return seen


def read_and_write(codec: Codec) -> None:
    data = codec.encode(EVENT)
    assert codec.decode(data, StatusEvent) == EVENT
    assert codec.head(StatusEvent, "request_id", "done")(data)[:2] == ("r", False)


def test_a_second_codec_compiles_nothing(made: list[str]) -> None:
    read_and_write(Codec())
    first = made.copy()
    assert sorted(first) == ["decoder of StatusEvent", "encoder of StatusEvent", "head of StatusEvent"]
    read_and_write(Codec())
    assert made == first


def test_other_fields_and_other_ids_have_functions_of_their_own(made: list[str]) -> None:
    text = schema_text("ResultEvent")
    lean = compiled.make_decoder(text, text, ResultEvent, ("metadata",))
    assert lean is not compiled.make_decoder(text, text, ResultEvent)
    kind, tenant = (compiled.make_head(text, text, ResultEvent, (name,)) for name in ("kind", "tenant"))
    assert kind is not tenant
    assert Codec(writer_ids={"StatusEvent": 7}).encode(EVENT)[:5] == bytes([0, 0, 0, 0, 7])
    assert Codec().encode(EVENT)[:5] != bytes([0, 0, 0, 0, 7])
