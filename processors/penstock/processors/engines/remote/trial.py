"""Finds out whether a remote server goes on from a prefix: when its model is loaded, and later if it was away then."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

from penstock.common.background import BackgroundTasks
from penstock.processors.engines.remote.prefix import BEGUN, Json, Said, behind, closed, trial_body, unfit
from penstock.schemas.errors import InvalidRequest, ModelNotFound, PenstockError
from penstock.schemas.texts import shortened

logger = logging.getLogger(__name__)

FIRST_TRIAL_S = 10.0
"""So long a load waits for the server's answers."""
DELAYS_S = (1.0, 60.0)
"""Between trials of a server that was away: the first, and the longest."""

Ask = Callable[[Json], Awaitable[Said]]
"""Sends the body of a chat. Raises PenstockError, and whatever a connection or an odd answer raises."""


class PrefixTrial:
    """`works` once the server has shown it; else `note` says why streams begin again. It decides once."""

    def __init__(self, model: str, server_model: str, ask: Ask) -> None:
        self.works = False
        self.note: str | None = "streams begin anew after a kill: the server was not tried yet"
        self._model = model
        self._body = trial_body(server_model)
        self._ask = ask

    async def start(self, background: BackgroundTasks) -> None:
        """Try it now; in the background, until it is known, if the server does not answer."""
        known = False
        try:
            async with asyncio.timeout(FIRST_TRIAL_S):
                known = await self._try()
        except TimeoutError:
            self._untried("it did not answer in time")
        if not known:
            background.start(self._try_later(), f"trial of {self._model}")

    async def _try_later(self) -> None:
        delay_s, longest_s = DELAYS_S
        while True:
            await asyncio.sleep(delay_s * (1 + 0.2 * random.random()))
            if await self._try():
                return
            delay_s = min(2 * delay_s, longest_s)

    async def _try(self) -> bool:
        """Whether it is known now."""
        try:
            reason = await self._compare()
        except PenstockError as error:
            return self._untried(str(error))
        except Exception as error:  # broken connections, and answers of any shape
            return self._untried(type(error).__name__)
        self.works = reason is None
        self.note = None if reason is None else f"streams begin anew after a kill: {reason}"
        if reason is None:
            logger.info("remote.prefix_works model=%s", self._model)
        else:
            logger.warning("remote.prefix_unfit model=%s reason=%s", self._model, reason)
        return True

    async def _compare(self) -> str | None:
        """Why it cannot. Raises whatever says nothing about it."""
        try:
            alone = await self._ask(self._body)
            going_on = await self._ask(behind(self._body, BEGUN))
        except ModelNotFound:
            raise  # it may serve the model later
        except InvalidRequest as error:
            return shortened(f"it refuses a prefix ({error})", 300)
        try:
            closed_turn = await self._ask(closed(self._body))
        except InvalidRequest:
            closed_turn = None
        return unfit(alone, going_on, closed_turn)

    def _untried(self, why: str) -> bool:
        self.note = shortened(f"streams begin anew after a kill: the server could not be tried ({why})", 300)
        logger.info("remote.prefix_untried model=%s reason=%s", self._model, shortened(why, 200))
        return False
