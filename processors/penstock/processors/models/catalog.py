"""The catalog: which models are configured, and which of them serves a request."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.common.engine_kinds import KINDS, EngineKind
from penstock.common.model_entry import PRIORITY, ModelEntry, RetriesSection
from penstock.processors.core.work.retries import RetrySettings
from penstock.schemas.abilities import READ_IMAGES, WORDS, Need
from penstock.schemas.errors import InvalidRequest, ModelNotFound, UnsupportedParameter


def retry_settings(section: RetriesSection) -> RetrySettings:
    """The settings as the retry policy takes them."""
    return RetrySettings(backoff=section.backoff, first_s=section.first_s, longest_s=section.longest_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A configured model. `source`: hub id, folder, GGUF file, URL of a server (remote) or anything (noop).

    `options` is all that its engine gets: the entry's own options, and the fields of the entry that concern it.
    """

    id: str
    source: str
    engine: str
    tasks: tuple[str, ...] = ("text_generation",)
    aliases: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    revision: str | None = None
    device: str | None = None
    """None: a card if one can hold it, else main memory (`auto_device`)."""
    min_replicas: int = 1
    max_replicas: int = 1
    vram_bytes: int | None = None
    """What one engine needs, when the operator says so; None: estimated from the files."""
    max_batch_size: int | None = None
    priority: int = PRIORITY
    pinned: bool = False
    preload: bool = True
    keep_alive_s: float | None = None
    """None: until others need its memory."""
    max_execution_s: float | None = None
    max_attempts: int | None = None
    retries: RetrySettings | None = None
    adapters: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Fields of the payload, in its normal form, for requests that leave them out."""

    @classmethod
    def of(cls, entry: ModelEntry) -> ModelConfig:
        defaults = entry.payload_defaults()
        device = None if entry.device == "auto" else entry.device
        told = {
            "device": device,
            "dtype": entry.dtype,
            "quantization": entry.quantization,
            "window": entry.window,
            "slots": entry.max_batch_size,
            "trust_remote_code": entry.trust_remote_code or None,
        }
        return cls(
            id=entry.id,
            source=entry.source,
            engine=entry.engine,
            tasks=tuple(entry.tasks),
            aliases=tuple(entry.aliases),
            options={**entry.options, **{name: value for name, value in told.items() if value is not None}},
            revision=entry.revision,
            device=device,
            min_replicas=entry.replicas.min,
            max_replicas=entry.replicas.max,
            vram_bytes=entry.vram_bytes,
            max_batch_size=entry.max_batch_size,
            priority=entry.priority,
            pinned=entry.pinned,
            preload=entry.preload,
            keep_alive_s=entry.keep_alive,
            max_execution_s=entry.max_execution_s,
            max_attempts=entry.max_attempts,
            retries=None if entry.retries is None else retry_settings(entry.retries),
            adapters=tuple(entry.adapters),
            defaults=defaults,
        )

    @property
    def devices(self) -> int:
        """How many devices one engine of it takes."""
        return int(self.options.get("devices", 1)) if self.engine == "managed" else 1

    @property
    def keep_weight(self) -> float:
        """How much keeping it loaded counts, 1 for an ordinary model: each step of priority is twice as much."""
        return 2.0 ** max(-10, min(10, PRIORITY - self.priority))

    @property
    def kind(self) -> EngineKind:
        """What is known of its kind of engine. Raises InvalidRequest for one that there is not."""
        if self.engine not in KINDS:
            raise InvalidRequest(f"{self.id}: there is no engine {self.engine}", param="models")
        return KINDS[self.engine]

    def can(self, need: Need) -> bool:
        """Whether it does what a request needs beyond the task."""
        return need.ability in self.abilities

    @property
    def abilities(self) -> frozenset[str]:
        """What it does beyond its tasks. A server that describes images reads those among messages too."""
        kind = self.kind
        return kind.abilities | {READ_IMAGES} if kind.openai and "image_to_text" in self.tasks else kind.abilities

    @property
    def local(self) -> bool:
        """Whether it runs in processes on this machine, with memory to be granted."""
        return self.kind.local


_OF_THE_ENGINE = ("source", "engine", "tasks", "options", "revision", "device", "vram_bytes", "adapters")
"""Fields of a configuration that its engine is made of. `max_batch_size` reaches the engine as the option `slots`."""


def engine_identity(config: ModelConfig) -> str:
    """What an engine of this model is made of. A model whose identity changes needs other engines."""
    return json.dumps({name: getattr(config, name) for name in _OF_THE_ENGINE}, sort_keys=True, default=str)


def entry_digest(config: ModelConfig) -> str:
    """Names what requests notice of a configuration. Hosts may differ in devices, memory and numbers of replicas."""
    names = ("source", "engine", "tasks", "aliases", "options", "revision", "adapters", "defaults")
    facts = {name: getattr(config, name) for name in names}
    facts["options"] = {name: value for name, value in config.options.items() if name != "device"}
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:12]


ITEMS = ModelConfig(id="conversation-items", source="", engine="items", tasks=("conversation_items",))
"""Appends to conversations, in each worker."""


class Catalog:
    """The models that this worker serves, by id and alias."""

    def __init__(self, configs: Iterable[ModelConfig]) -> None:
        self.replace(configs)

    def replace(self, configs: Iterable[ModelConfig]) -> None:
        """Serve these from now on. Raises InvalidRequest when two have one name."""
        self._configs = list(configs)
        self._names: dict[str, ModelConfig] = {}
        for config in self._configs:
            for name in (config.id, *config.aliases):
                if name in self._names:
                    raise InvalidRequest(f"two models are called {name}; names and aliases must differ", param="models")
                self._names[name] = config

    def __iter__(self) -> Iterator[ModelConfig]:
        return iter(self._configs)

    def get(self, model: str) -> ModelConfig:
        """By id or alias. Raises ModelNotFound."""
        config = self._names.get(model)
        if config is None:
            raise ModelNotFound(f"the model {model} is not served here", param="model")
        return config

    def named(self, task: str, model: str, need: Need | None = None) -> ModelConfig:
        """By id or alias, if it serves the task. Raises ModelNotFound, UnsupportedParameter when it cannot do it."""
        config = self.get(model)
        if task not in config.tasks:
            raise ModelNotFound(f"the model {model} does not serve {task}", param="model")
        if need is not None and not config.can(need):
            raise UnsupportedParameter(
                f"{need.param}: {model} is no model that {WORDS[need.ability]}", param=need.param
            )
        return config

    def serving(self, task: str, need: Need | None = None) -> list[ModelConfig]:
        """Those that serve the task, in their order. Raises ModelNotFound when there is none, UnsupportedParameter
        when none of them can do what is needed."""
        found = [config for config in self._configs if task in config.tasks]
        if not found:
            raise ModelNotFound(f"no model here serves {task}", param="model")
        able = [config for config in found if need is None or config.can(need)]
        if not able:
            assert need is not None
            raise UnsupportedParameter(f"{need.param}: no model here {WORDS[need.ability]}", param=need.param)
        return able


def share_cores(configs: Sequence[ModelConfig], cores: int) -> dict[str, ModelConfig]:
    """By id, with `threads` for each local engine that names none: two that want all cores slow each other sevenfold.

    One core is left to Kafka, the worker and the gateway where there are more than two. Models that are
    loaded only when somebody asks for them are not counted.
    """
    local = sum(config.local and config.preload for config in configs)
    threads = max(1, (cores - 1) // max(1, local))
    return {
        config.id: replace(config, options={"threads": threads, **config.options}) if config.local else config
        for config in configs
    }
