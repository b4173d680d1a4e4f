"""cli.md, from the command tree that `--help` prints."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_origin

import typer.main

from generator.markdown import code, document, table
from penstock.cli.main import app

INTRO = """\
What `--help` says of each command. Every command has `--help` (`-h`); a value in brackets may be left out.

Exit codes: 0 done, 1 failed, 2 wrong usage, 3 unreachable, 4 timed out, 130 interrupted."""

EXAMPLE = re.compile(r"(?:[A-Z_]+=\S+ )*penstock\b")


def page() -> str:
    commands = list(tree())
    top = [path for path, _ in commands if len(path) == 1]
    parts = [INTRO, " · ".join(f"[{name}](#penstock-{name})" for (name,) in top)]
    parts += [describe(path, command) for path, command in commands]
    return document("Command line", *parts)


def tree() -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each command below `penstock` by its path, groups before their commands, in the order of `--help`."""
    root: Any = typer.main.get_command(app)
    context = root.make_context("penstock", [], resilient_parsing=True)
    for name in root.list_commands(context):
        yield from _below((name,), root.get_command(context, name))


def _below(path: tuple[str, ...], command: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from _below((*path, name), inner)


def describe(path: tuple[str, ...], command: Any) -> str:
    prose, examples = split_help(command.help or "")
    parts = [f"{'#' * (len(path) + 1)} penstock {' '.join(path)}", *prose]
    if hasattr(command, "commands"):
        names = [f"[{name}](#penstock-{'-'.join(path)}-{name})" for name in command.commands]
        parts.append("Commands: " + ", ".join(names))
        if not command.invoke_without_command:
            return "\n\n".join(parts)
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and not p.hidden and p.name != "help"]
    usage = " ".join(["penstock", *path, *map(argument_text, arguments), *(["[options]"] if options else [])])
    parts.append(f"Usage: `{usage}`")
    if examples:
        parts.append("```sh\n" + "\n".join(examples) + "\n```")
    rows = [[argument_text(param).strip("[]"), "argument", param.help or ""] for param in arguments]
    rows += [[option_text(param), value_text(param), option_meaning(param)] for param in options]
    if rows:
        parts.append(table(["name", "value", "meaning"], [[code(row[0]), *row[1:]] for row in rows]))
    return "\n\n".join(parts)


def split_help(text: str) -> tuple[list[str], list[str]]:
    """(paragraphs, command lines of examples)."""
    prose: list[str] = []
    examples: list[str] = []
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        words = " ".join(paragraph.split())
        before, mark, after = words.partition("Examples:" if "Examples:" in words else "Example:")
        if not mark and EXAMPLE.match(words):
            before, after = "", words
        prose += [before.strip()] if before.strip() else []
        examples += [after.strip()] if after.strip() else []
    return prose, examples


def argument_text(param: Any) -> str:
    name = param.name.upper() + ("…" if param.nargs == -1 else "")
    return name if param.required else f"[{name}]"


def option_text(param: Any) -> str:
    return ", ".join([*param.opts, *param.secondary_opts])


def value_text(param: Any) -> str:
    """What the option takes: nothing for a switch."""
    if param.is_flag:
        return "switch"
    words: dict[Any, str] = {str: "text", int: "integer", float: "number", Path: "path"}
    annotation: Any = param.type_descriptor.annotation
    kind: Any = get_args(annotation)[0] if get_origin(annotation) is list else annotation
    repeatable = ", repeatable" if param.multiple else ""
    if isinstance(kind, type) and issubclass(kind, Enum):
        return " or ".join(code(choice.value) for choice in kind) + repeatable
    least = "" if param.min is None else f", at least {param.min:g}"
    most = "" if param.max is None else f", at most {param.max}"
    return words[kind] + least + most + repeatable


def option_meaning(param: Any) -> str:
    notes: list[str] = []
    if param.required:
        notes.append("Required.")
    elif param.default is not None and param.default is not False and param.default != "":
        notes.append(f"Default: {code(default_text(param))}.")
    if param.envvar:
        notes.append(f"Variable: {code(param.envvar)}.")
    return " ".join([param.help or "", *notes])


def default_text(param: Any) -> str:
    return param.opts[0] if param.default is True else str(param.default)
