"""Python source that grows line by line and is compiled once. The generated encoders and decoders are made with it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from penstock.schemas.compiled.tree import Unsupported

MAX_LINES = 20_000


class Source:
    """The body of one function. `constants` are the names that it may use."""

    def __init__(self, head: str, constants: dict[str, Any]) -> None:
        self._lines = [head]
        self._depth = 1
        self._constants = dict(constants)
        self._count = 0

    def line(self, text: str) -> None:
        if len(self._lines) >= MAX_LINES:  # a few names that refer to one another can grow without end
            raise Unsupported("a schema that is too large")
        self._lines.append("    " * self._depth + text)

    @contextmanager
    def block(self, head: str) -> Generator[None]:
        """The lines within stand under `head`."""
        self.line(head)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def fresh(self, prefix: str) -> str:
        """A name that nothing else has."""
        self._count += 1
        return f"{prefix}{self._count}"

    def constant(self, value: Any) -> str:
        """The name under which the function finds a value."""
        name = self.fresh("K")
        self._constants[name] = value
        return name

    @property
    def text(self) -> str:
        return "\n".join(self._lines) + "\n"

    def compiled(self, function: str, about: str) -> Any:
        """The function. `about` is in tracebacks."""
        # The text is made of the schema's structure alone: names reach it only as checked identifiers or by repr.
        exec(compile(self.text, f"<{about}>", "exec"), self._constants)
        return self._constants[function]
