"""Runs stock clients against a gateway and prints the table of docs/clients.md.

    python docs/clients/check.py http://127.0.0.1:8000/v1

It needs the clients, in an environment of their own, and models with the ids `local`, `local-embeddings` and `remote`.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
MODELS = ("local", "remote")
EMBEDDING_MODELS = {"local": "local-embeddings", "remote": "remote"}
HELLO: Any = [{"role": "user", "content": "Hello"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Any = {"type": "function", "function": {"name": "weather", "description": "w", "parameters": SCHEMA}}
LONG = 400
"""Tokens: an answer that is cut is `incomplete` on /v1/responses, and some clients raise then."""

Check = Callable[[str], Any]
CHECKS: dict[str, dict[str, Check]] = {}


class City(BaseModel):
    city: str
    people: int


def of(client: str, feature: str) -> Callable[[Check], Check]:
    """A check is good if it gives something true."""

    def keep(check: Check) -> Check:
        CHECKS.setdefault(client, {})[feature] = check
        return check

    return keep


def openai_python() -> None:
    from openai import OpenAI

    client, name = OpenAI(), "openai (Python)"
    chat = client.chat.completions

    def streamed(model: str) -> str:
        chunks = chat.create(model=model, messages=HELLO, stream=True, max_tokens=8)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)

    def responses_streamed(model: str) -> str:
        with client.responses.stream(model=model, input="Hello", max_output_tokens=LONG) as stream:
            return stream.get_final_response().output_text

    def parsed(model: str) -> Any:
        return chat.parse(model=model, messages=HELLO, response_format=City).choices[0].message.parsed

    of(name, "chat")(lambda m: chat.create(model=m, messages=HELLO, max_tokens=8).choices[0].message.content)
    of(name, "stream")(streamed)
    of(name, "tools")(lambda m: chat.create(model=m, messages=HELLO, tools=[TOOL]).choices[0].message.tool_calls)
    of(name, "JSON schema")(parsed)
    of(name, "n, logprobs")(lambda m: chat.create(model=m, messages=HELLO, n=2, logprobs=True).choices[1].logprobs)
    of(name, "responses")(lambda m: client.responses.create(model=m, input="Hello", max_output_tokens=LONG).output_text)
    of(name, "responses, streamed")(responses_streamed)
    of(name, "embeddings")(lambda m: client.embeddings.create(model=EMBEDDING_MODELS[m], input=["a"]).data)


def openai_node() -> None:
    script = Path(__file__).with_name("check.mjs")
    features = ("chat", "stream", "tools", "responses", "responses, streamed", "embeddings")

    def check(feature: str) -> Check:
        def run(model: str) -> str:
            asked = [feature, EMBEDDING_MODELS[model] if feature == "embeddings" else model]
            done = subprocess.run(["node", str(script), URL, *asked], capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(done.stderr)
            return done.stdout.strip()

        return run

    for feature in features:
        of("openai (Node)", feature)(check(feature))


def langchain() -> None:
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    name = "LangChain"

    def responses(model: str) -> Any:
        return ChatOpenAI(model=model, use_responses_api=True, max_tokens=LONG)

    def embedded(model: str) -> Any:
        return OpenAIEmbeddings(model=EMBEDDING_MODELS[model], check_embedding_ctx_length=False).embed_query("a")

    of(name, "chat")(lambda m: ChatOpenAI(model=m, max_tokens=8).invoke("Hello").content)
    of(name, "stream")(lambda m: "".join(one.content for one in ChatOpenAI(model=m, max_tokens=8).stream("Hello")))
    of(name, "tools")(lambda m: ChatOpenAI(model=m).bind_tools([TOOL]).invoke("Hello").tool_calls)
    of(name, "JSON schema")(lambda m: ChatOpenAI(model=m).with_structured_output(City).invoke("Hello"))
    of(name, "responses")(lambda m: responses(m).invoke("Hello").content)
    of(name, "responses, streamed")(lambda m: [one.content for one in responses(m).stream("Hello") if one.content])
    of(name, "embeddings")(embedded)


def llama_index() -> None:
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    name, hello = "LlamaIndex", [ChatMessage(role="user", content="Hello")]

    def weather(city: str) -> str:
        """Tells the weather."""
        return city

    def model(name: str, **options: Any) -> Any:
        return OpenAILike(model=name, api_base=URL, api_key="x", is_chat_model=True, max_tokens=8, **options)

    def tools(name: str) -> Any:
        asked = model(name, is_function_calling_model=True)
        answer = asked.chat_with_tools([FunctionTool.from_defaults(weather)], "Hello")
        return answer.message.additional_kwargs.get("tool_calls")

    of(name, "chat")(lambda m: model(m).chat(hello).message.content)
    of(name, "stream")(lambda m: [one.delta for one in model(m).stream_chat(hello) if one.delta])
    of(name, "tools")(tools)


def litellm() -> None:
    import litellm

    litellm.suppress_debug_info = True
    name = "LiteLLM"

    def ask(model: str, **options: Any) -> Any:
        return litellm.completion(model=f"openai/{model}", messages=HELLO, api_base=URL, **options)

    def answered(model: str) -> Any:
        return litellm.responses(model=f"openai/{model}", input="Hello", api_base=URL, max_output_tokens=LONG).output

    def embedded(model: str) -> Any:
        return litellm.embedding(model=f"openai/{EMBEDDING_MODELS[model]}", input=["a"], api_base=URL).data

    def schema(model: str) -> Any:
        return City.model_validate_json(ask(model, response_format=City).choices[0].message.content)

    of(name, "chat")(lambda m: ask(m, max_tokens=8).choices[0].message.content)
    of(name, "stream")(lambda m: [one for one in ask(m, stream=True, max_tokens=8) if one.choices[0].delta.content])
    of(name, "tools")(lambda m: ask(m, tools=[TOOL]).choices[0].message.tool_calls)
    of(name, "JSON schema")(schema)
    of(name, "responses")(answered)
    of(name, "embeddings")(embedded)


def instructor() -> None:
    import instructor
    from openai import OpenAI

    def ask(model: str, mode: Any) -> Any:
        client = instructor.from_openai(OpenAI(), mode=mode)
        return client.chat.completions.create(model=model, messages=HELLO, response_model=City, max_retries=0)

    of("Instructor", "tools")(lambda m: ask(m, instructor.Mode.TOOLS))
    of("Instructor", "JSON schema")(lambda m: ask(m, instructor.Mode.JSON_SCHEMA))


def openai_agents() -> None:
    from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
    from openai import AsyncOpenAI

    name = "openai-agents"

    @function_tool
    def weather(city: str) -> str:
        """Tells the weather."""
        return f"sunny in {city}"

    def agent(kind: Any, model: str, *tools: Any) -> Any:
        settings = ModelSettings(max_tokens=LONG)
        served = kind(model=model, openai_client=AsyncOpenAI())
        return Agent(name="a", instructions="Be brief.", model=served, tools=list(tools), model_settings=settings)

    async def streamed(asked: Any) -> Any:
        run = Runner.run_streamed(asked, "Hello")
        async for _ in run.stream_events():
            pass
        return run.final_output

    async def run(asked: Any) -> Any:
        return (await Runner.run(asked, "Hello")).final_output

    of(name, "chat")(lambda m: asyncio.run(run(agent(OpenAIChatCompletionsModel, m))))
    of(name, "stream")(lambda m: asyncio.run(streamed(agent(OpenAIChatCompletionsModel, m))))
    of(name, "tools")(lambda m: asyncio.run(run(agent(OpenAIChatCompletionsModel, m, weather))))
    of(name, "responses")(lambda m: asyncio.run(run(agent(OpenAIResponsesModel, m))))
    of(name, "responses, streamed")(lambda m: asyncio.run(streamed(agent(OpenAIResponsesModel, m))))
    of(name, "responses, tools")(lambda m: asyncio.run(run(agent(OpenAIResponsesModel, m, weather))))


PACKAGES = {
    "openai (Python)": "openai",
    "LangChain": "langchain-openai",
    "LlamaIndex": "llama-index-llms-openai-like",
    "LiteLLM": "litellm",
    "Instructor": "instructor",
    "openai-agents": "openai-agents",
}


def version(client: str) -> str:
    if client in PACKAGES:
        return importlib.metadata.version(PACKAGES[client])
    found = json.loads((Path.cwd() / "node_modules/openai/package.json").read_text())
    return str(found["version"])


def outcome(check: Check, model: str) -> str:
    try:
        return "yes" if check(model) else "EMPTY"
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return "refused" if "is not supported by" in text else text.replace("\n", " ")[:200]


def main() -> None:
    os.environ.update(OPENAI_API_KEY="unused", OPENAI_BASE_URL=URL, OPENAI_AGENTS_DISABLE_TRACING="1")
    for define in (openai_python, openai_node, langchain, llama_index, litellm, instructor, openai_agents):
        with suppress(ImportError):  # the clients do not all go into one environment: each run has those it finds
            define()
    columns = list(dict.fromkeys(feature for checks in CHECKS.values() for feature in checks))
    print(f"| client | {' | '.join(columns)} |\n| --- |{' --- |' * len(columns)}")
    for client, checks in CHECKS.items():
        cells: list[str] = []
        for feature in columns:
            found = [outcome(checks[feature], model) for model in MODELS] if feature in checks else ["–"]
            cells.append(found[0] if len(set(found)) == 1 else " / ".join(found))
        print(f"| {client} {version(client)} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
