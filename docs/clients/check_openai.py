"""Checks of openai's own clients, Python and Node."""

from __future__ import annotations

import base64
import io
from typing import Any
from urllib.request import urlopen

from checks import (
    AGENT,
    ASKED,
    BATCHES,
    FORCED,
    HELLO,
    IGNORED,
    LONG,
    PICTURES,
    TEXTS,
    TOOL,
    UNKNOWN,
    WHIM,
    City,
    both_modes,
    data_url,
    embedding,
    here,
    of,
    png,
    text,
)

NAME = "openai (Python)"


def python() -> None:
    import openai

    client = openai.OpenAI(max_retries=0)
    _chat(client)
    _tools(client)
    _responses(client)
    _completions_and_embeddings(client)
    _images(client)


def _chat(client: Any) -> None:
    chat = client.chat.completions

    def streamed(where: str) -> Any:
        options = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 8}
        chunks = list(chat.create(model=text(where), messages=HELLO, **options))
        said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        return said and chunks[-1].usage.completion_tokens

    def parsed(where: str) -> Any:
        asked = chat.parse(model=text(where), messages=HELLO, response_format=City, max_tokens=60, temperature=0)
        return asked.choices[0].message.parsed

    def several(where: str) -> Any:
        found = chat.create(model=text(where), messages=HELLO, n=2, logprobs=True, top_logprobs=2, max_tokens=6)
        return found.choices[1].logprobs.content[0].top_logprobs

    def seeded(where: str) -> Any:
        options = {"seed": 5, "temperature": 1.0, "max_tokens": 12}
        texts = [chat.create(model=text(where), messages=HELLO, **options).choices[0].message.content for _ in "ab"]
        return texts[0] and texts[0] == texts[1]

    of(NAME, "chat")(lambda w: chat.create(model=text(w), messages=HELLO, max_tokens=8).choices[0].message.content)
    of(NAME, "stream")(streamed)
    of(NAME, "JSON schema")(parsed)
    of(NAME, "n, logprobs")(several)
    of(NAME, "seed")(seeded)


def _tools(client: Any) -> None:
    chat = client.chat.completions

    def answered(where: str) -> Any:
        options = {"model": text(where), "tools": [TOOL], "max_tokens": 60}
        message = chat.create(messages=ASKED, tool_choice=FORCED, **options).choices[0].message
        call = message.tool_calls[0]
        told = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        said = [*ASKED, message.model_dump(exclude_none=True), told]
        return call.function.name == "weather" and chat.create(messages=said, **options).usage.completion_tokens

    def streamed(where: str) -> Any:
        options = {"tools": [TOOL], "tool_choice": FORCED, "max_tokens": 60, "temperature": 0}
        pieces = 0
        with chat.stream(model=text(where), messages=ASKED, **options) as stream:
            for event in stream:
                pieces += event.type == "tool_calls.function.arguments.delta"
            choice = stream.get_final_completion().choices[0]
        return choice.finish_reason == "tool_calls" and pieces > 1 and choice.message.tool_calls[0].function.arguments

    def strict(where: str) -> Any:
        import openai

        tools = [openai.pydantic_function_tool(City, name="weather")]
        asked = {"model": text(where), "messages": ASKED, "tools": tools, "max_tokens": 60, "temperature": 0}
        free = chat.parse(**asked).choices[0].message
        forced = chat.parse(**asked, tool_choice=FORCED).choices[0].message.tool_calls[0]
        called = free.tool_calls[0].function.parsed_arguments if free.tool_calls else free.content
        return called and isinstance(forced.function.parsed_arguments, City)

    def turns(where: str) -> Any:
        said: list[Any] = [*ASKED]
        for _ in "ab":
            options = {"model": text(where), "tools": [TOOL], "tool_choice": FORCED, "max_tokens": 60}
            message = chat.create(messages=said, **options).choices[0].message
            said.append(message)
            said += [{"role": "tool", "tool_call_id": one.id, "content": "sunny"} for one in message.tool_calls]
        return chat.create(model=text(where), messages=said, max_tokens=8).usage.completion_tokens

    def unknown(where: str, url: str) -> Any:
        import openai

        lenient = openai.OpenAI(base_url=url, max_retries=0).chat.completions.with_raw_response
        asked: Any = {"model": text(where), "messages": HELLO, "max_tokens": 8, "extra_body": WHIM}
        return "whim" in lenient.create(**asked).headers[IGNORED]

    of(NAME, "tools")(answered)
    of(NAME, AGENT)(turns)
    of(NAME, UNKNOWN)(lambda w: both_modes(lambda url: unknown(w, url)))
    of(NAME, "tools, streamed")(streamed)
    of(NAME, "tools, strict")(strict)


def _responses(client: Any) -> None:
    brief: Any = {"max_output_tokens": LONG, "temperature": 0}

    def streamed(where: str) -> Any:
        with client.responses.stream(model=text(where), input="Hello", **brief) as stream:
            return stream.get_final_response().output_text

    def called(where: str) -> Any:
        tool = {"type": "function", **TOOL["function"]}
        choice = {"type": "function", "name": "weather"}  # `required` would let a small model call again and again
        kinds: set[str] = set()
        said: list[Any] = [{"role": "user", "content": "The weather in Paris?"}]
        for _ in "ab":
            options = {"tools": [tool], "tool_choice": choice, **brief}
            with client.responses.stream(model=text(where), input=said, **options) as stream:
                kinds |= {event.type for event in stream}
                said += stream.get_final_response().output
            said.append({"type": "function_call_output", "call_id": said[-1].call_id, "output": "sunny"})
        last = client.responses.create(model=text(where), input=said, tools=[tool], **brief)
        return "response.function_call_arguments.delta" in kinds and last.output

    def parsed(where: str) -> Any:
        options = {"text_format": City, "max_output_tokens": 60}
        return client.responses.parse(model=text(where), input="Hello", **options).output_parsed

    def answered(where: str) -> Any:
        return client.responses.create(model=text(where), input="Hello", **brief).output_text

    def background(where: str) -> Any:
        options: Any = {"model": text(where), "input": "Hello", "background": True, **brief}
        with client.responses.create(**options, stream=True) as events:
            first = next(iter(events))
        number, behind = first.response.id, first.sequence_number
        *_, last = client.responses.retrieve(number, stream=True, starting_after=behind)
        whole = client.responses.retrieve(number).output_text
        items = client.responses.input_items.list(number).data
        client.responses.delete(number)
        ended = client.responses.cancel(client.responses.create(**options).id).status
        return whole and last.response.output_text == whole and len(items) == 1 and ended == "cancelled"

    of(NAME, "responses")(answered)
    of(NAME, "responses, streamed")(streamed)
    of(NAME, "responses, tools")(called)
    of(NAME, "responses, JSON schema")(parsed)
    of(NAME, "background")(background)


def _completions_and_embeddings(client: Any) -> None:
    def prompts(where: str) -> Any:
        asked: Any = {"model": text(where), "prompt": ["The sky is", "Two and two"], "max_tokens": 4}
        found = client.completions.create(**asked, echo=True, logprobs=2).choices
        pieces = [one.choices[0].index for one in client.completions.create(**asked, stream=True, logprobs=2)]
        echoed = [one.text.startswith(prompt) for one, prompt in zip(found, asked["prompt"], strict=True)]
        return all(echoed) and set(pieces) == {0, 1} and found[1].logprobs.token_logprobs[0] is None

    def embedded(where: str, texts: list[str]) -> Any:
        found = client.embeddings.create(model=embedding(where), input=texts).data
        return len(found) == len(texts) and found[-1].embedding

    of(NAME, "prompt lists, echo, logprobs")(prompts)
    of(NAME, "embeddings")(lambda w: embedded(w, ["a", "b"]))
    of(NAME, BATCHES)(lambda w: embedded(w, TEXTS))


def _images(client: Any) -> None:
    """Only this gateway makes images: no server that is asked remotely does, as far as Penstock knows them."""
    drawn: Any = {"model": "tiny-image-generation", "prompt": "a red square", "size": "64x64"}

    def generated() -> Any:
        found = client.images.generate(**drawn, response_format="b64_json")
        linked = client.images.generate(**drawn, response_format="url")
        return base64.b64decode(found.data[0].b64_json)[:4] == b"\x89PNG" and urlopen(linked.data[0].url).read()

    def edited(picture: bytes) -> Any:
        image = ("a.png", io.BytesIO(picture), "image/png")
        return client.images.edit(model="tiny-image-editing", image=image, prompt="make it blue", size="64x64").data

    def seen(picture: bytes) -> Any:
        shown = {"type": "image_url", "image_url": {"url": data_url(picture)}}
        asked: Any = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, shown]}]
        found = client.chat.completions.create(model="tiny-image-to-text", messages=asked, max_tokens=8)
        return found.usage.completion_tokens

    def streamed() -> Any:
        with client.images.generate(**drawn, stream=True, partial_images=1) as stream:
            kinds = [event.type for event in stream]
        return kinds == ["image_generation.partial_image", "image_generation.completed"]

    of(NAME, "images")(here(generated))
    of(NAME, "images, streamed")(here(streamed))
    of(NAME, "image edits")(here(lambda: edited(png(64))))
    of(NAME, "chat with images")(here(lambda: seen(png())))
    large = PICTURES["image of 5 MB"]
    of(NAME, "image of 5 MB")(here(lambda: seen(large) and edited(large)))
