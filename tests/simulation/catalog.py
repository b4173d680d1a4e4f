"""Which models a simulated worker serves."""

from __future__ import annotations

from penstock.schemas.abilities import Need
from penstock.schemas.choosing import Choice
from penstock.schemas.errors import ModelNotFound


class Catalog:
    """Which of a worker's models serves a request."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def resolve(self, task: str, model: str | None, need: Need | None = None) -> Choice:
        if model is None and self.names:
            return Choice(self.names[0], "it is the first")
        if model is None or model not in self.names:
            raise ModelNotFound(f"no model {model}")
        return Choice(model)
