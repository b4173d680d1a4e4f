"""asyncapi.json: what goes over topics and the WebSocket, for an installation without a prefix of its topics."""

from __future__ import annotations

import json
from pathlib import Path

from penstock.gateway.document.asyncapi import asyncapi, document_text
from penstock.gateway.document.asyncapi_changes import breaking_changes, is_new_contract


def page() -> str:
    return document_text(asyncapi()) + "\n"


def unannounced(written: Path) -> list[str]:
    """What breaks clients of the document that was written before, unless its version says so."""
    if not written.is_file():
        return []
    old, new = json.loads(written.read_text(encoding="utf-8")), asyncapi()
    return [] if is_new_contract(old, new) else breaking_changes(old, new)
