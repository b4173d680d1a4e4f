"""Checks of LlamaIndex, LiteLLM, Haystack and Instructor."""

from __future__ import annotations

import os
from typing import Any

from checks import (
    AGENT,
    ASKED,
    BATCHES,
    CITY,
    FORCED,
    HELLO,
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
    text,
)


def llama_index() -> None:
    from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
    from llama_index.core.tools import FunctionTool
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding
    from llama_index.llms.openai_like import OpenAILike

    name, hello = "LlamaIndex", ChatMessage(role="user", content="The weather in Paris?")
    url = os.environ["OPENAI_BASE_URL"]

    def weather(city: str) -> str:
        """Tells the weather."""
        return city

    def model(where: str, **options: Any) -> Any:
        given = {
            "is_chat_model": True,
            "max_tokens": 60,
            "temperature": 0,
            "max_retries": 0,
            "api_base": url,
            **options,
        }
        return OpenAILike(model=text(where), api_key="x", is_function_calling_model=True, **given)

    def turns(where: str, calls: int) -> Any:
        asked, said, tools = model(where), [hello], [FunctionTool.from_defaults(weather)]
        for _ in range(calls):
            answer = asked.chat_with_tools(tools, chat_history=said, tool_required=True)
            said.append(answer.message)
            for call in asked.get_tool_calls_from_response(answer):
                told = {"tool_call_id": call.tool_id}
                said.append(ChatMessage(role="tool", content="sunny", additional_kwargs=told))
        return asked.chat(said, max_tokens=8).raw.usage.completion_tokens

    def unknown(where: str, base: str) -> Any:
        return model(where, api_base=base, additional_kwargs={"extra_body": WHIM}).chat([hello]).message.content

    def seen(picture: bytes) -> Any:
        blocks = [TextBlock(text="What is this?"), ImageBlock(image=picture, image_mimetype="image/png")]
        asked = [ChatMessage(role="user", blocks=blocks)]
        return model("tiny-image-to-text", max_tokens=8).chat(asked).raw.usage.completion_tokens

    def embedded(where: str, texts: list[str]) -> Any:
        client = OpenAILikeEmbedding(model_name=embedding(where), api_base=url, api_key="x")
        return len(client.get_text_embedding_batch(texts)) == len(texts)

    of(name, "chat")(lambda w: model(w).chat([hello]).message.content)
    of(name, "stream")(lambda w: [one.delta for one in model(w).stream_chat([hello]) if one.delta])
    of(name, "tools")(lambda w: turns(w, 1))
    of(name, AGENT)(lambda w: turns(w, 2))
    of(name, UNKNOWN)(lambda w: both_modes(lambda base: unknown(w, base)))
    of(name, "embeddings")(lambda w: embedded(w, ["a"]))
    of(name, BATCHES)(lambda w: embedded(w, TEXTS))
    for feature, picture in PICTURES.items():
        of(name, feature)(here(lambda picture=picture: seen(picture)))


def litellm() -> None:
    import litellm

    litellm.suppress_debug_info = True
    name, url = "LiteLLM", os.environ["OPENAI_BASE_URL"]

    def ask(where: str, **options: Any) -> Any:
        given = {"messages": HELLO, "max_tokens": 60, "temperature": 0, "num_retries": 0, "api_base": url, **options}
        return litellm.completion(model=f"openai/{text(where)}", **given)

    def answered(where: str, **options: Any) -> Any:
        options |= {"api_base": url, "max_output_tokens": LONG, "temperature": 0}
        return litellm.responses(model=f"openai/{text(where)}", input="Hello", **options)

    def background(where: str) -> Any:
        told: dict[str, Any] = {"api_base": url, "custom_llm_provider": "openai"}
        number = answered(where, background=True).id
        *_, last = litellm.get_responses(number, stream=True, **told)
        litellm.delete_responses(number, **told)
        return last.response.output

    def embedded(where: str, texts: list[str]) -> Any:
        return len(litellm.embedding(model=f"openai/{embedding(where)}", input=texts, api_base=url).data) == len(texts)

    def prompts(where: str) -> Any:
        asked: Any = {"prompt": ["The sky is", "Two and two"], "max_tokens": 4, "echo": True, "logprobs": 2}
        found = litellm.text_completion(model=f"text-completion-openai/{text(where)}", api_base=url, **asked).choices
        return found[1].text.startswith("Two and two") and found[1].logprobs

    def schema(where: str) -> Any:
        return City.model_validate_json(ask(where, response_format=City).choices[0].message.content)

    def called(where: str) -> Any:
        return ask(where, messages=ASKED, tools=[TOOL], tool_choice=FORCED).choices[0].message.tool_calls

    def turns(where: str) -> Any:
        said: list[Any] = [*ASKED]
        for _ in "ab":
            said.append(ask(where, messages=said, tools=[TOOL], tool_choice=FORCED).choices[0].message)
            said += [
                {"role": "tool", "tool_call_id": one.id, "name": "weather", "content": "sunny"}
                for one in said[-1].tool_calls
            ]
        return ask(where, messages=said, max_tokens=8).usage.completion_tokens

    def pieces(where: str) -> Any:
        options = {"tools": [TOOL], "tool_choice": FORCED, "stream": True}
        chunks = list(ask(where, messages=ASKED, **options))
        whole: Any = litellm.stream_chunk_builder(chunks)
        return sum(bool(one.choices[0].delta.tool_calls) for one in chunks) > 2 and whole.choices[0].message.tool_calls

    def seen(picture: bytes) -> Any:
        shown = {"type": "image_url", "image_url": {"url": data_url(picture)}}
        asked = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, shown]}]
        return ask("tiny-image-to-text", messages=asked, max_tokens=8).usage.completion_tokens

    of(name, "chat")(lambda w: ask(w).choices[0].message.content)
    of(name, "stream")(lambda w: [one for one in ask(w, stream=True) if one.choices[0].delta.content])
    of(name, "tools")(called)
    of(name, AGENT)(turns)
    of(name, UNKNOWN)(lambda w: both_modes(lambda base: ask(w, extra_body=WHIM, max_tokens=8, api_base=base)))
    of(name, "tools, streamed")(pieces)
    of(name, "JSON schema")(schema)
    of(name, "n, logprobs")(lambda w: ask(w, n=2, logprobs=True).choices[1].logprobs)
    of(name, "responses")(lambda w: answered(w).output)
    of(name, "background")(background)
    of(name, "prompt lists, echo, logprobs")(prompts)
    of(name, "embeddings")(lambda w: embedded(w, ["a"]))
    of(name, BATCHES)(lambda w: embedded(w, TEXTS))
    for feature, picture in PICTURES.items():
        of(name, feature)(here(lambda picture=picture: seen(picture)))


def haystack() -> None:
    from haystack import Document
    from haystack.components.embedders import OpenAIDocumentEmbedder
    from haystack.components.generators import OpenAIImageGenerator
    from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
    from haystack.dataclasses import ChatMessage, ImageContent
    from haystack.tools import Tool

    name, hello = "Haystack", ChatMessage.from_user("The weather in Paris?")
    weather = Tool(name="weather", description="The weather", parameters=CITY, function=lambda city: f"sunny in {city}")

    def ask(
        where: str, said: list[Any], made: Any = OpenAIChatGenerator, base: str | None = None, **options: Any
    ) -> Any:
        given: dict[str, Any] = {"max_retries": 0, "api_base_url": base or os.environ["OPENAI_BASE_URL"]}
        kept = {key: options.pop(key) for key in ("streaming_callback", "tools") if key in options}
        limit = {"max_output_tokens": LONG} if made is OpenAIResponsesChatGenerator else {"max_tokens": 60}
        return made(model=text(where), generation_kwargs={"temperature": 0, **limit, **options}, **given, **kept).run(
            said
        )["replies"][0]

    def streamed(where: str, made: Any = OpenAIChatGenerator, **options: Any) -> Any:
        pieces: list[Any] = []
        return ask(where, [hello], made, streaming_callback=pieces.append, **options) and len(pieces) > 2 and pieces

    def turns(where: str, calls: int) -> Any:
        said: list[Any] = [hello]
        for _ in range(calls):
            said.append(ask(where, said, tools=[weather], tool_choice="required"))
            said += [ChatMessage.from_tool("sunny", origin=call) for call in said[-1].tool_calls]
        return (
            len(said) > 2 * calls and ask(where, said, tools=[weather], max_tokens=8).meta["usage"]["completion_tokens"]
        )

    def embedded(where: str, texts: list[str]) -> Any:
        client = OpenAIDocumentEmbedder(
            model=embedding(where), progress_bar=False, max_retries=0, raise_on_failure=True
        )
        found = client.run([Document(content=one) for one in texts])["documents"]
        return len(found) == len(texts) and all(one.embedding for one in found)

    def seen(picture: bytes) -> Any:
        image = ImageContent(base64_image=data_url(picture).split(",")[1], mime_type="image/png")
        asked = ChatMessage.from_user(content_parts=["What is this?", image])
        return ask("tiny-image-to-text", [asked], max_tokens=8).meta["usage"]["completion_tokens"]

    def drawn() -> Any:
        return OpenAIImageGenerator(model="tiny-image-generation", size="64x64").run("a red square")["images"]  # pyright: ignore

    responses = OpenAIResponsesChatGenerator
    of(name, "chat")(lambda w: ask(w, [hello]).text)
    of(name, "stream")(streamed)
    of(name, "tools")(lambda w: turns(w, 1))
    of(name, AGENT)(lambda w: turns(w, 2))
    of(name, "tools, streamed")(lambda w: streamed(w, tools=[weather], tool_choice="required"))
    of(name, "JSON schema")(lambda w: City.model_validate_json(ask(w, [hello], response_format=City).text))
    of(name, UNKNOWN)(lambda w: both_modes(lambda base: ask(w, [hello], base=base, extra_body=WHIM).text))
    of(name, "responses")(lambda w: ask(w, [hello], responses).text)
    of(name, "responses, streamed")(lambda w: streamed(w, responses))
    of(name, "embeddings")(lambda w: embedded(w, ["a"]))
    of(name, BATCHES)(lambda w: embedded(w, TEXTS))
    of(name, "images")(here(drawn))
    for feature, picture in PICTURES.items():
        of(name, feature)(here(lambda picture=picture: seen(picture)))


def instructor() -> None:
    import instructor
    from openai import OpenAI

    def ask(where: str, mode: Any, base: str | None = None, **options: Any) -> Any:
        client = instructor.from_openai(OpenAI(max_retries=0, base_url=base), mode=mode)
        options = {"response_model": City, "max_retries": 0, "max_tokens": 60, "temperature": 0, **options}
        return isinstance(client.chat.completions.create(model=text(where), messages=HELLO, **options), City)

    modes = instructor.Mode
    of("Instructor", "tools")(lambda w: ask(w, modes.TOOLS))
    of("Instructor", "JSON schema")(lambda w: ask(w, modes.JSON_SCHEMA))
    of("Instructor", "tools, strict")(lambda w: ask(w, modes.TOOLS_STRICT))
    of("Instructor", UNKNOWN)(lambda w: both_modes(lambda base: ask(w, modes.JSON_SCHEMA, base, extra_body=WHIM)))
