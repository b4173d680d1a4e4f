"""What the settings of every process share: the order of their sources, and the sections that several of them read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, StringConstraints, model_validator
from pydantic_settings import (
    BaseSettings,
    NestedSecretsSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from penstock.common.settings import KafkaSettings

ENV_CONFIG = "PENSTOCK_CONFIG"
ENV_SECRETS = "PENSTOCK_SECRETS"
"""Names a folder of files, each with the value of the variable whose name it has: as secrets are mounted."""


class Section(BaseModel):
    """A section of one process's own; an unknown key is an error, so that a typing slip does not pass unseen.

    `successors`: by the name of a setting that is gone, what to write in its place.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    successors: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _name_successors(cls, value: Any) -> Any:
        if isinstance(value, dict):
            for name in cls.successors.keys() & cast("dict[str, Any]", value).keys():
                raise ValueError(f"{name} is not a setting any more: {cls.successors[name]}")
        return cast("Any", value)


class SharedSection(BaseModel):
    """A section of which this process reads some keys: the others are for another process, which checks them."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class KafkaSection(Section):
    """How to reach Kafka."""

    bootstrap_servers: str = "127.0.0.1:9092"
    """Brokers to begin with, `host:port`, separated by commas."""
    topic_prefix: str = ""
    """Stands before every topic name, so that several installations can share a cluster."""
    client_id: str | None = None
    """The name by which the brokers' logs and quotas know this process; null: penstock-worker, -gateway, -bridge,
    -webhooks or -cli."""
    max_record_bytes: int = 1_000_000
    """The largest record that this process writes: key, value and headers together."""
    security: dict[str, str] = Field(default_factory=dict[str, str])
    """librdkafka's names: security.protocol, sasl.mechanism, sasl.username, sasl.password, ssl.ca.location."""

    def clients(
        self, process: str, bootstrap_servers: str | None = None, topic_prefix: str | None = None
    ) -> KafkaSettings:
        """For Kafka clients of this process (`worker`, `gateway`, …); the other arguments go before the section."""
        return KafkaSettings(
            bootstrap_servers=bootstrap_servers or self.bootstrap_servers,
            topic_prefix=self.topic_prefix if topic_prefix is None else topic_prefix,
            security=dict(self.security),
            client_id=self.client_id or f"penstock-{process}",
            max_record_bytes=self.max_record_bytes,
        )


def _as_text(value: object) -> object:
    """TOML's true and numbers, as the options of a store have them."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int) else value


StoreOptions = dict[str, Annotated[SecretStr, BeforeValidator(_as_text)]]
"""Options of a store's client, by their names there; any of them may be a credential, so none is ever shown."""


class StoreSection(Section):
    """One more store of artifacts, which `output.store` of a request chooses by its name."""

    location: str = Field(min_length=1)
    """The folder, or the URL: `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`."""
    options: StoreOptions = Field(default_factory=StoreOptions)
    """As `artifacts.options`."""
    presigned_urls: bool = True
    """As `artifacts.presigned_urls`."""


class ArtifactsSection(Section):
    location: str = Field(default=".penstock/artifacts", min_length=1)
    """The folder, or the URL (`s3://bucket/prefix`, `gs://…`, `az://…`), of uploads, images and outputs over 256 KiB:
    one for all processes."""
    options: StoreOptions = Field(default_factory=StoreOptions)
    """For a URL: options of its client, such as `aws_endpoint`, `aws_region`, `aws_access_key_id`,
    `aws_secret_access_key`, `google_service_account` (the file of its key), `allow_http`; what is not here comes from
    the usual variables (`AWS_…`, `GOOGLE_…`, `AZURE_…`)."""
    presigned_urls: bool = True
    """Hand out URLs that the store itself serves, where it can; false where browsers do not reach the store. GCS can
    with the private key of a service account; without one its client asks Google's IAM for each signature."""
    ttl_s: float | None = Field(default=None, gt=0)
    """Seconds for which an artifact is kept that came without a time of its own; null: until it is deleted. What a
    conversation refers to lives as long as the conversation."""
    max_bytes: int = Field(default=100 * 2**20, ge=1)
    """The largest artifact, in bytes."""
    stores: dict[Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,63}$")], StoreSection] = Field(
        default_factory=dict[str, StoreSection]
    )
    """`[artifacts.stores.NAME]`: other places, each with `location`, `options` and `presigned_urls`; `output.store` of
    a request chooses one for the bytes of its outputs."""


class RegistrySection(Section):
    url: str | None = None
    """A Confluent-compatible registry: our schemas are registered there, and ids from it are read."""
    write: bool = False
    """Write the registry's ids in place of our own."""


class ProcessSettings(BaseSettings):
    """Defaults, then the TOML file that PENSTOCK_CONFIG names, then the files in the folder of PENSTOCK_SECRETS, then
    PENSTOCK_* variables. Raises FileNotFoundError.
    """

    model_config = SettingsConfigDict(
        env_prefix="PENSTOCK_", env_nested_delimiter="__", extra="ignore", frozen=True, protected_namespaces=()
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        sources = [init_settings, env_settings]
        if (secrets := os.environ.get(ENV_SECRETS)) is not None:
            if not Path(secrets).is_dir():
                raise FileNotFoundError(f"{ENV_SECRETS} names {secrets}, which is not a folder")
            sources.append(NestedSecretsSettingsSource(file_secret_settings, secrets_dir=secrets))
        if (config := os.environ.get(ENV_CONFIG)) is not None:
            if not Path(config).is_file():
                raise FileNotFoundError(f"{ENV_CONFIG} names {config}, which is not a file")
            sources.append(TomlConfigSettingsSource(settings_cls, toml_file=config))
        return (*sources,)
