"""Checks of programs for the command line, by their own libraries: aider and llm."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from checks import AGENT, CITY, PICTURES, UNKNOWN, WHIM, City, both_modes, here, of, text


def aider() -> None:
    """It works on a file in a folder of its own."""
    os.environ.update(OPENAI_API_BASE=os.environ["OPENAI_BASE_URL"], LITELLM_LOCAL_MODEL_COST_MAP="true")
    os.chdir(tempfile.mkdtemp())
    Path("a.py").write_text("x = 1\n")
    from aider.coders import Coder
    from aider.io import InputOutput
    from aider.models import Model

    name = "aider"

    def ask(where: str, base: str | None = None, *, turns: int = 1, stream: bool = False, **options: Any) -> Any:
        model = Model(f"openai/{text(where)}")
        model.use_temperature = 0
        model.extra_params = {"max_tokens": 24, "num_retries": 0, "api_base": base, **options}
        console = InputOutput(yes=False, pretty=False, fancy_input=False)
        made = Coder.create(model, "ask", console, fnames=["a.py"], use_git=False, stream=stream, map_tokens=0)
        for _ in range(turns):
            made.run("What is x?")
        answers = [one["content"] for one in made.done_messages + made.cur_messages if one["role"] == "assistant"]
        return len(answers) == turns and answers

    of(name, "chat")(ask)
    of(name, "stream")(lambda w: ask(w, stream=True))
    of(name, AGENT)(lambda w: ask(w, turns=3))


def llm() -> None:
    os.environ["LLM_USER_PATH"] = tempfile.mkdtemp()
    url, able = os.environ["OPENAI_BASE_URL"], {"supports_tools": True, "supports_schema": True, "vision": True}
    kinds: dict[str, Any] = {"": {}, "-responses": {"responses": True}, "-completion": {"completion": True}}
    models = [
        {"model_id": f"{model}{kind}", "model_name": model, "api_base": url, **able, **flags}
        for model in ("local", "remote", "tiny-image-to-text")
        for kind, flags in kinds.items()
    ]
    Path(os.environ["LLM_USER_PATH"], "extra-openai-models.yaml").write_text(json.dumps(models))  # JSON is YAML
    import llm

    name = "llm"

    told: Any = {"input_schema": CITY, "implementation": lambda city: f"sunny in {city}"}
    weather = llm.Tool("weather", "Tells the weather", **told)

    def model(where: str, base: str | None = None, **fields: Any) -> Any:
        """One whose requests have `fields` too: the program has no option for them."""
        made: Any = llm.get_model(where)
        made.api_base, build = base or url, made.build_kwargs
        made.build_kwargs = lambda prompt, stream: {**build(prompt, stream), **fields}
        return made

    def ask(made: Any, asked: str = "Hello", **options: Any) -> Any:
        return made.prompt(asked, **{"max_tokens": 60, "temperature": 0, **options})

    def turns(where: str, calls: int) -> Any:
        talk = model(where, tool_choice="required").conversation()
        options: dict[str, Any] = {
            "tools": [weather],
            "max_tokens": 60,
            "temperature": 0,
            "stream": False,
        }
        answer = talk.prompt("The weather in Paris?", **options)
        for _ in range(calls - 1):
            answer = talk.prompt("", tool_results=answer.execute_tool_calls(), **options)
        results = answer.execute_tool_calls()
        talk.model = model(where)
        last = talk.prompt("", tool_results=results, max_tokens=24, temperature=0, stream=False)
        return results and last.text()

    def seen(picture: bytes) -> Any:
        image = llm.Attachment(type="image/png", content=picture)
        return ask(model("tiny-image-to-text"), "What is this?", attachments=[image], max_tokens=8).text()

    of(name, "chat")(lambda w: ask(model(w), stream=False).text())
    of(name, "stream")(lambda w: list(ask(model(w))))
    of(name, "tools")(lambda w: turns(w, 1))
    of(name, AGENT)(lambda w: turns(w, 2))
    of(name, "JSON schema")(lambda w: City.model_validate_json(ask(model(w), schema=City, stream=False).text()))
    of(name, UNKNOWN)(lambda w: both_modes(lambda base: ask(model(w, base, extra_body=WHIM)).text()))
    of(name, "responses")(lambda w: ask(model(f"{w}-responses"), stream=False).text())
    of(name, "responses, streamed")(lambda w: list(ask(model(f"{w}-responses"))))
    for feature, picture in PICTURES.items():
        of(name, feature)(here(lambda picture=picture: seen(picture)))
