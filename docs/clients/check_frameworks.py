"""Checks of LangChain, LlamaIndex, LiteLLM and Instructor."""

from __future__ import annotations

import os
from typing import Any

from checks import ASKED, FORCED, HELLO, IGNORED, LENIENT, LONG, TOOL, WHIM, City, embedding, of, text


def langchain() -> None:
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    name = "LangChain"

    def model(where: str, **options: Any) -> Any:
        return ChatOpenAI(model=text(where), **{"max_tokens": 60, "temperature": 0, "max_retries": 0, **options})

    def streamed(where: str) -> Any:
        bound = model(where).bind_tools([TOOL], tool_choice="weather")
        whole, pieces = None, 0
        for piece in bound.stream("The weather in Paris?"):
            pieces += bool(piece.tool_call_chunks)
            whole = piece if whole is None else whole + piece
        return pieces > 1 and whole.tool_calls[0]["args"]

    def called(where: str) -> Any:
        from langchain_core.messages import HumanMessage, ToolMessage

        asked = [HumanMessage("The weather in Paris?")]
        answer = model(where).bind_tools([TOOL], tool_choice="weather").invoke(asked)
        told = ToolMessage("sunny", tool_call_id=answer.tool_calls[0]["id"])
        return model(where).bind_tools([TOOL]).invoke([*asked, answer, told]).usage_metadata["output_tokens"]

    def turns(where: str, **options: Any) -> Any:
        from langchain_core.messages import HumanMessage, ToolMessage

        said: list[Any] = [HumanMessage("The weather in Paris?")]
        for _ in "ab":
            said.append(model(where, **options).bind_tools([TOOL], tool_choice="weather").invoke(said))
            said += [ToolMessage("sunny", tool_call_id=call["id"]) for call in said[-1].tool_calls]
        return model(where, **options).invoke(said).usage_metadata["output_tokens"]

    def unknown(where: str) -> Any:
        import openai

        try:
            model(where, extra_body=WHIM).invoke("Hello")
        except openai.BadRequestError as error:
            lenient = model(where, extra_body=WHIM, base_url=os.environ[LENIENT], include_response_headers=True)
            return error.param == "use_beam_search" and lenient.invoke("Hello").response_metadata["headers"][IGNORED]

    def responses(where: str) -> Any:
        return model(where, use_responses_api=True, max_tokens=LONG)

    def embedded(where: str) -> Any:
        client = OpenAIEmbeddings(model=embedding(where), check_embedding_ctx_length=False)
        return client.embed_documents(["a", "b"])[1]

    of(name, "chat")(lambda w: model(w).invoke("Hello").content)
    of(name, "stream")(lambda w: "".join(one.content for one in model(w).stream("Hello")))
    of(name, "tools")(called)
    of(name, "tools, three turns")(lambda w: turns(w) and turns(w, use_responses_api=True, max_tokens=LONG))
    of(name, "unknown fields, both modes")(unknown)
    of(name, "tools, streamed")(streamed)
    of(name, "JSON schema")(lambda w: isinstance(model(w).with_structured_output(City).invoke("Hello"), City))
    of(name, "n, logprobs")(lambda w: model(w, logprobs=True).invoke("Hello").response_metadata["logprobs"]["content"])
    of(name, "responses")(lambda w: responses(w).invoke("Hello").content)
    of(name, "responses, streamed")(lambda w: [one.content for one in responses(w).stream("Hello") if one.content])
    of(name, "embeddings")(embedded)


def llama_index() -> None:
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding
    from llama_index.llms.openai_like import OpenAILike

    name, hello = "LlamaIndex", [ChatMessage(role="user", content="The weather in Paris?")]
    url = os.environ["OPENAI_BASE_URL"]

    def weather(city: str) -> str:
        """Tells the weather."""
        return city

    def model(where: str, **options: Any) -> Any:
        given = {"is_chat_model": True, "max_tokens": 60, "max_retries": 0, **options}
        return OpenAILike(model=text(where), api_base=url, api_key="x", **given)

    def tools(where: str) -> Any:
        asked = model(where, is_function_calling_model=True)
        answer = asked.chat_with_tools([FunctionTool.from_defaults(weather)], "Paris?", tool_required=True)
        return asked.get_tool_calls_from_response(answer)[0].tool_name == "weather"

    def embedded(where: str) -> Any:
        return OpenAILikeEmbedding(model_name=embedding(where), api_base=url, api_key="x").get_text_embedding("a")

    of(name, "chat")(lambda w: model(w).chat(hello).message.content)
    of(name, "stream")(lambda w: [one.delta for one in model(w).stream_chat(hello) if one.delta])
    of(name, "tools")(tools)
    of(name, "embeddings")(embedded)


def litellm() -> None:
    import litellm

    litellm.suppress_debug_info = True
    name, url = "LiteLLM", os.environ["OPENAI_BASE_URL"]

    def ask(where: str, **options: Any) -> Any:
        given = {"messages": HELLO, "max_tokens": 60, "temperature": 0, "num_retries": 0, **options}
        return litellm.completion(model=f"openai/{text(where)}", api_base=url, **given)

    def answered(where: str) -> Any:
        options = {"api_base": url, "max_output_tokens": LONG}
        return litellm.responses(model=f"openai/{text(where)}", input="Hello", **options).output

    def embedded(where: str) -> Any:
        return litellm.embedding(model=f"openai/{embedding(where)}", input=["a"], api_base=url).data

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

    def unknown(where: str) -> Any:
        try:
            ask(where, extra_body=WHIM)
        except litellm.BadRequestError as error:
            asked: Any = {"model": f"openai/{text(where)}", "messages": HELLO, "max_tokens": 8, "extra_body": WHIM}
            return "use_beam_search" in str(error) and litellm.completion(api_base=os.environ[LENIENT], **asked)

    def pieces(where: str) -> Any:
        options = {"tools": [TOOL], "tool_choice": FORCED, "stream": True}
        chunks = list(ask(where, messages=ASKED, **options))
        whole: Any = litellm.stream_chunk_builder(chunks)
        return sum(bool(one.choices[0].delta.tool_calls) for one in chunks) > 2 and whole.choices[0].message.tool_calls

    of(name, "chat")(lambda w: ask(w).choices[0].message.content)
    of(name, "stream")(lambda w: [one for one in ask(w, stream=True) if one.choices[0].delta.content])
    of(name, "tools")(called)
    of(name, "tools, three turns")(turns)
    of(name, "unknown fields, both modes")(unknown)
    of(name, "tools, streamed")(pieces)
    of(name, "JSON schema")(schema)
    of(name, "n, logprobs")(lambda w: ask(w, n=2, logprobs=True).choices[1].logprobs)
    of(name, "responses")(answered)
    of(name, "embeddings")(embedded)


def instructor() -> None:
    import instructor
    from openai import OpenAI

    def ask(where: str, mode: Any) -> Any:
        client = instructor.from_openai(OpenAI(max_retries=0), mode=mode)
        options: Any = {"response_model": City, "max_retries": 0, "max_tokens": 60, "temperature": 0}
        return client.chat.completions.create(model=text(where), messages=HELLO, **options)

    of("Instructor", "tools")(lambda w: isinstance(ask(w, instructor.Mode.TOOLS), City))
    of("Instructor", "JSON schema")(lambda w: isinstance(ask(w, instructor.Mode.JSON_SCHEMA), City))
    of("Instructor", "tools, strict")(lambda w: isinstance(ask(w, instructor.Mode.TOOLS_STRICT), City))
