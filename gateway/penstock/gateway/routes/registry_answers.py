"""The answers of the schema registry's routes, as `answers` has those of requests."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from penstock.gateway.routes.answers import Answer


class RegistrySchema(Answer):
    schema_: Annotated[str, Field(alias="schema")]


class RegistrySubjectVersion(Answer):
    subject: str
    version: int


class RegistryVersion(RegistrySubjectVersion):
    id: int
    schema_: Annotated[str, Field(alias="schema")]


class RegistryId(Answer):
    id: int


class RegistryErrorBody(Answer):
    error_code: int
    message: str
