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
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any, cast

from tokenizers import Tokenizer
from transformers import BatchEncoding

from penstock.schemas.errors import InvalidRequest

Json = dict[str, Any]

ROLES = frozenset({"user", "tool", "function"})
"""Those whose texts hold no control tokens. What an assistant said may: `<think>`, calls of tools."""
PARSED_OPTION = "parse_control_strings"
_PROBE = "x"


class ControlStrings:
    """Of one tokenizer and chat template. `parsed`: what users and tools write is encoded as all other text is.

    Control tokens are those that the tokenizer calls special, and added ones that the template writes (`<tool_call>`).
    Other added tokens are ordinary pieces of text, as letters or HTML.
    """

    def __init__(self, tokenizer: Any, template: str | None, *, parsed: bool = False) -> None:
        self._tokenizer = tokenizer
        added = {} if parsed else _added_tokens(tokenizer)
        control = {
            number: token
            for number, token in added.items()
            if token.content.strip() and (token.special or token.content in (template or ""))
        }
        self._ids = frozenset(control)
        self._control = {token.content: token for token in control.values()}
        self._strings = list(self._control)
        self._places = {text: place for place, text in enumerate(self._strings)}
        self._any = re.compile(f"({one_of(self._strings)})") if self._strings else None
        # Nobody can write a placeholder: its name is drawn.
        self._name = secrets.token_hex(8)
        self._placeholder = re.compile(f"\ue000{self._name}\\.([0-9]+)\ue001")
        # It takes a second for large vocabularies: not at the first message that needs it.
        self._copies = self._without_tokens() if self._strings else None

    # -- before the template

    def hidden(self, messages: Sequence[Json]) -> list[Json] | None:
        """The messages with placeholders in what users and tools wrote; None if no control string is there."""
        if self._any is None:
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
            found = [self._hidden(inner) for inner in self._joined(items)]
            same = len(found) == len(items) and all(one is other for one, other in zip(found, items, strict=True))
            return value if same else found
        return value

    def _joined(self, items: Sequence[Any]) -> list[Any]:
        """Neighbouring texts as one where a control string goes from one into the next: templates leave no gap."""
        assert self._any is not None
        found: list[Any] = []
        for is_text, run in groupby(items, _is_text):
            parts = list(run)
            whole = "".join(part["text"] for part in parts) if is_text and len(parts) > 1 else ""
            apart = sum(len(self._any.findall(part["text"])) for part in parts) if whole else 0
            found += [{**parts[0], "text": whole}] if len(self._any.findall(whole)) != apart else parts
        return found

    def _placeholder_of(self, match: re.Match[str]) -> str:
        return f"\ue000{self._name}.{self._places[match[0]]}\ue001"

    # -- behind it

    def is_hidden_in(self, text: str) -> bool:
        return self._placeholder.search(text) is not None

    def shown(self, text: str) -> str:
        """The text with what the placeholders stand for."""
        return self._placeholder.sub(self._shown, text)

    def _shown(self, match: re.Match[str]) -> str:
        return self._strings[int(match[1])]

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """The tokens of a rendered text: what placeholders stand for is text."""
        ids: list[int] = []
        written = ""
        parts = [text] if self._any is None else self._any.split(text)
        for at, part in enumerate(parts):
            if not self.is_hidden_in(part):
                written += part
                continue
            # Blanks beside a token that takes them along are its own.
            if at and self._control[parts[at - 1]].rstrip:
                written += part[: len(part) - len(part.lstrip())]
                part = part.lstrip()
            behind = ""
            if at + 1 < len(parts) and self._control[parts[at + 1]].lstrip:
                behind = part[len(part.rstrip()) :]
                part = part.rstrip()
            ids += self._usual(written)
            ids += self._plain(part, first=not ids)
            written = behind
        ids += self._usual(written)
        before, after = self._around if add_special_tokens else ([], [])
        return [*before, *ids, *after]

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
        ids += self._without_control(text, first=first and not ids)
        if not self._ids.isdisjoint(ids):
            raise InvalidRequest("a message holds a control string that this model cannot read as text")
        return ids

    def _without_control(self, text: str, *, first: bool) -> list[int]:
        """`first`: nothing is before it in the prompt."""
        if self._copies is None:
            return list(self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])
        return list(self._copies[first].encode(text, add_special_tokens=False).ids)

    def _without_tokens(self) -> dict[bool, Tokenizer] | None:
        """The tokenizer without control tokens, by whether a text is the first; None for one in Python."""
        fast: Any = getattr(self._tokenizer, "backend_tokenizer", None)
        if not isinstance(fast, Tokenizer):
            return None
        described: Json = json.loads(fast.to_str())
        described |= {"post_processor": None, "truncation": None, "padding": None}
        kept = [one for one in described["added_tokens"] if one["content"] not in self._control]
        described["added_tokens"] = kept
        first = Tokenizer.from_str(json.dumps(described))
        # One that is not in the vocabulary gets another number where those before it are left out.
        same = [one for one in kept if first.token_to_id(one["content"]) == one["id"]]
        if same != kept:
            own = first.get_vocab_size(with_added_tokens=False)
            described["added_tokens"] = [one for one in same if one["id"] < own]
            first = Tokenizer.from_str(json.dumps(described))
        if not _without_prefix(described["pre_tokenizer"]):
            return {True: first, False: first}
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
        if name == "_tokenizer":  # of a copy that is not made yet
            raise AttributeError(name)
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def __call__(self, text: Any = None, *args: Any, **how: Any) -> Any:
        one = isinstance(text, str)
        texts: list[Any] = [text] if one else list(text or ())
        if not any(isinstance(each, str) and self._strings.is_hidden_in(each) for each in texts):
            return self._tokenizer(text, *args, **how)
        special = how.get("add_special_tokens", True)
        ids = [self._strings.encode(each, add_special_tokens=special) for each in texts]
        masks = [[1] * len(each) for each in ids]
        encoded = {"input_ids": ids[0] if one else ids, "attention_mask": masks[0] if one else masks}
        return BatchEncoding(encoded, tensor_type=how.get("return_tensors"), prepend_batch_axis=one)


def _added_tokens(tokenizer: Any) -> Mapping[int, Any]:
    try:
        return tokenizer.added_tokens_decoder
    except (AttributeError, NotImplementedError):  # as Mistral's own has none
        return {}


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(cast("Json", part).get("text"), str)


def one_of(strings: Iterable[str]) -> str:
    """A pattern for any of them, the longest that fits. A trie: tokenizers may add thousands, and alternatives in a row
    are tried one after the other at each place of a text."""
    trie: Json = {}
    for string in strings:
        node = trie
        for letter in string:
            node = node.setdefault(letter, {})
        node[""] = {}
    return _written(trie)


def _written(node: Json) -> str:
    ways = [re.escape(letter) + _written(inner) for letter, inner in node.items() if letter]
    if not ways:
        return ""
    together = ways[0] if len(ways) == 1 and "" not in node else f"(?:{'|'.join(ways)})"
    return f"{together}?" if "" in node else together


def _without_prefix(pre_tokenizer: Any) -> bool:
    """So that what is in the middle of a prompt is no first text, before which some put a blank: if any did."""
    if not isinstance(pre_tokenizer, dict):
        return False
    described = cast("Json", pre_tokenizer)
    changed = described.get("prepend_scheme") == "first"
    if changed:
        described["prepend_scheme"] = "never"
    return any([changed, *map(_without_prefix, described.get("pretokenizers") or ())])
