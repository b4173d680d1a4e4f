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

OF_TEXT_SERVERS: Harmless = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "best_of": (1,),
    "cache_prompt": ANYTHING,
    "cache_salt": ANYTHING,
    "continue_final_message": (False,),
    "detokenize": (True,),
    "documents": ([],),
    "early_stopping": (False,),
    "echo": (False,),
    "extra_body": ({},),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "id_slot": ANYTHING,
    "include_reasoning": ANYTHING,
    "include_stop_str_in_output": (False,),
    "keep_alive": ANYTHING,
    "length_penalty": (1,),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "no_repeat_ngram_size": (0,),
    "prompt_logprobs": (),
    "request_id": ANYTHING,
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": ([],),
    "structured_outputs": (),
    "typical_p": (1,),
    "use_beam_search": (False,),
}
"""Of vLLM, SGLang, llama.cpp and Ollama, for text: each with the values that are what Penstock does anyway."""
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
