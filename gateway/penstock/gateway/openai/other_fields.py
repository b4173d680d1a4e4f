"""Fields of bodies that Penstock does not act on: what passes as harmless, what is refused, what may be ignored.

A field that no body has passes with a value that would not change the output. docs/decisions/0062 tells how the
setting `gateway.unknown_fields` decides about the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel

from penstock.gateway.openai.nested_fields import Known, unknown_in
from penstock.schemas.errors import UnsupportedParameter
from penstock.schemas.finite_json import place_of

IGNORED_HEADER = "penstock-ignored-fields"
MOST_NAMED = 50
UnknownFields = Literal["refuse", "ignore"]


class Anything:
    """Marks a field whose every value is harmless: it never reaches the output."""


ANYTHING = Anything()
Harmless = Mapping[str, Sequence[Any] | Anything]


_TEXT, _NEWER = "chat completion response", "chat response"
_POLICY: Sequence[tuple[str, Sequence[Any] | Anything, str]] = [
    (_TEXT, ANYTHING, "cache_prompt cache_salt id_slot include_reasoning keep_alive request_id"),
    (_TEXT, ANYTHING, "prompt_cache_key prompt_cache_options safety_identifier"),
    (_TEXT, (), "allowed_token_ids guided_choice guided_grammar guided_json guided_regex structured_outputs"),
    (_TEXT, (), "prompt_logprobs"),
    (_TEXT, (True,), "add_generation_prompt detokenize skip_special_tokens spaces_between_special_tokens"),
    (_TEXT, (False,), "continue_final_message early_stopping include_stop_str_in_output use_beam_search"),
    (_TEXT, (False,), "return_token_ids return_tokens_as_token_ids"),
    (_TEXT, (0,), "no_repeat_ngram_size"),
    (_TEXT, (1,), "length_penalty typical_p"),
    (_TEXT, ([],), "bad_words documents logits_processors stop_token_ids"),
    (_TEXT, ({},), "extra_body mm_processor_kwargs"),
    (_NEWER, ANYTHING, "prompt_cache_retention"),
    (_NEWER, (), "moderation"),
    (_NEWER, (False,), "echo"),
    (_NEWER, (1,), "best_of"),
    ("chat", ANYTHING, "store"),
    ("chat", (), "audio web_search_options"),
    ("chat", (False,), "add_special_tokens"),
    ("chat", ([],), "functions"),
    ("chat", ("none", "auto"), "function_call"),
    ("chat", (["text"],), "modalities"),
    ("completion", (True,), "add_special_tokens"),
    ("completion", ("",), "suffix"),
    ("response", ANYTHING, "max_tool_calls"),  # of tools that OpenAI runs
    ("response", (), "access_programs context_management prompt"),
    ("response", ({"context_compression": "auto"}, {"context_compression": "disabled"}), "image"),
    ("response", ("disabled", "auto"), "truncation"),
    ("image", ANYTHING, "moderation"),
    ("image", (), "style"),
    ("image", ("auto", "standard"), "quality"),
    ("image", ("auto", "opaque"), "background"),
    ("image", ("low",), "input_fidelity"),
]
"""Fields of OpenAI, vLLM, SGLang, llama.cpp and Ollama that no body has: the routes, the values that are what Penstock
does anyway, and the names."""


def _harmless(route: str) -> Harmless:
    return {name: values for routes, values, names in _POLICY if route in routes.split() for name in names.split()}


HARMLESS_CHAT, HARMLESS_COMPLETION, HARMLESS_RESPONSE = map(_harmless, _TEXT.split())
HARMLESS_EMBEDDING, HARMLESS_IMAGE = map(_harmless, ("embedding", "image"))
_NUMBERS = re.compile(r"\[[0-9]+\]")
_NAME = re.compile(r"[A-Za-z0-9_.\[\]-]{1,64}")


def refuse_unsupported(body: BaseModel, harmless: Harmless, elsewhere: Iterable[str] = ()) -> None:
    """Raises UnsupportedParameter for a field that is not typed and has a value which would change something.

    `elsewhere`: fields that the body's `penstock` has.
    """
    for name, value in (body.model_extra or {}).items():
        if _passes(name, value, harmless):
            continue
        accepted = harmless.get(name)
        if accepted is None:
            hint = f': send it as extra_body={{"penstock": {{"{name}": …}}}}' if name in elsewhere else ""
            raise UnsupportedParameter(f"{name} is not supported{hint}", param=name)
        only = ", ".join(repr(item) for item in accepted) if not isinstance(accepted, Anything) else ""
        raise UnsupportedParameter(f"{name} is not supported (accepted, without effect: {only or 'null'})", param=name)


def set_aside(body: BaseModel, harmless: Harmless, nested: Mapping[str, Known], unknown: UnknownFields) -> list[str]:
    """The names of the given fields that have no effect. With `ignore` those that would be refused are taken out.

    A field with the value that stands for what happens anyway is not named. `nested`: the names within fields that are
    known. With `refuse` it raises UnsupportedParameter for others.
    """
    extra = body.model_extra or {}
    ignored: list[str] = []
    for name, value in list(extra.items()):
        if not _passes(name, value, harmless):
            if unknown == "refuse":
                continue
            del extra[name]
            ignored.append(name)
        elif value is not None and isinstance(harmless.get(name), Anything):
            ignored.append(name)
    for name, known in nested.items():
        ignored += set_aside_within(getattr(body, name, None), known, name, unknown)
    return ignored


def set_aside_within(value: Any, known: Known, field: str, unknown: UnknownFields) -> list[str]:
    """The places of the unknown names in the value of a field. They are taken out; with `refuse` the first that has an
    effect is refused: raises UnsupportedParameter."""
    found: dict[str, None] = {}
    for fields, name, accepted, path in unknown_in(value, known, (field,)):
        if _passes(name, fields.pop(name), {name: accepted}):
            continue
        if unknown == "refuse":
            place = place_of((*path, name))
            raise UnsupportedParameter(f"{place} is not supported", param=place)
        if len(found) < MOST_NAMED:
            found[_NUMBERS.sub("[]", place_of((*path, name)))] = None
    return list(found)


def ignored_header(names: Iterable[str]) -> dict[str, str]:
    """The header that names them; what is no plain name would not be a header's text, and is left out."""
    plain = [name for name in names if _NAME.fullmatch(name)][:MOST_NAMED]
    return {IGNORED_HEADER: ", ".join(plain)} if plain else {}


def _passes(name: str, value: Any, harmless: Harmless) -> bool:
    accepted = harmless.get(name, ())
    return value is None or isinstance(accepted, Anything) or any(_same(value, item) for item in accepted)


def _same(value: Any, accepted: Any) -> bool:
    return value == accepted and isinstance(value, bool) == isinstance(accepted, bool)
