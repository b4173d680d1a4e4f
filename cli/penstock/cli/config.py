"""The configuration file: finding it, errors that name the field, and what the command line itself reads of it."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer
from pydantic import BaseModel, Field, ValidationError, field_validator
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings

from penstock.cli.failures import CliFailure, ExitCode
from penstock.cli.topic_plan import wrong_override
from penstock.common.configuration import (
    ENV_CONFIG,
    ENV_SECRETS,
    KafkaSection,
    ProcessSettings,
    RegistrySection,
    Section,
)
from penstock.common.settings import KafkaSettings
from penstock.schemas.texts import names_secret, shortened, without_user

DEFAULT_NAME = "penstock.toml"
USUAL_PARTITIONS = 64
PLAIN_WORDS = {"extra_forbidden": "there is no such setting", "missing": "is missing"}
"""By the type of pydantic's error, whose own words speak of inputs and fields."""

SECTIONS = frozenset(
    {
        "artifacts",
        "auth",
        "bridge",
        "conversations",
        "devices",
        "gateway",
        "images",
        "kafka",
        "log",
        "memory",
        "models",
        "queue_merge",
        "queue_policy",
        "queues",
        "scheduler",
        "schema_registry",
        "summarizer",
        "telemetry",
        "topics",
        "webhooks",
        "worker",
    }
)
"""The top-level names of penstock.toml, of all processes."""
ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", help="penstock.toml (default: PENSTOCK_CONFIG, ./penstock.toml).")
]
ConversationLayout = Literal["topics", "sharded"]
S = TypeVar("S", bound=BaseSettings)


class TopicsSection(Section):
    """How `penstock topics create` makes topics."""

    partitions: int = Field(default=USUAL_PARTITIONS, ge=1)
    """Partitions of each request, retry, result, status and dead-letter topic."""
    durability: Literal["replicas", "fsync"] = "replicas"
    """replicas: what all in-sync replicas hold is durable; fsync: every record is flushed too, against power loss."""
    conversation_layout: ConversationLayout = "topics"
    """topics: each conversation has a topic, which suits thousands; sharded: all are in one topic. Chosen once."""
    pools: list[str] = Field(default_factory=list[str])
    """Pools whose request topics are made too."""
    config: dict[str, dict[str, str]] = Field(default_factory=dict[str, dict[str, str]])
    """`[topics.config."inference.dlq"]`: settings of that topic (its name without the prefix) by Kafka's names, such as
    `"retention.ms" = "604800000"`. They go before Penstock's own; cleanup policies and shorter retention than two days
    are refused."""

    @field_validator("config")
    @classmethod
    def _keeps_invariants(cls, value: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
        for topic, config in value.items():
            if (wrong := wrong_override(topic, config)) is not None:
                raise ValueError(wrong)
        return value

    def named(self, field: str) -> Any:
        """None if nobody has set it."""
        return getattr(self, field) if field in self.model_fields_set else None


class ClusterSettings(ProcessSettings):
    """What the command line reads of penstock.toml and the environment."""

    kafka: KafkaSection = Field(default_factory=KafkaSection)
    topics: TopicsSection = Field(default_factory=TopicsSection)
    schema_registry: RegistrySection = Field(default_factory=RegistrySection)

    def kafka_settings(self, bootstrap_servers: str | None = None, topic_prefix: str | None = None) -> KafkaSettings:
        """The cluster for librdkafka's clients; the arguments go before the settings."""
        return self.kafka.clients("cli", bootstrap_servers, topic_prefix)


class QueueTopics(BaseModel, extra="ignore"):
    topic: str
    result_topic: str | None = None


class QueueSettings(ProcessSettings):
    """The topics of other systems that the bridge reads and writes; it checks the other fields of `[[queues]]`."""

    queues: list[QueueTopics] = Field(default_factory=list[QueueTopics])

    @property
    def topics(self) -> list[str]:
        return list(dict.fromkeys(name for one in self.queues for name in (one.topic, one.result_topic) if name))


class WorkerDrain(BaseModel, extra="ignore"):
    drain_s: float = 20.0


class GatewayDrain(BaseModel, extra="ignore"):
    drain_s: float = 15.0


class DrainSettings(ProcessSettings):
    """What a process that is told to stop has for its running work, in seconds; its other settings are its own."""

    worker: WorkerDrain = WorkerDrain()
    gateway: GatewayDrain = GatewayDrain()


def find_config(explicit: Path | None = None) -> Path | None:
    """The file to read: the one named, else PENSTOCK_CONFIG, else ./penstock.toml when there is one.

    Raises CliFailure when a file is named that is not there.
    """
    named = explicit or (Path(os.environ[ENV_CONFIG]) if os.environ.get(ENV_CONFIG) else None)
    if named is not None:
        if not named.is_file():
            raise CliFailure(f"no such configuration file: {named}", exit_code=ExitCode.USAGE)
        return named.absolute()
    here = Path(DEFAULT_NAME)
    return here.absolute() if here.is_file() else None


def use_config(explicit: Path | None = None) -> Path | None:
    """Find the file and name it to this process and its children by PENSTOCK_CONFIG."""
    path = find_config(explicit)
    if path is not None:
        os.environ[ENV_CONFIG] = str(path)
    return path


def read_toml(path: Path) -> dict[str, Any]:
    """The file's tables. Raises CliFailure that names the line of a mistake."""
    try:
        return tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CliFailure(f"{path} is not valid TOML: {error}", exit_code=ExitCode.USAGE) from error
    except OSError as error:
        raise CliFailure(f"{path} cannot be read: {error.strerror}", exit_code=ExitCode.USAGE) from error


def load(settings_type: type[S]) -> S:
    """Settings from PENSTOCK_CONFIG and the environment.

    Raises CliFailure with a line for each wrong field, and for each section that no process reads.
    """
    path = os.environ.get(ENV_CONFIG)
    lines = _unknown_sections({} if path is None else read_toml(Path(path)), path)
    try:
        settings = settings_type()
    except ValidationError as error:
        lines += [describe(one, path) for one in error.errors()]
    except (ValueError, OSError) as error:
        raise CliFailure(f"the configuration cannot be read: {error}", exit_code=ExitCode.USAGE) from error
    else:
        if not lines:
            return settings
    raise CliFailure("\n".join(lines), exit_code=ExitCode.USAGE)


def _unknown_sections(file: Mapping[str, Any], path: str | None) -> list[str]:
    """A line for each. A process passes over the sections of others, so that no settings object refuses these."""
    sections = [(path, name) for name in file]
    secrets = {str(one): one.name for one in Path(os.environ.get(ENV_SECRETS, os.devnull)).glob("*")}
    for source, variable in ({name: name for name in os.environ} | secrets).items():
        section, nested, _ = variable.upper().partition("__")
        if nested and section.startswith("PENSTOCK_"):
            sections.append((source, section.removeprefix("PENSTOCK_").lower()))
    there = ", ".join(sorted(SECTIONS))
    return [
        f"{source}: [{name}] is no section that Penstock knows; there are {there}"
        for source, name in sections
        if name not in SECTIONS
    ]


def describe(error: ErrorDetails, path: str | None) -> str:
    """One line: the field, what is wrong with it, where it was set."""
    field = ".".join(str(part) for part in error["loc"])
    where = _variable_of([str(part) for part in error["loc"]]) or path or "the environment (PENSTOCK_*)"
    whole = isinstance(error["input"], Mapping)  # all of a table, secrets too, of which the message names a part
    plain = PLAIN_WORDS.get(error["type"])
    wrong = plain or error["msg"].removeprefix("Value error, ").rstrip(".")
    has_user = isinstance(error["input"], str) and "@" in error["input"]  # of a URL, with its password
    shown = "" if plain or whole or has_user or is_secret(field) else f", not {error['input']!r}"
    about = ": ".join(filter(None, ("configuration", field, wrong)))  # what compares several fields names them itself
    return f"{about}{shortened(shown, 80)}; mend it in {where}"


def _variable_of(loc: list[str]) -> str | None:
    """The variable that set a field, or a table around it as JSON, or the secret that did: they go before the file."""
    secrets = Path(os.environ.get(ENV_SECRETS, os.devnull))
    there = {one.name.upper(): f"the file {one}" for one in secrets.glob("PENSTOCK_*")}
    there |= {name.upper().removesuffix("_FILE"): f"the variable {name}" for name in os.environ}
    there |= {name.upper(): f"the variable {name}" for name in os.environ}
    for length in range(len(loc), 0, -1):
        name = there.get("PENSTOCK_" + "__".join(part.upper() for part in loc[:length]).replace(".", "_"))
        if name is not None:
            return name
    return None


def is_secret(name: str) -> bool:
    return names_secret(name.rpartition("security.")[2])


def masked(value: Any, name: str = "") -> Any:
    """The same tree with secrets replaced by stars."""
    if isinstance(value, Mapping):
        return {key: masked(item, str(key)) for key, item in value.items()}
    if isinstance(value, list):
        return [masked(item, name) for item in value]
    if value and is_secret(name):
        return "***"
    return without_user(value) if isinstance(value, str) else value


def to_toml(tables: Mapping[str, Any]) -> str:
    """TOML of nested tables, lists and scalars; None values are left out."""
    lines: list[str] = []
    _write_table(tables, (), lines)
    return "\n".join(lines).lstrip("\n") + "\n"


def _write_table(table: Mapping[str, Any], path: tuple[str, ...], lines: list[str]) -> None:
    tables = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    arrays = {key: value for key, value in table.items() if _is_table_array(value)}
    for key, value in table.items():
        if key not in tables and key not in arrays and value is not None:
            lines.append(f"{_key(key)} = {_value(value)}")
    for key, value in tables.items():
        lines += ["", f"[{'.'.join(_key(part) for part in (*path, key))}]"]
        _write_table(value, (*path, key), lines)
    for key, values in arrays.items():
        for value in values:
            lines += ["", f"[[{'.'.join(_key(part) for part in (*path, key))}]]"]
            _write_table(value, (*path, key), lines)


def _is_table_array(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else _string(key)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        pairs = (f"{_key(str(key))} = {_value(item)}" for key, item in value.items() if item is not None)
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    return _string(str(value))


def _string(text: str) -> str:
    """A JSON string is a TOML string, but for surrogate pairs and DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
