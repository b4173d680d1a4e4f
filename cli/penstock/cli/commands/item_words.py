"""Items of conversations for people."""

from __future__ import annotations

from typing import Any


def item_text(item: dict[str, Any]) -> str:
    """The text of an item; an image stands as the path at which the gateway gives it."""
    if item["type"] == "function_call":
        return f"{item['name']}({item['arguments']})"
    content = item["output"] if item["type"] == "function_call_output" else item.get("content")
    if isinstance(content, str):
        return content
    return " ".join(filter(None, (part.get("text") or part.get("image_url") for part in content or [])))


def item_role(item: dict[str, Any]) -> str:
    """Who said it: calls of tools are an assistant's."""
    return item.get("role") or ("tool" if item["type"] == "function_call_output" else "assistant")
