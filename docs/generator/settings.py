"""settings.md, from the settings objects of worker, gateway, bridge, webhooks, summarizer and command line."""

from __future__ import annotations

import ast
import inspect
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from generator.markdown import code, document, literal, table
from penstock.cli.config import ClusterSettings
from penstock.common.engine_kinds import KINDS
from penstock.gateway.bridge.settings import BridgeSettings
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.summarizer.settings import SummarizerSettings
from penstock.gateway.webhooks.settings import WebhooksSettings
from penstock.processors.settings import WorkerSettings

READERS: dict[str, type[BaseSettings]] = {
    "command line": ClusterSettings,
    "worker": WorkerSettings,
    "gateway": GatewaySettings,
    "bridge": BridgeSettings,
    "webhooks": WebhooksSettings,
    "summarizer": SummarizerSettings,
}
ORDER = (
    "kafka",
    "topics",
    "worker",
    "scheduler",
    "conversations",
    "memory",
    "devices",
    "models",
    "gateway",
    "gateway.limits",
    "auth",
    "artifacts",
    "images",
    "schema_registry",
    "telemetry",
    "log",
    "bridge",
    "queue_merge",
    "queues",
    "webhooks",
    "summarizer",
)
LISTS = ("devices", "models", "queues")
"""Sections of which there may be several."""

INTRO = """\
All processes read one TOML file: the one that `--config` names, else the variable `PENSTOCK_CONFIG`, else
`penstock.toml` in the current folder. Variables go before the file. A key is `PENSTOCK_SECTION__KEY` in the
environment; there, lists and tables are written as JSON:

    export PENSTOCK_KAFKA__BOOTSTRAP_SERVERS=kafka-1:9092,kafka-2:9092
    export PENSTOCK_KAFKA__SECURITY='{"security.protocol": "SSL"}'
    export PENSTOCK_AUTH__ALLOWED_ORIGINS='["https://app.example"]'

`penstock config show` prints what is in force with secrets starred; `penstock config check` names the first field
that is wrong, an unknown section among them. An unknown key is an error, in the file and in the variables, except in
`[kafka]`, `[artifacts]` and `[schema_registry]`; a variable of an unknown section is passed over.
A key whose default is `null` is left out of the file to have that value.

```toml
[kafka]
bootstrap_servers = "kafka:9092"

[topics]
partitions = 64
durability = "replicas"

[[models]]
id = "chat"
source = "/models/my-model"
engine = "text"
tasks = ["text_generation"]
aliases = ["default"]
defaults = {temperature = 0.2}
options = {cache_tokens = 16384}

[auth]
keys_file = "keys.json"
```"""

MODELS = """\
One table for each model of a worker. Gateways and bridges read them too: they know a model before its first worker
lives, and while its pool has none. In the environment all of them are one variable, `PENSTOCK_MODELS`, a JSON list
of objects. What `options` may hold stands in [engine options](engine-options.md)."""

DEVICES = """\
What a worker may use of single devices; without any table it finds main memory and all cards itself. In the environment
all of them are one variable, `PENSTOCK_DEVICES`, a JSON list of objects. A table that names a device goes before one
for its kind. How to: [devices](../how-to/models.md#say-what-penstock-may-use-of-a-machine)."""

LIMITS = """\
What each tenant may have at the gateway and the bridge; `[gateway.limits.tenants.NAME]` holds what differs for one of
them. A key may have `limits` of its own, of the same names, in the keys file: they hold beside its tenant's. Without
keys there is one tenant, and only what is set holds. More: [limits](http.md#limits)."""

QUEUES = """\
One table for each topic of another system that bridges read. Beside the tables, above all sections, stands
`queue_policy`, which says who is next: `strict` (in their order), `weighted` (the default), `round_robin` or `random`.
In the environment: `PENSTOCK_QUEUE_POLICY`, and `PENSTOCK_QUEUES` as a JSON list."""

ENGINES = "; ".join(f"{code(name)} ({', '.join(kind.tasks)})" for name, kind in KINDS.items() if not kind.built_in)
FROM_CODE = {("models", "engine"): f" One of, with its tasks: {ENGINES}."}
"""What is said of a key behind its docstring."""

NOTES = {"devices": DEVICES, "models": MODELS, "gateway.limits": LIMITS, "queues": QUEUES}

OTHERS = [
    ["`PENSTOCK_CONFIG`", "all", "The TOML file."],
    [
        "`PENSTOCK_SECRETS`",
        "all",
        "A folder of files, each with the value of the variable whose name it has, as `PENSTOCK_KAFKA__SECURITY`. They"
        " go before the TOML file, and variables before them.",
    ],
    [
        "`PENSTOCK_…_FILE`",
        "all",
        "The path of a file with the value of the setting, as `PENSTOCK_KAFKA__SECURITY__SASL_PASSWORD_FILE` or"
        " `PENSTOCK_AUTH__TICKET_KEY_FILE`. Blanks at its ends do not count. It has the rank of the variable without"
        " `_FILE`; both at once are an error.",
    ],
    ["`PENSTOCK_URL`", "client commands", "The gateway, in place of `--url`."],
    ["`PENSTOCK_API_KEY`", "client commands", "The key, in place of `--key`."],
    [
        "`PENSTOCK_DATA`",
        "`penstock up`, `status`, `logs`, `down`, `broker`, `doctor`",
        "The data folder, in place of `--data-dir`; else `$XDG_DATA_HOME/penstock`, else `~/.local/share/penstock`.",
    ],
    [
        "`PENSTOCK_CACHE`",
        "`penstock up`, `broker`, `doctor`",
        "Kafka's files and the prepared models; else `$XDG_CACHE_HOME/penstock`, else `~/.cache/penstock`.",
    ],
    ["`OPENAI_API_KEY`", "`penstock up --remote`", "The key of the remote server."],
]


@dataclass(kw_only=True, slots=True)
class Key:
    """One key of a section, with the default that each reader has."""

    name: str
    info: FieldInfo
    meaning: str
    defaults: dict[str, str] = field(default_factory=dict[str, str])


def page() -> str:
    parts = [INTRO]
    for name in ORDER:
        readers, keys = section(name)
        heading = f"## [[{name}]]" if name in LISTS else f"## [{name}]"
        note = NOTES.get(name, f"Read by the {listed(readers)}.")
        parts.append(f"{heading}\n\n{note}\n\n{keys_table(name, keys)}")
    others = table(["variable", "read by", "meaning"], OTHERS)
    return document("Settings", *parts, f"## Other variables\n\n{others}")


def listed(names: list[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def section(name: str) -> tuple[list[str], list[Key]]:
    """Who reads a section, and its keys in the order of the sources."""
    readers: list[str] = []
    keys: dict[str, Key] = {}
    outer, _, inner = name.partition(".")
    for reader, settings in READERS.items():
        if outer not in settings.model_fields:
            continue
        readers.append(reader)
        model = model_of(settings.model_fields[outer].annotation)
        if inner:
            model = model_of(model.model_fields[inner].annotation)
        meanings = docstrings(model)
        for key, info in model.model_fields.items():
            if f"{name}.{key}" in ORDER:
                continue  # a section of its own
            known = keys.setdefault(key, Key(name=key, info=info, meaning=meanings[key]))
            known.defaults[reader] = default_text(info)
    return readers, list(keys.values())


def keys_table(name: str, keys: list[Key]) -> str:
    rows: list[list[str]] = []
    for key in keys:
        variable = f"PENSTOCK_{name.replace('.', '__')}__{key.name}".upper()
        meaning = key.meaning + FROM_CODE.get((name, key.name), "")
        row = [code(key.name), code(variable), type_text(key.info), "", meaning]
        defaults = set(key.defaults.values())
        row[3] = defaults.pop() if len(defaults) == 1 else ", ".join(f"{v} ({r})" for r, v in key.defaults.items())
        if name in LISTS:
            del row[1]
        rows.append(row)
    columns = ["key", "variable", "type", "default", "meaning"]
    return table([c for c in columns if c != "variable"] if name in LISTS else columns, rows)


def model_of(annotation: Any) -> type[BaseModel]:
    """The section's model; of a list of tables that of one table."""
    return get_args(annotation)[0] if get_origin(annotation) is list else annotation


def docstrings(model: type[BaseModel]) -> dict[str, str]:
    """The text behind each field in the source, inherited ones too. KeyError, when looked up, for one without."""
    inherited = [docstrings(base) for base in model.__bases__ if base is not BaseModel and issubclass(base, BaseModel)]
    source = Path(inspect.getfile(model)).read_text()
    found = next(n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == model.__name__)
    texts = {name: text for one in inherited for name, text in one.items()}
    for statement, behind in zip(found.body, found.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            match behind:
                case ast.Expr(value=ast.Constant(value=str() as text)):
                    texts[statement.target.id] = inspect.cleandoc(text)
                case _:
                    pass
    return texts


def default_text(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    value: Any = info.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, BaseModel):
        value = value.model_dump()
    return literal(str(value) if isinstance(value, Path) else value)


def type_text(info: FieldInfo) -> str:
    """The type in words, with its bounds."""
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    bounds = [
        f"{word} {getattr(constraint, name):,g}"
        for constraint in info.metadata
        for name, word in words.items()
        if getattr(constraint, name, None) is not None
    ]
    return ", ".join([kind_text(info.annotation), *bounds])


def kind_text(kind: Any) -> str:
    names: dict[Any, str] = {
        str: "text",
        int: "integer",
        float: "number",
        bool: "true or false",
        Path: "path",
        Any: "any",
        SecretStr: "secret text",
    }
    if kind in names:
        return names[kind]
    arguments = get_args(kind)
    origin = get_origin(kind)
    if origin is Annotated:
        return kind_text(arguments[0])
    if origin is Literal:
        return ", ".join(code(str(choice)) for choice in arguments)
    if origin in (types.UnionType, Union):
        return " or ".join("null" if one is type(None) else kind_text(one) for one in arguments)
    if origin is list:
        return f"list of {kind_text(arguments[0])}"
    if origin is dict:
        inner = kind_text(arguments[1])
        return f"table of {inner}s" if inner == "table" else f"table of {inner}"
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "table"
    raise TypeError(f"the generator has no words for {kind}")
