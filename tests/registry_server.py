"""A schema registry over HTTP that knows our schemas under ids of its own."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from kit.http_server import Answer, Call, HttpServer
from penstock.schemas.codec import SCHEMA_IDS, Codec, schema_text
from support import in_background

FIRST_ID = 100
NAMES = list(SCHEMA_IDS)


class Registry(HttpServer):
    """`asked` are the paths of the look-ups. While it is not `up` it answers 503."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.up = True
        super().__init__(self._answer)

    @classmethod
    @contextmanager
    def running(cls) -> Generator[Registry]:
        with in_background(server := cls()):
            yield server

    def _answer(self, call: Call) -> Answer:
        if call.method == "POST":
            return 200, {"id": FIRST_ID + NAMES.index(call.path.split("/")[2].removeprefix("penstock.v1."))}
        number = int(call.path.rsplit("/", 1)[1]) - FIRST_ID
        self.asked.append(call.path)
        if not self.up:
            return 503, {"message": "not now"}
        return (200, {"schema": schema_text(NAMES[number])}) if 0 <= number < len(NAMES) else (404, {})


def foreign(name: str) -> Callable[[Any], bytes]:
    """What encodes records of this name with the registry's id."""
    return Codec(writer_ids={name: FIRST_ID + NAMES.index(name)}).encode
