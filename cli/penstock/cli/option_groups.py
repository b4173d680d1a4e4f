"""Options that several commands share are the fields of a class, and that class is one parameter of each command."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from math import isfinite
from typing import Any, TypeVar, get_type_hints

import typer

Function = TypeVar("Function", bound=Callable[..., Any])


class App(typer.Typer):
    """A Typer whose commands may have parameters that are dataclasses."""

    def command(self, *args: Any, **kwargs: Any) -> Callable[[Function], Function]:
        register = super().command(*args, **kwargs)

        def add(function: Function) -> Function:
            register(with_fields(function))
            return function

        return add


def with_fields(function: Callable[..., Any]) -> Callable[..., Any]:
    """The command as Typer reads it: in place of a parameter that is a dataclass it has the fields of the class.

    An instance that is a context manager is open while the command runs. Its options come behind all others.
    """
    groups: dict[str, Any] = {}
    parameters: list[Parameter] = []
    last: list[Parameter] = []
    for name, one in signature(function, eval_str=True).parameters.items():
        if not is_dataclass(one.annotation):
            parameters.append(one.replace(kind=Parameter.KEYWORD_ONLY))
            continue
        groups[name] = one.annotation
        types = get_type_hints(one.annotation, include_extras=True)
        place = last if hasattr(one.annotation, "__exit__") else parameters
        place += [
            Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=types[field.name])
            for field in fields(one.annotation)
            if field.init
        ]

    @wraps(function)
    def command(**given: Any) -> Any:
        for name, value in given.items():
            if isinstance(value, float) and not isfinite(value):
                raise typer.BadParameter(f"--{name.replace('_', '-')}: {value} is not a finite number")
        with ExitStack() as opened:
            for name, group in groups.items():
                made = group(**{field.name: given.pop(field.name) for field in fields(group) if field.init})
                given[name] = opened.enter_context(made) if hasattr(made, "__exit__") else made
            return function(**given)

    vars(command).pop("__wrapped__")
    vars(command)["__signature__"] = Signature([*parameters, *last])
    command.__annotations__ = {one.name: one.annotation for one in (*parameters, *last)}
    return command
