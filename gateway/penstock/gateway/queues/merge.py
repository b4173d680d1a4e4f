"""Which queue is next: the merge policies, pure. Randomness is passed in."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from random import Random

from penstock.gateway.queues.settings import QueuePolicy


class Merge:
    """Chooses among queues that have a message, each known by its number in their order.

    strict: the first of them. round_robin: in turn. random: by chance, in proportion to the weights. weighted: in
    proportion too, but evenly spread: nginx's smooth weighted round-robin. A queue that has nothing loses nothing
    that it could make up for later: its turn passes.
    """

    def __init__(self, policy: QueuePolicy, weights: Sequence[int], random: Random) -> None:
        self._policy: QueuePolicy = policy
        self._weights = list(weights)
        self._credit = [0] * len(self._weights)
        self._last = -1
        self._random = random

    def next(self, ready: Collection[int]) -> int:
        """The queue whose message goes next. Raises ValueError when none is ready."""
        if not ready:
            raise ValueError("no queue is ready")
        among = sorted(ready)
        match self._policy:
            case "strict":
                chosen = among[0]
            case "round_robin":
                chosen = next((queue for queue in among if queue > self._last), among[0])
            case "random":
                chosen = self._random.choices(among, [self._weights[queue] for queue in among])[0]
            case "weighted":
                chosen = self._smooth(among)
        self._last = chosen
        return chosen

    def _smooth(self, among: Sequence[int]) -> int:
        for queue in range(len(self._credit)):
            if queue not in among:
                self._credit[queue] = 0
        total = 0
        for queue in among:
            self._credit[queue] += self._weights[queue]
            total += self._weights[queue]
        chosen = max(among, key=lambda queue: (self._credit[queue], -queue))
        self._credit[chosen] -= total
        return chosen
