"""Waiting for an order: until the workers of its pool have observed it, then for the state that it asks for."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from penstock.cli.commands.api_paths import ApiPath, api_path, named_path
from penstock.cli.commands.common import Gateway, errors
from penstock.cli.failures import CliFailure, ExitCode

Json = dict[str, Any]
Reached = Callable[[Json], bool]
"""Whether a model, as the gateway shows it, stands as the order asks."""
ROOT: Final = "/v1/admin/models"
WAIT_S = 600.0
POLL_S = 0.5
FAILED_S = 10.0
"""A model that is failed for so long is not waited for: a load is tried again a few times."""


def path_of(name: str, action: str = "") -> ApiPath:
    return named_path(ROOT, name, *filter(None, (action,)))


def state_text(facts: Mapping[str, Any]) -> str:
    """A state for people: with how far its loading is."""
    progress = facts.get("progress")
    return (
        f"{facts['state']} {progress:.0%}" if progress is not None and facts["state"] == "loading" else facts["state"]
    )


def reason_text(facts: Mapping[str, Any]) -> str | None:
    """Why a model or a replica is in its state, and what made its newest load fail."""
    return ": ".join(filter(None, (facts["reason"], facts.get("cause")))) or None


class OrderWait:
    """Waits for one order, at most so many seconds in all, and prints progress. `order` is the gateway's answer."""

    def __init__(self, gateway: Gateway, order: Json, timeout_s: float) -> None:
        self._gateway = gateway
        self._order = order
        self._timeout_s = timeout_s
        self._give_up = time.monotonic() + timeout_s
        self._printed = ""

    def until_observed(self) -> None:
        """Until the pool has live workers and all of them have observed the order: no earlier state is judged.

        Raises CliFailure (4) when that takes too long.
        """
        path = api_path("/v1/admin/orders", self._order["revision"])
        while not (facts := self._gateway.call("GET", path, pool=self._order["pool"]))["observed"]:
            waiting = ", ".join(facts["waiting_workers"])
            missing = f"not observed yet by {waiting}" if waiting else "no live worker is in its pool"
            self._print(missing)
            self._pause(f"the order was not observed within {self._timeout_s:g} s: {missing}")

    def until(self, reached: Reached) -> Json:
        """The model once it is as it should be. Raises CliFailure when it fails (1) or takes too long (4)."""
        name, pool, failed_since = self._order["name"], self._order["pool"], None
        while not reached(model := self._gateway.call("GET", path_of(name), pool=pool)):
            reason = reason_text(model)
            if self._print(f"{state_text(model)}{': ' + reason if reason else ''}"):
                failed_since = time.monotonic()
            if model["state"] == "failed" and failed_since and time.monotonic() - failed_since > FAILED_S:
                raise CliFailure(f"{name} failed: {reason or 'the worker log says why'}")
            self._pause(f"{name} is still {model['state']} after {self._timeout_s:g} s")
        return model

    def _print(self, text: str) -> bool:
        """Whether it is another text than before."""
        new = text != self._printed
        if new:
            errors.print(f"{self._order['name']}: {text}", highlight=False, markup=False)
            self._printed = text
        return new

    def _pause(self, too_long: str) -> None:
        if time.monotonic() >= self._give_up:
            raise CliFailure(too_long, exit_code=ExitCode.TIMED_OUT)
        time.sleep(POLL_S)
