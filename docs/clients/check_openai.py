"""Checks of openai's own clients, Python and Node."""

from __future__ import annotations

import base64
import io
import os
import subprocess
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from checks import (
    ASKED,
    FORCED,
    HELLO,
    HERE_ONLY,
    IGNORED,
    LENIENT,
    LONG,
    TOOL,
    WHIM,
    Check,
    City,
    embedding,
    image_url,
    of,
    png,
    text,
)

NAME, NODE = "openai (Python)", "openai (Node)"


def python() -> None:
    import openai

    client = openai.OpenAI(max_retries=0)
    _chat(client)
    _tools(client)
    _other(client)
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

    def unknown(where: str) -> Any:
        import openai

        asked: Any = {"model": text(where), "messages": HELLO, "max_tokens": 8, "extra_body": WHIM}
        try:
            chat.create(**asked)
        except openai.BadRequestError as error:
            lenient = openai.OpenAI(base_url=os.environ[LENIENT], max_retries=0).chat.completions.with_raw_response
            return error.param == "use_beam_search" and "whim" in lenient.create(**asked).headers[IGNORED]

    of(NAME, "tools")(answered)
    of(NAME, "tools, three turns")(turns)
    of(NAME, "unknown fields, both modes")(unknown)
    of(NAME, "tools, streamed")(streamed)
    of(NAME, "tools, strict")(strict)


def _other(client: Any) -> None:
    def streamed(where: str) -> Any:
        with client.responses.stream(model=text(where), input="Hello", max_output_tokens=LONG) as stream:
            return stream.get_final_response().output_text

    def called(where: str) -> Any:
        tool = {"type": "function", **TOOL["function"]}
        choice = {"type": "function", "name": "weather"}  # `required` would let a small model call again and again
        options = {"tools": [tool], "tool_choice": choice, "max_output_tokens": LONG}
        with client.responses.stream(model=text(where), input="The weather in Paris?", **options) as stream:
            kinds = [event.type for event in stream]
            output = stream.get_final_response().output
        return "response.function_call_arguments.delta" in kinds and output[0].arguments

    def parsed(where: str) -> Any:
        options = {"text_format": City, "max_output_tokens": 60}
        return client.responses.parse(model=text(where), input="Hello", **options).output_parsed

    def answered(where: str) -> Any:
        return client.responses.create(model=text(where), input="Hello", max_output_tokens=LONG).output_text

    of(NAME, "responses")(answered)
    of(NAME, "responses, streamed")(streamed)
    of(NAME, "responses, tools")(called)
    of(NAME, "responses, JSON schema")(parsed)
    of(NAME, "embeddings")(lambda w: client.embeddings.create(model=embedding(w), input=["a", "b"]).data[1].embedding)


def _images(client: Any) -> None:
    """Only this gateway makes images: no server that is asked remotely does, as far as Penstock knows them."""

    def generated(where: str) -> Any:
        options = {"model": "tiny-image-generation", "prompt": "a red square", "size": "64x64"}
        if where == "remote":
            return HERE_ONLY
        found = client.images.generate(**options, response_format="b64_json")
        linked = client.images.generate(**options, response_format="url")
        return base64.b64decode(found.data[0].b64_json)[:4] == b"\x89PNG" and urlopen(linked.data[0].url).read()

    def edited(where: str) -> Any:
        if where == "remote":
            return HERE_ONLY
        image = ("a.png", io.BytesIO(png(64)), "image/png")
        return client.images.edit(model="tiny-image-editing", image=image, prompt="make it blue").data

    def seen(where: str) -> Any:
        if where == "remote":
            return HERE_ONLY
        content = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": image_url()}}]
        asked: Any = [{"role": "user", "content": content}]
        found = client.chat.completions.create(model="tiny-image-to-text", messages=asked, max_tokens=8)
        return found.usage.completion_tokens

    def streamed(where: str) -> Any:
        if where == "remote":
            return HERE_ONLY
        options = {"model": "tiny-image-generation", "prompt": "a red square", "size": "64x64"}
        with client.images.generate(**options, stream=True, partial_images=1) as stream:
            kinds = [event.type for event in stream]
        return kinds == ["image_generation.partial_image", "image_generation.completed"]

    of(NAME, "images")(generated)
    of(NAME, "images, streamed")(streamed)
    of(NAME, "image edits")(edited)
    of(NAME, "chat with images")(seen)


def node(url: str, folder: Path) -> None:
    script = Path(__file__).with_name("check.mjs")

    def check(feature: str) -> Check:
        def run(where: str) -> str:
            asked = [feature, embedding(where) if feature == "embeddings" else text(where), where]
            command = ["node", str(script), url, *asked]
            env = {**os.environ, "PICTURE": image_url()}
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=env)
            if done.returncode:
                raise RuntimeError(done.stderr[-300:])
            return done.stdout.strip()

        return run

    for feature in (
        "chat", "stream", "tools", "tools, streamed", "JSON schema", "n, logprobs", "responses", "responses, streamed",
        "embeddings", "images", "image edits", "chat with images",
    ):  # fmt: skip
        of(NODE, feature)(check(feature))
