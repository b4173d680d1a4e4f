"""How a model that reads images is asked, by what its folder brings. Imported in an engine's process only.

Three ways: a *chat* model has a chat template, whose messages hold images among text; a *prefixed* one (BLIP, Florence)
reads an image and perhaps a text before its answer; a *bare* one (VisionEncoderDecoder) reads an image alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from jinja2 import TemplateError

from penstock.processors.engines.base import Message
from penstock.processors.engines.guidance.control_strings import PARSED_OPTION, ControlStrings, HidingTokenizer
from penstock.processors.engines.image_messages import CAPTION_PROMPT
from penstock.processors.engines.process.weights import code_option
from penstock.schemas.errors import InvalidRequest, UnsupportedParameter
from penstock.schemas.texts import shortened

Inputs = dict[str, Any]
"""Tensors by name, of one prompt: what the model's `generate` takes."""


class Prompts:
    """The processor of a model's folder, asked in the way that it knows."""

    def __init__(self, folder: str, options: Mapping[str, Any]) -> None:
        self._processor, self.tokenizer, self._image_processor = _load(folder, options)
        self._caption_prompt: str | None = options.get("caption_prompt")
        template = getattr(self._processor, "chat_template", None) or getattr(self.tokenizer, "chat_template", None)
        parsed = bool(options.get(PARSED_OPTION, False))
        self._strings = ControlStrings(self.tokenizer, str(template or ""), parsed=parsed)
        if self._processor is not None:
            self._processor.tokenizer = HidingTokenizer(self.tokenizer, self._strings)

    @property
    def chats(self) -> bool:
        """Whether it answers messages."""
        return bool(getattr(self._processor, "chat_template", None) or getattr(self.tokenizer, "chat_template", None))

    def caption(self, image: Any, prompt: str | None) -> Inputs:
        """For one image and a question about it, or none. Raises UnsupportedParameter for a question nobody reads."""
        if self.chats:
            text = prompt or self._caption_prompt or CAPTION_PROMPT
            parts = [{"type": "image", "image": image}, {"type": "text", "text": text}]
            return self.chat([{"role": "user", "content": text, "parts": parts}])
        if self._processor is None:
            if prompt:
                raise UnsupportedParameter("payload.prompt: this model only describes images", param="payload.prompt")
            return dict(self._image_processor(images=image, return_tensors="pt"))
        text = prompt or self._caption_prompt
        named = {} if text is None else {"text": text}
        return dict(self._processor(images=image, return_tensors="pt", **named))

    def chat(self, messages: Sequence[Message]) -> Inputs:
        """For messages, each with `parts` or only text. Raises InvalidRequest for what the template refuses."""
        if not self.chats:
            raise UnsupportedParameter("payload.messages: this model does not chat", param="payload.messages")
        chat = [{"role": one["role"], "content": _content(one)} for one in messages]
        try:
            return dict(
                self._processor.apply_chat_template(
                    self._strings.hidden(chat) or chat,
                    add_generation_prompt=True,
                    tokenize=True,
                    return_dict=True,
                    return_tensors="pt",
                )
            )
        except TemplateError as error:
            raise InvalidRequest(
                shortened(f"the model's chat template refuses these messages: {error}", 300), param="payload.messages"
            ) from error


def _content(message: Message) -> list[dict[str, Any]]:
    """As chat templates of such models want it: always a list of parts."""
    return list(message.get("parts") or ({"type": "text", "text": message["content"]},))


def _load(folder: str, options: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """(processor or None, tokenizer, image processor)"""
    from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer

    code = code_option(options)
    processor = _or_none(partial(AutoProcessor.from_pretrained, folder, **code))
    if hasattr(processor, "tokenizer") and hasattr(processor, "image_processor"):
        return processor, processor.tokenizer, processor.image_processor
    # A folder with the two but no class that joins them.
    tokenizer = AutoTokenizer.from_pretrained(folder, **code)
    return None, tokenizer, AutoImageProcessor.from_pretrained(folder, **code)


def _or_none(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except (OSError, ValueError):
        return None
