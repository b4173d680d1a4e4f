"""Checks of frameworks of agents: openai-agents, pydantic-ai, smolagents, CrewAI and DSPy.

A small model calls tools badly. So an agent is made to call in its first turns; what counts is that all turns come.
"""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

from checks import (
    AGENT,
    ASKED,
    BATCHES,
    FORCED,
    LONG,
    PICTURES,
    TEXTS,
    TOOL,
    UNKNOWN,
    WHIM,
    City,
    Name,
    both_modes,
    data_url,
    embedding,
    here,
    of,
    text,
)


def openai_agents() -> None:
    from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
    from openai import AsyncOpenAI

    name = "openai-agents"
    chat, responses = OpenAIChatCompletionsModel, OpenAIResponsesModel

    def agent(kind: Any, where: str, base: str | None = None, **options: Any) -> Any:
        settings = ModelSettings(max_tokens=LONG, temperature=0, **options)
        served = kind(model=text(where), openai_client=AsyncOpenAI(max_retries=0, base_url=base))
        return Agent(name="a", instructions="Be brief.", model=served, model_settings=settings, reset_tool_choice=False)

    async def streamed(made: Any) -> Any:
        run = Runner.run_streamed(made, "Hello")
        async for _ in run.stream_events():
            pass
        return run.final_output

    def run(made: Any, asked: Any = "Hello") -> Any:
        return asyncio.run(Runner.run(made, asked)).final_output

    def turns(kind: Any, where: str, calls: int) -> Any:
        asked: list[str] = []

        @function_tool
        def weather(city: Name) -> str:
            """Tells the weather."""
            asked.append(city)
            if len(asked) == calls:
                made.model_settings.tool_choice = "none"
            return "sunny"

        made = agent(kind, where, tool_choice="required", parallel_tool_calls=False)
        made.tools = [weather]
        run(made)
        return len(asked) == calls

    def seen(kind: Any, picture: bytes) -> Any:
        shown = {"type": "input_image", "image_url": data_url(picture), "detail": "auto"}
        return run(agent(kind, "tiny-image-to-text"), [{"role": "user", "content": [shown]}])

    of(name, "chat")(lambda w: run(agent(chat, w)))
    of(name, "stream")(lambda w: asyncio.run(streamed(agent(chat, w))))
    of(name, "tools")(lambda w: turns(chat, w, 1))
    of(name, AGENT)(lambda w: turns(chat, w, 2) and turns(responses, w, 2))
    of(name, UNKNOWN)(lambda w: both_modes(lambda base: run(agent(chat, w, base, extra_body=WHIM))))
    of(name, "responses")(lambda w: run(agent(responses, w)))
    of(name, "responses, streamed")(lambda w: asyncio.run(streamed(agent(responses, w))))
    of(name, "responses, tools")(lambda w: turns(responses, w, 1))
    for feature, picture in PICTURES.items():
        of(name, feature)(here(lambda picture=picture: seen(chat, picture)))


def pydantic_ai() -> None:
    from pydantic_ai import Agent, BinaryContent, Embedder, NativeOutput, ToolOutput
    from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    name = "pydantic-ai"

    def agent(where: str, kind: Any = OpenAIChatModel, base: str | None = None, **options: Any) -> Any:
        provider = OpenAIProvider(base_url=base or os.environ["OPENAI_BASE_URL"], api_key="x")
        settings = {"temperature": 0, "max_tokens": LONG}
        return Agent(kind(text(where), provider=provider), **{"model_settings": settings, "retries": 0, **options})

    def turns(where: str, calls: int, kind: Any = OpenAIChatModel) -> Any:
        """The answer is a call too, of a tool that takes it."""
        asked: list[str] = []

        def forced(_: Any) -> Any:
            return {
                "temperature": 0,
                "max_tokens": LONG,
                "tool_choice": ["weather" if len(asked) < calls else "final_result"],
            }

        def weather(city: Name) -> str:
            """Tells the weather."""
            asked.append(city)
            return "sunny"

        made = agent(where, kind, output_type=ToolOutput(City), tools=[weather], model_settings=forced)
        return isinstance(made.run_sync("The weather in Paris?").output, City) and len(asked) >= calls

    async def streamed(made: Any) -> Any:
        async with made.run_stream("Hello") as run:
            return [piece async for piece in run.stream_text(delta=True)]

    def seen(picture: bytes) -> Any:
        image = BinaryContent(data=picture, media_type="image/png")
        return agent("tiny-image-to-text", model_settings={"max_tokens": 8}).run_sync(["What is this?", image]).output

    def embedded(where: str, texts: list[str]) -> Any:
        model = OpenAIEmbeddingModel(embedding(where), provider=OpenAIProvider())
        return len(Embedder(model).embed_documents_sync(texts).embeddings) == len(texts)

    of(name, "chat")(lambda w: agent(w).run_sync("Hello").output)
    of(name, "stream")(lambda w: asyncio.run(streamed(agent(w))))
    of(name, "tools")(lambda w: turns(w, 1))
    of(name, AGENT)(lambda w: turns(w, 2) and turns(w, 2, OpenAIResponsesModel))
    of(name, "JSON schema")(lambda w: agent(w, output_type=NativeOutput(City)).run_sync("Hello").output)
    of(name, UNKNOWN)(
        lambda w: both_modes(
            lambda base: agent(w, base=base, model_settings={"extra_body": WHIM}).run_sync("Hello").output
        )
    )
    of(name, "responses")(lambda w: agent(w, OpenAIResponsesModel).run_sync("Hello").output)
    of(name, "responses, streamed")(lambda w: asyncio.run(streamed(agent(w, OpenAIResponsesModel))))
    of(name, "responses, tools")(lambda w: turns(w, 1, OpenAIResponsesModel))
    of(name, "embeddings")(lambda w: embedded(w, ["a"]))
    of(name, BATCHES)(lambda w: embedded(w, TEXTS))
    for feature, picture in PICTURES.items():
        of(name, feature)(here(lambda picture=picture: seen(picture)))


def smolagents() -> None:
    from smolagents import ChatMessage, LogLevel, OpenAIModel, ToolCallingAgent, tool
    from smolagents.memory import ActionStep

    name = "smolagents"

    @tool
    def weather(city: str) -> str:
        """Tells the weather.

        Args:
            city: its name
        """
        return "sunny"

    def model(where: str, base: str | None = None, **options: Any) -> Any:
        kept = {"client_kwargs": {"max_retries": 0}, "temperature": 0, "max_tokens": 60, **options}
        return OpenAIModel(text(where), api_base=base or os.environ["OPENAI_BASE_URL"], api_key="x", **kept)

    def ask(served: Any, *content: Any) -> Any:
        parts = [{"type": "text", "text": "Hello"}, *content]
        return served.generate([ChatMessage(role="user", content=parts)]).content

    def turns(where: str, calls: int) -> Any:
        """After its last turn the agent is asked for an answer without tools."""
        made = ToolCallingAgent([weather], model(where), max_steps=calls, verbosity_level=LogLevel.OFF)
        answer = made.run("The weather in Paris?")
        steps = [one for one in made.memory.steps if isinstance(one, ActionStep)]
        return answer and len(steps) > calls and all(one.tool_calls or one.action_output for one in steps)

    def streamed(where: str) -> Any:
        said = [ChatMessage(role="user", content=[{"type": "text", "text": "Hello"}])]
        return [one.content for one in model(where).generate_stream(said) if one.content]

    def seen(picture: bytes) -> Any:
        return ask(model("tiny-image-to-text"), {"type": "image_url", "image_url": {"url": data_url(picture)}})

    of(name, "chat")(lambda w: ask(model(w)))
    of(name, "stream")(streamed)
    of(name, "tools")(lambda w: turns(w, 1))
    of(name, AGENT)(lambda w: turns(w, 2))
    of(name, UNKNOWN)(lambda w: both_modes(lambda base: ask(model(w, base, extra_body=WHIM))))
    for feature, picture in PICTURES.items():
        of(name, feature)(here(lambda picture=picture: seen(picture)))


def crewai() -> None:
    os.environ.update(CREWAI_DISABLE_TELEMETRY="true", OTEL_SDK_DISABLED="true", CREWAI_TRACING_ENABLED="false")
    import httpx
    from crewai import LLM, Agent, Crew, Task
    from crewai.llms.hooks.base import BaseInterceptor
    from crewai.tools import tool

    name = "CrewAI"

    def model(where: str, base: str | None = None, **options: Any) -> Any:
        kept = {"base_url": base or os.environ["OPENAI_BASE_URL"], "max_retries": 0, "temperature": 0, **options}
        return LLM(model=text(where), custom_openai=True, **{"max_tokens": 60, **kept})

    class Forced(BaseInterceptor[httpx.Request, httpx.Response]):
        """Makes the model call. CrewAI always leaves the choice to it."""

        def on_outbound(self, message: httpx.Request) -> httpx.Request:
            body = json.loads(message.content)
            if "tools" not in body:
                return message
            headers = {name: value for name, value in message.headers.items() if name != "content-length"}
            body["tool_choice"] = "required"
            return httpx.Request(message.method, message.url, headers=headers, json=body)

        def on_inbound(self, message: httpx.Response) -> httpx.Response:
            return message

    def turns(where: str, calls: int) -> Any:
        """After its last turn the agent is asked for an answer without tools."""
        asked: list[str] = []

        def weather(city: str) -> str:
            """Tells the weather."""
            asked.append(city)
            return f"sunny for {len(asked)} days"

        weather.__annotations__["city"] = Name  # CrewAI does not resolve names of this module
        served = model(where, interceptor=Forced())
        made = Agent(
            role="a",
            goal="g",
            backstory="b",
            llm=served,
            tools=[tool("weather")(weather)],
            max_iter=calls,
            verbose=False,
        )
        task = Task(description="The weather in Paris?", expected_output="a word", agent=made)
        return Crew(agents=[made], tasks=[task], verbose=False).kickoff().raw and len(asked) >= calls and asked

    of(name, "chat")(lambda w: model(w).call("Hello"))
    of(name, "stream")(lambda w: model(w, stream=True).call("Hello"))
    of(name, "tools")(lambda w: turns(w, 1))
    of(name, AGENT)(lambda w: turns(w, 2))
    of(name, "JSON schema")(lambda w: model(w, response_format=City).call("Hello"))
    of(name, UNKNOWN)(
        lambda w: both_modes(lambda base: model(w, base, additional_params={"extra_body": WHIM}).call("Hello"))
    )
    of(name, "responses")(lambda w: model(w, api="responses", max_tokens=LONG).call("Hello"))


def dspy() -> None:
    import dspy

    name, url = "DSPy", os.environ["OPENAI_BASE_URL"]
    given: Any = {"api_key": "x", "cache": False, "num_retries": 0, "temperature": 0}

    def model(where: str, base: str = url, **options: Any) -> Any:
        return dspy.LM(f"openai/{text(where)}", api_base=base, **{**given, "max_tokens": 60, **options})

    def turns(where: str, calls: int) -> Any:
        said: list[Any] = [*ASKED]
        for _ in range(calls):
            answer = model(where)(messages=said, tools=[TOOL], tool_choice=FORCED)[0]
            said.append({"role": "assistant", "content": answer["text"], "tool_calls": answer["tool_calls"]})
            said += [{"role": "tool", "tool_call_id": one["id"], "content": "sunny"} for one in answer["tool_calls"]]
        return len(said) > 2 * calls and model(where)(messages=said, max_tokens=8)

    def embedded(where: str, texts: list[str]) -> Any:
        made = dspy.Embedder(f"openai/{embedding(where)}", api_base=url, api_key="x", caching=False)
        return len(made(texts)) == len(texts)

    of(name, "chat")(lambda w: model(w)("Hello"))
    of(name, "tools")(lambda w: turns(w, 1))
    of(name, AGENT)(lambda w: turns(w, 2))
    of(name, UNKNOWN)(lambda w: both_modes(lambda base: model(w, base, extra_body=WHIM)("Hello")))
    of(name, "responses")(lambda w: model(w, model_type="responses", max_tokens=LONG)("Hello"))
    of(name, "embeddings")(lambda w: embedded(w, ["a"]))
    of(name, BATCHES)(lambda w: embedded(w, TEXTS))
