"""What the settings of every process share: the order of their sources, and the sections that several of them read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    StringConstraints,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NestedSecretsSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from penstock.common.log_setup import LogConfig, levels_of
from penstock.common.settings import KafkaSettings
from penstock.schemas.registry import RegistryAccess

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
    security: dict[str, str] = Field(default_factory=dict[str, str], repr=False)
    """librdkafka's names: security.protocol, sasl.mechanism, sasl.username, sasl.password, ssl.ca.location. In names of
    variables and files an underscore is a dot: PENSTOCK_KAFKA__SECURITY__SASL_PASSWORD."""

    restart_spread_s: float | None = Field(default=None, ge=0)
    """When certificates or mounted secrets were renewed, each process restarts at a random time within these seconds,
    so that not all restart at once. null: a quarter of the time that the former certificate has left, for at most 4 h;
    60 s where that is less, and for all but certificates."""

    @field_validator("security")
    @classmethod
    def _known_to_librdkafka(cls, security: dict[str, str]) -> dict[str, str]:
        if security:
            from penstock.common.kafka_properties import wrong_properties

            if wrong := wrong_properties(security):
                raise ValueError("; ".join(wrong))
        return security

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
    username: str | None = None
    """For basic authentication."""
    password: SecretStr | None = None
    """For basic authentication."""
    token: SecretStr | None = None
    """A bearer token, in place of a user name."""
    ca_location: str | None = None
    """A PEM file with the certificates of the authorities that are trusted; null: the system's."""
    certificate_location: str | None = None
    """A PEM file with this client's certificate, if the registry asks for one."""
    key_location: str | None = None
    """A PEM file with the key of the certificate; null: it is in the same file."""
    key_password: SecretStr | None = None
    """Of an encrypted key."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.token is not None and self.username is not None:
            raise ValueError("schema_registry.token and schema_registry.username are two ways: set one")
        if self.password is not None and self.username is None:
            raise ValueError("schema_registry.password needs schema_registry.username")
        for name in ("ca_location", "certificate_location", "key_location"):
            if (path := getattr(self, name)) is not None and not Path(path).is_file():
                raise ValueError(f"schema_registry.{name} names {path}, which is not a file")
        return self

    @property
    def access(self) -> RegistryAccess | None:
        if self.url is None:
            return None
        secrets = {name: getattr(self, name) for name in ("password", "token", "key_password")}
        return RegistryAccess(
            url=self.url,
            username=self.username,
            ca_location=self.ca_location,
            certificate_location=self.certificate_location,
            key_location=self.key_location,
            **{name: None if one is None else one.get_secret_value() for name, one in secrets.items()},
        )


class _Dotted(PydanticBaseSettingsSource):
    """Gives keys of `kafka.security` librdkafka's dots: most shells take no dot in a variable's name."""

    def __call__(self) -> dict[str, Any]:
        found = super().__call__()
        if isinstance(security := found.get("kafka", {}).get("security"), dict):
            dotted = {name.replace("_", "."): value for name, value in cast("dict[str, Any]", security).items()}
            found["kafka"]["security"] = dotted
        return found


class _Variables(_Dotted, EnvSettingsSource):
    """PENSTOCK_* variables. `NAME_FILE` is the path of a file that holds the value of the setting `NAME`.

    Raises ValueError if a file cannot be read, a setting has both variables, or a variable is gone.
    """

    def _load_env_vars(self) -> Mapping[str, str | None]:
        found = dict(super()._load_env_vars())
        if found.get("penstock_log_level"):
            raise ValueError("PENSTOCK_LOG_LEVEL is not a setting any more: set PENSTOCK_LOG__LEVEL")
        for variable in [name for name in found if name.endswith(FILE_SUFFIX) and self._names_a_file(name)]:
            name, path = variable.removesuffix(FILE_SUFFIX), found.pop(variable)
            if name in found:
                raise ValueError(f"the variables {name.upper()} and {variable.upper()} are both set: unset one")
            try:
                found[name] = Path(path or "").read_text().strip()
            except (OSError, UnicodeDecodeError) as error:
                reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
                raise ValueError(f"{variable.upper()} names {path}, which cannot be read: {reason}") from error
        return found

    def _names_a_file(self, variable: str) -> bool:
        """Whether it is no setting itself, but one without the suffix."""
        if not variable.startswith(prefix := self.env_prefix.lower()):
            return False
        path = variable.removeprefix(prefix)
        setting = self._setting(path)
        if setting is None:
            return self._setting(path.removesuffix(FILE_SUFFIX)) is not None
        return not isinstance(setting, FieldInfo) and not path.endswith(_NAME_FILES)

    def _setting(self, path: str) -> FieldInfo | type[Any] | None:
        """The field, or the type of a table's values: any key of a table is a setting."""
        first, *parts = path.split("__")
        found: FieldInfo | type[Any] | None = self.settings_cls.model_fields.get(first)
        for part in parts:
            found = self.next_field(found, part, case_sensitive=False)
        return found


FILE_SUFFIX = "_file"
_NAME_FILES = ("token_file", "assertion_file", "private_key_file", "jwt_template_file")
"""Keys of tables that name a file: aws_web_identity_token_file, sasl.oauthbearer.assertion.file and others."""


class _SecretFiles(_Dotted, NestedSecretsSettingsSource):
    """The files in the folder of PENSTOCK_SECRETS."""


class LogSection(Section):
    format: Literal["text", "json"] = "text"
    """text: for people; json: one object a line. See [logs](../how-to/operation.md#logs)."""
    level: str = "info"
    """debug, info, warning, error or critical. A module has its own level behind a comma, which holds for all below it:
    `info,penstock.gateway=debug,penstock.gateway.edge.http_log=warning`."""

    @field_validator("level")
    @classmethod
    def _is_known(cls, level: str) -> str:
        levels_of(level)
        return level

    @property
    def config(self) -> LogConfig:
        return LogConfig(format=self.format, level=self.level)


class TelemetrySection(Section):
    """OpenTelemetry's own variables say where spans go: `OTEL_EXPORTER_OTLP_ENDPOINT` and its like."""

    traces: bool = False
    """Export traces by OTLP over HTTP. Needs the extra `telemetry`."""
    content: bool = False
    """Spans of runs hold prompts and outputs, cut to 16 KiB each."""

    @field_validator("traces")
    @classmethod
    def _is_installed(cls, traces: bool) -> bool:
        if traces:
            try:
                for module in ("sdk.trace.export", "exporter.otlp.proto.http.trace_exporter"):
                    import_module(f"opentelemetry.{module}")
            except ImportError:
                raise ValueError("the extra telemetry is not installed here: install penstock[telemetry]") from None
        return traces


class ProcessSettings(BaseSettings):
    """Defaults, then the TOML file that PENSTOCK_CONFIG names, then the files in the folder of PENSTOCK_SECRETS, then
    PENSTOCK_* variables and the files that PENSTOCK_*_FILE name. Raises FileNotFoundError, ValueError.
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
        sources = [init_settings, _Variables(settings_cls)]
        if (secrets := os.environ.get(ENV_SECRETS)) is not None:
            if not Path(secrets).is_dir():
                raise FileNotFoundError(f"{ENV_SECRETS} names {secrets}, which is not a folder")
            sources.append(_SecretFiles(file_secret_settings, secrets_dir=secrets))
        if (config := os.environ.get(ENV_CONFIG)) is not None:
            if not Path(config).is_file():
                raise FileNotFoundError(f"{ENV_CONFIG} names {config}, which is not a file")
            sources.append(TomlConfigSettingsSource(settings_cls, toml_file=config))
        return (*sources,)


class LogSettings(ProcessSettings):
    """What a process reads before all else."""

    log: LogSection = Field(default_factory=LogSection)


class KafkaProcessSettings(LogSettings):
    """Of a process with Kafka clients, which is called `process` in their ids."""

    process: ClassVar[str]
    kafka: KafkaSection = Field(default_factory=KafkaSection)

    def kafka_settings(self) -> KafkaSettings:
        return self.kafka.clients(self.process)
