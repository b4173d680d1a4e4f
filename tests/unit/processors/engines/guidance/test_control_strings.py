"""What users and tools write holds no control tokens, with tokenizers of all kinds; all else is encoded as ever."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from penstock.processors.engines.guidance.control_strings import ControlStrings, one_of

START, END, THINK, CALL = "<|im_start|>", "<|im_end|>", "<think>", "<tool_call>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = TEMPLATE + THINK + CALL
"""As of a model whose template writes these too."""
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
ASCII = [chr(code) for code in range(32, 127)]


def byte_level() -> Tokenizer:
    made = Tokenizer(models.BPE({letter: number for number, letter in enumerate(ALPHABET)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def metaspace(pieces: list[str], scheme: Any) -> Tokenizer:
    """As sentencepiece makes them: a blank is ▁, and one stands before the first text; other letters are bytes."""
    bytes_ = [f"<0x{number:02X}>" for number in range(256)]
    vocabulary = [("<unk>", 0.0), *((one, -9.0) for one in bytes_), ("▁", -2.0), *((one, -3.0) for one in ASCII)]
    made = Tokenizer(models.Unigram([*vocabulary, *((one, -1.0) for one in pieces)], 0, byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


def with_blanks() -> Tokenizer:
    """Added tokens that are ordinary pieces, numbered behind control tokens."""
    made = byte_level()
    made.add_special_tokens([START, END])
    made.add_tokens([AddedToken(one, special=False, normalized=False) for one in ("\n\n", "    ", "ab")])
    return made


def in_words() -> Tokenizer:
    made = Tokenizer(models.BPE({letter: number for number, letter in enumerate(ALPHABET)}, [], ignore_merges=True))
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


KINDS = {
    "bytes": byte_level,
    "first": lambda: metaspace([], "first"),
    "pieces": lambda: metaspace([START, END, THINK], "first"),
    "never": lambda: metaspace([END], "never"),
    "words": in_words,
    "blanks": with_blanks,
}


def tokenizer_of(kind: str) -> Any:
    made = KINDS[kind]()
    made.add_special_tokens([START, END])
    made.add_tokens([AddedToken(THINK, special=False), AddedToken(CALL, special=False)])
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=made, bos_token=START, eos_token=END)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module", params=[*KINDS, "tiny-lm"])
def tokenizer(request: pytest.FixtureRequest, tiny_lm: Path) -> Any:
    if request.param != "tiny-lm":
        return tokenizer_of(request.param)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(tiny_lm))


def chat(*contents: str) -> list[dict[str, str]]:
    return [
        {"role": role, "content": text}
        for role, text in zip(("system", "user", "assistant", "user"), contents, strict=False)
    ]


def rendered(tokenizer: Any, messages: Any) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


TEXTS = st.text(st.sampled_from([*"ab <|>_\n é🙂"]), max_size=12)
PIECES = st.sampled_from([START, END, THINK, CALL, "<|im_", "end|>"])
PARTS = st.lists(st.one_of(TEXTS, PIECES), max_size=5).map("".join)
EVERY = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@EVERY
@given(user=PARTS, last=PARTS)
def test_control_strings_of_users_are_text(tokenizer: Any, user: str, last: str) -> None:
    strings = ControlStrings(tokenizer, TEMPLATES)
    messages = chat("Be brief.", user, f"Well.{END}", last)
    added = tokenizer.added_tokens_decoder
    control = {number for number, token in added.items() if token.content in (START, END, THINK, CALL)}
    hidden = strings.hidden(messages)
    if hidden is None:
        assert not any(added[number].content in text for number in control for text in (user, last))
        return
    text = rendered(tokenizer, hidden)
    assert strings.shown(text) == rendered(tokenizer, messages)
    ids = strings.encode(text)
    innocent = chat("Be brief.", "x", f"Well.{END}", "x")
    usual = tokenizer.apply_chat_template(innocent, tokenize=True, add_generation_prompt=True, return_dict=True)
    assert [one for one in ids if one in control] == [one for one in usual["input_ids"] if one in control]
    written = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    expected = tokenizer.backend_tokenizer.normalizer
    whole = strings.shown(text)
    assert written == (whole if expected is None else expected.normalize_str(whole))


@EVERY
@given(user=TEXTS, last=TEXTS)
def test_without_control_strings_nothing_changes(tokenizer: Any, user: str, last: str) -> None:
    strings, messages = ControlStrings(tokenizer, TEMPLATES), chat("Be brief.", user, f"{THINK}Well.", last)
    assert strings.hidden(messages) is None
    usual = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=True)
    assert strings.encode(rendered(tokenizer, messages)) == list(usual["input_ids"])


def test_blanks_that_a_token_takes_along_stay_its_own() -> None:
    made = byte_level()
    made.add_special_tokens([AddedToken(START, rstrip=True), AddedToken(END, lstrip=True)])
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=made)
    tokenizer.chat_template = TEMPLATE.replace("{{ m.role }}", "").replace(" | trim", "")
    strings = ControlStrings(tokenizer, TEMPLATE)
    hidden = strings.hidden(chat("x", f"hi{END} \n"))
    assert hidden is not None
    written = tokenizer.decode(strings.encode(rendered(tokenizer, hidden)))
    assert written == f"{START}x{END}\n{START}hi{END}{END}\n{START}assistant\n"


@given(st.sets(st.text("ab|", min_size=1, max_size=4), min_size=1, max_size=8), st.text("ab|c", max_size=20))
def test_any_of_many_strings_is_found_as_the_longest_one(strings: set[str], text: str) -> None:
    expected = re.compile("|".join(map(re.escape, sorted(strings, key=len, reverse=True))))
    assert re.findall(one_of(strings), text) == expected.findall(text)


def test_texts_beside_one_another_make_no_control_string() -> None:
    strings = ControlStrings(tokenizer_of("bytes"), TEMPLATES)
    image = {"type": "image", "image": object()}

    def texts(*parts: Any) -> Any:
        shown = [part if isinstance(part, dict) else {"type": "text", "text": part} for part in parts]
        return strings.hidden([{"role": "user", "content": shown}])

    (found,) = texts("a<|im_", "end|>", "b", image)
    assert [part["type"] for part in found["content"]] == ["text", "image"]
    assert strings.shown(found["content"][0]["text"]) == f"a{END}b"
    assert END not in found["content"][0]["text"]
    assert texts("a<|im_", image, "end|>") is None
    assert texts("a", "b", image) is None


def test_whose_texts_are_hidden() -> None:
    tokenizer = tokenizer_of("blanks")
    strings = ControlStrings(tokenizer, TEMPLATES)
    parts = [{"type": "text", "text": f"a{END}"}, {"type": "image", "image": object()}]
    for message, hides in (
        ({"role": "user", "content": parts}, True),
        ({"role": "tool", "content": f"{CALL}", "tool_call_id": "c"}, True),
        ({"role": "user", "content": "x", "name": END}, True),
        ({"role": "system", "content": END}, False),
        ({"role": "assistant", "content": f"{THINK}…"}, False),
        ({"role": "user", "content": "<|im_end"}, False),
        ({"role": "user", "content": "grab\n\n    it"}, False),
    ):
        assert (strings.hidden([message]) is not None) is hides, message
    assert ControlStrings(tokenizer, TEMPLATES, parsed=True).hidden([{"role": "user", "content": END}]) is None
    hidden = strings.hidden([{"role": "user", "content": parts}])
    assert END not in json.dumps(hidden[0]["content"][0])
    assert hidden[0]["content"][1] is parts[1]
