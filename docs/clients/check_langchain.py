"""Checks of LangChain."""

from __future__ import annotations

from typing import Any

from checks import (
    AGENT,
    BATCHES,
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
    text,
)

NAME = "LangChain"


def langchain() -> None:
    from langchain_openai import ChatOpenAI

    def model(where: str, **options: Any) -> Any:
        return ChatOpenAI(model=text(where), **{"max_tokens": 60, "temperature": 0, "max_retries": 0, **options})

    def responses(where: str) -> Any:
        return model(where, use_responses_api=True, max_tokens=LONG)

    def unknown(where: str, url: str) -> Any:
        asked = model(where, extra_body=WHIM, base_url=url, include_response_headers=True)
        return asked.invoke("Hello").response_metadata["headers"][IGNORED]

    def seen(picture: bytes) -> Any:
        shown = {"type": "image_url", "image_url": {"url": data_url(picture)}}
        asked = [("user", [{"type": "text", "text": "What is this?"}, shown])]
        return model("tiny-image-to-text", max_tokens=8).invoke(asked).usage_metadata["output_tokens"]

    of(NAME, "chat")(lambda w: model(w).invoke("Hello").content)
    of(NAME, "stream")(lambda w: "".join(one.content for one in model(w).stream("Hello")))
    of(NAME, "JSON schema")(lambda w: isinstance(model(w).with_structured_output(City).invoke("Hello"), City))
    of(NAME, "n, logprobs")(lambda w: model(w, logprobs=True).invoke("Hello").response_metadata["logprobs"]["content"])
    of(NAME, UNKNOWN)(lambda w: both_modes(lambda url: unknown(w, url)))
    of(NAME, "responses")(lambda w: responses(w).invoke("Hello").content)
    of(NAME, "responses, streamed")(lambda w: [one.content for one in responses(w).stream("Hello") if one.content])
    for feature, picture in PICTURES.items():
        of(NAME, feature)(here(lambda picture=picture: seen(picture)))
    _tools(model)
    _texts()


def _tools(model: Any) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    asked = HumanMessage("The weather in Paris?")

    def streamed(where: str) -> Any:
        whole, pieces = None, 0
        for piece in model(where).bind_tools([TOOL], tool_choice="weather").stream([asked]):
            pieces += bool(piece.tool_call_chunks)
            whole = piece if whole is None else whole + piece
        return pieces > 1 and whole.tool_calls[0]["args"]

    def turns(where: str, calls: int, **options: Any) -> Any:
        said: list[Any] = [asked]
        for _ in range(calls):
            said.append(model(where, **options).bind_tools([TOOL], tool_choice="weather").invoke(said))
            said += [ToolMessage("sunny", tool_call_id=call["id"]) for call in said[-1].tool_calls]
        return model(where, **options).bind_tools([TOOL]).invoke(said).usage_metadata["output_tokens"]

    of(NAME, "tools")(lambda w: turns(w, 1))
    of(NAME, AGENT)(lambda w: turns(w, 2) and turns(w, 2, use_responses_api=True, max_tokens=LONG))
    of(NAME, "tools, streamed")(streamed)


def _texts() -> None:
    from langchain_openai import OpenAI, OpenAIEmbeddings

    def embedded(where: str, texts: list[str]) -> Any:
        client = OpenAIEmbeddings(model=embedding(where), check_embedding_ctx_length=False)
        return len(client.embed_documents(texts)) == len(texts)

    def prompts(where: str) -> Any:
        client = OpenAI(model=text(where), max_tokens=4, max_retries=0, logprobs=2, model_kwargs={"echo": True})
        first, second = client.generate(["The sky is", "Two and two"]).generations
        return first[0].text.startswith("The sky is") and second[0].generation_info["logprobs"]["token_logprobs"]

    of(NAME, "prompt lists, echo, logprobs")(prompts)
    of(NAME, "embeddings")(lambda w: embedded(w, ["a", "b"]))
    of(NAME, BATCHES)(lambda w: embedded(w, TEXTS))
