"""Checks of openai-agents: a turn, a stream and a call of a tool, over both of OpenAI's APIs."""

from __future__ import annotations

import asyncio
from typing import Any

from checks import LONG, of, text


def openai_agents() -> None:
    from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
    from openai import AsyncOpenAI

    name = "openai-agents"
    asked: list[str] = []

    @function_tool
    def weather(city: str) -> str:
        """Tells the weather."""
        asked.append(city)
        return f"sunny in {city}"

    def agent(kind: Any, where: str, *tools: Any) -> Any:
        settings = ModelSettings(max_tokens=LONG, temperature=0, tool_choice="required" if tools else None)
        served = kind(model=text(where), openai_client=AsyncOpenAI(max_retries=0))
        # After its call an agent asks once more, without being forced to call again.
        return Agent(name="a", instructions="Be brief.", model=served, tools=list(tools), model_settings=settings)

    async def streamed(made: Any) -> Any:
        run = Runner.run_streamed(made, "Hello")
        async for _ in run.stream_events():
            pass
        return run.final_output

    async def run(made: Any) -> Any:
        return (await Runner.run(made, "Hello")).final_output

    def with_tools(kind: Any, where: str) -> Any:
        asked.clear()
        asyncio.run(run(agent(kind, where, weather)))
        return len(asked) > 0

    of(name, "chat")(lambda w: asyncio.run(run(agent(OpenAIChatCompletionsModel, w))))
    of(name, "stream")(lambda w: asyncio.run(streamed(agent(OpenAIChatCompletionsModel, w))))
    of(name, "tools")(lambda w: with_tools(OpenAIChatCompletionsModel, w))
    of(name, "responses")(lambda w: asyncio.run(run(agent(OpenAIResponsesModel, w))))
    of(name, "responses, streamed")(lambda w: asyncio.run(streamed(agent(OpenAIResponsesModel, w))))
    of(name, "responses, tools")(lambda w: with_tools(OpenAIResponsesModel, w))
