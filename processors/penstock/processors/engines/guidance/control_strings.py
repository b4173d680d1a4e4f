"""Texts of users and tools in a chat hold no control tokens: `<|im_end|>` in a message stays the text that it is.

A tokenizer finds the strings of its control tokens wherever they stand, also in what a user wrote: so a message could
end its own turn and begin another one's. Where such a string occurs in a message of a user or a tool, a placeholder
stands for it while the chat template is rendered, and the text around it, up to the control tokens that the template
wrote, is encoded by a copy of the tokenizer that knows no control tokens. All else is encoded as it always is.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, cast

from tokenizers import Tokenizer
from transformers import BatchEncoding

Json = dict[str, Any]

ROLES = frozenset({"user", "tool", "function"})
"""Those whose texts hold no control tokens. What an assistant said may: `<think>`, calls of tools."""
PARSED_OPTION = "parse_control_strings"
_PROBE = "x"


class ControlStrings:
    """Of one tokenizer. `parsed`: what users and tools write is encoded as all other text is."""

    def __init__(self, tokenizer: Any, *, parsed: bool = False) -> None:
        self._tokenizer = tokenizer
        added: Mapping[int, Any] = tokenizer.added_tokens_decoder
        control = {number: str(token.content) for number, token in added.items() if str(token.content).strip()}
        self._ids = frozenset(control)
        self._strings = sorted(set(control.values()), key=len, reverse=True)
        self._places = {text: place for place, text in enumerate(self._strings)}
        self._any = re.compile(f"({'|'.join(map(re.escape, self._strings))})") if self._strings else None
        # Nobody can write a placeholder: its name is drawn.
        self._name = secrets.token_hex(8)
        self._placeholder = re.compile(f"\ue000{self._name}\\.([0-9]+)\ue001")
        self._parsed = parsed or self._any is None

    # -- before the template

    def hidden(self, messages: Sequence[Json]) -> list[Json] | None:
        """The messages with placeholders in what users and tools wrote; None if no control string is there."""
        if self._parsed:
            return None
        found = [self._hidden(message) if message.get("role") in ROLES else message for message in messages]
        return None if all(one is other for one, other in zip(found, messages, strict=True)) else found

    def _hidden(self, value: Any) -> Any:
        """The same object where there is nothing to hide."""
        if isinstance(value, str):
            assert self._any is not None
            text, count = self._any.subn(self._placeholder_of, value)
            return text if count else value
        if isinstance(value, dict):
            entries = cast("Json", value)
            fields = {name: self._hidden(inner) for name, inner in entries.items()}
            return fields if any(fields[name] is not inner for name, inner in entries.items()) else value
        if isinstance(value, list | tuple):
            items: Sequence[Any] = cast("Sequence[Any]", value)
            found = [self._hidden(inner) for inner in items]
            return found if any(one is not other for one, other in zip(found, items, strict=True)) else value
        return value

    def _placeholder_of(self, match: re.Match[str]) -> str:
        return f"\ue000{self._name}.{self._places[match[0]]}\ue001"

    # -- behind it

    def is_hidden_in(self, text: str) -> bool:
        return self._placeholder.search(text) is not None

    def shown(self, text: str) -> str:
        """The text with what the placeholders stand for."""
        return self._placeholder.sub(lambda match: self._strings[int(match[1])], text)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """The tokens of a rendered text: what placeholders stand for is text."""
        ids: list[int] = []
        written = ""
        for part in (text,) if self._any is None else self._any.split(text):
            if not self.is_hidden_in(part):
                written += part
                continue
            ids += self._usual(written)
            ids += self._plain(part, first=not ids)
            written = ""
        ids += self._usual(written)
        before, behind = self._around if add_special_tokens else ([], [])
        return [*before, *ids, *behind]

    def _usual(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    def _plain(self, part: str, *, first: bool) -> list[int]:
        ids = self._without_control(self.shown(part), first=first)
        if self._ids.isdisjoint(ids):
            return ids
        # The model of tokens has the string among its pieces. Cut in two behind its first character it has not.
        ids, text = [], ""
        for number, piece in enumerate(self._placeholder.split(part)):
            if number % 2:
                string = self._strings[int(piece)]
                ids += self._without_control(text + string[:1], first=first and not ids)
                text = string[1:]
            else:
                text += piece
        return [*ids, *self._without_control(text, first=first and not ids)]

    def _without_control(self, text: str, *, first: bool) -> list[int]:
        """`first`: nothing stands before it in the prompt."""
        if self._copies is None:
            return list(self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])
        return list(self._copies[first].encode(text, add_special_tokens=False).ids)

    @cached_property
    def _copies(self) -> dict[bool, Tokenizer] | None:
        """The tokenizer without control tokens, by whether a text is the first; None for one in Python."""
        fast: Any = getattr(self._tokenizer, "backend_tokenizer", None)
        if not isinstance(fast, Tokenizer):
            return None
        described: Json = json.loads(fast.to_str())
        described["added_tokens"] = [one for one in described["added_tokens"] if not one["content"].strip()]
        described |= {"post_processor": None, "truncation": None, "padding": None}
        first = Tokenizer.from_str(json.dumps(described))
        _without_prefix(described["pre_tokenizer"])
        return {True: first, False: Tokenizer.from_str(json.dumps(described))}

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """The tokens that the tokenizer puts before and behind any text."""
        bare = self._usual(_PROBE)
        whole: list[int] = list(self._tokenizer(_PROBE)["input_ids"])
        at = next(at for at in range(len(whole)) if whole[at : at + len(bare)] == bare)
        return whole[:at], whole[at + len(bare) :]


class HidingTokenizer:
    """A tokenizer as others see it, to whom placeholders are text."""

    def __init__(self, tokenizer: Any, strings: ControlStrings) -> None:
        self._tokenizer, self._strings = tokenizer, strings

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def __call__(self, text: Any, *args: Any, **how: Any) -> Any:
        texts: list[str] = [text] if isinstance(text, str) else list(text)
        if not any(map(self._strings.is_hidden_in, texts)):
            return self._tokenizer(text, *args, **how)
        special = how.get("add_special_tokens", True)
        ids = [self._strings.encode(one, add_special_tokens=special) for one in texts]
        found = ids[0] if isinstance(text, str) else ids
        masks = [[1] * len(one) for one in ids]
        encoded = {"input_ids": found, "attention_mask": masks[0] if isinstance(text, str) else masks}
        return BatchEncoding(encoded, tensor_type=how.get("return_tensors"))


def _without_prefix(pre_tokenizer: Any) -> None:
    """So that what stands in the middle of a prompt is no first text, before which some put a blank."""
    if isinstance(pre_tokenizer, dict):
        described = cast("Json", pre_tokenizer)
        if described.get("prepend_scheme") == "first":
            described["prepend_scheme"] = "never"
        for inner in described.get("pretokenizers") or ():
            _without_prefix(inner)
