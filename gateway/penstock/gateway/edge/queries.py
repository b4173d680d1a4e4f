"""Query strings: a parameter that a route does not have is refused by its name, on every HTTP route alike."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import isclass

from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import HTTPConnection

from penstock.gateway.edge.rules import rules_of
from penstock.schemas.errors import UnsupportedParameter

HARMLESS = frozenset({"api-version"})
"""Clients for Azure send it with every call. No route depends on it."""


def refuse_unknown_query(connection: HTTPConnection) -> None:
    """A dependency of all routes. A route has the parameters of its endpoint and those of its rules.

    Raises UnsupportedParameter.
    """
    route = connection.scope.get("route")
    if not connection.scope["query_string"] or not isinstance(route, APIRoute):
        return
    rules = rules_of(connection.scope)
    known = {*_parameters(route.dependant), *rules.query, *(("ticket",) if rules.tickets else ())}
    for name in connection.query_params:
        if name not in known and name not in HARMLESS:
            there = f"this route has {', '.join(sorted(known))}" if known else "this route has none"
            shown = name[:100]
            raise UnsupportedParameter(f"the query parameter `{shown}` is not known: {there}", param=shown)


def _parameters(dependant: Dependant) -> Iterator[str]:
    for field in dependant.query_params:
        kind = field.field_info.annotation
        if isclass(kind) and issubclass(kind, BaseModel):
            yield from (one.alias or name for name, one in kind.model_fields.items())
        else:
            yield field.alias
    for one in dependant.dependencies:
        yield from _parameters(one)
