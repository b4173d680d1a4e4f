"""Makes the engine of a configured model: the one place that knows all kinds of engines."""

from __future__ import annotations

from penstock.processors.engines.backend import BACKENDS
from penstock.processors.engines.base import Engine
from penstock.processors.engines.loading import cache_tokens
from penstock.processors.engines.noop import NoopEngine
from penstock.processors.models.catalog import ModelConfig
from penstock.processors.models.sizing import ModelSize, estimate
from penstock.schemas.errors import InvalidRequest


def make_engine(
    config: ModelConfig, size: ModelSize, device: str | None = None, granted_bytes: int | None = None
) -> Engine:
    """The engine, not started, for a device and so many granted bytes of it.

    Those in processes take the options load_timeout_s (300) and silent_s (60).

    Raises InvalidRequest.
    """
    options = dict(config.options)
    if device is not None:
        options["device"] = device
    if config.engine == "noop":
        return NoopEngine(config.id, options)
    if config.engine == "remote":
        from penstock.processors.engines.remote import RemoteEngine

        return RemoteEngine(config.id, config.source, options)
    if config.engine not in BACKENDS:
        raise InvalidRequest(f"{config.id}: there is no engine {config.engine}", param="models")
    from penstock.processors.engines.host import ChildEngine

    load_timeout_s = float(options.pop("load_timeout_s", 300))
    silent_s = float(options.pop("silent_s", 60))
    if config.engine == "text":
        options["cache_tokens"] = cache_tokens(options)
    options["granted_bytes"] = size.need_bytes if granted_bytes is None else granted_bytes
    return ChildEngine(
        config.id,
        BACKENDS[config.engine],
        size.source,
        options,
        limits=estimate(config).limits,
        load_timeout_s=load_timeout_s,
        silent_s=silent_s,
    )
