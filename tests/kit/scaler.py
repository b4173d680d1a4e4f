"""What KEDA and the HorizontalPodAutoscaler make of a ScaledObject. Pure: values and times are passed in.

After KEDA's documentation (activation, cooldownPeriod) and that of the autoscaler (its formula, tolerance, behaviour).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kit.helm_chart import Manifest, Trigger, triggers

TOLERANCE = 0.1


class Scaler:
    """Of one Deployment, which has no pod at first."""

    def __init__(self, scaled: Manifest) -> None:
        spec = scaled["spec"]
        behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        self.triggers = triggers(scaled)
        self._least, self._most = spec["minReplicaCount"], spec["maxReplicaCount"]
        self._cooldown_s = spec["cooldownPeriod"]
        (self._up,), (self._down,) = (behavior[name]["policies"] for name in ("scaleUp", "scaleDown"))
        self._window_s = behavior["scaleDown"]["stabilizationWindowSeconds"]
        self._replicas = 0
        self._active_s = -math.inf
        self._wanted: list[tuple[float, int]] = []
        self._changes: list[tuple[float, int]] = []

    def replicas(self, values: Sequence[float | None], now_s: float) -> int:
        """How many pods there are to be, with these values of the triggers. An error, None, lets no pod go."""
        if any(value is not None and value > 0 for value in values):
            self._active_s = now_s
        if self._replicas == 0:
            wanted = max(1, self._least) if self._active_s == now_s else self._least
        elif self._least == 0 and now_s - self._active_s >= self._cooldown_s and None not in values:
            wanted = 0
        else:
            wanted = self._by_autoscaler(values, now_s)
        if wanted != self._replicas:
            self._changes.append((now_s, wanted - self._replicas))
            self._replicas = wanted
        return wanted

    def _by_autoscaler(self, values: Sequence[float | None], now_s: float) -> int:
        wanted = max(map(self._recommended, self.triggers, values))
        self._wanted = [one for one in self._wanted if one[0] > now_s - self._window_s] + [(now_s, wanted)]
        if wanted <= self._replicas:  # stabilized: the highest of the window
            wanted = min(self._replicas, max(count for _, count in self._wanted))
        most = self._replicas + self._left(self._up, 1, now_s)
        least = self._replicas - self._left(self._down, -1, now_s)
        return max(1, self._least, least, min(wanted, most, self._most))

    def _recommended(self, trigger: Trigger, value: float | None) -> int:
        if value is None:
            return self._replicas
        ratio = value / trigger.threshold / self._replicas
        return self._replicas if abs(ratio - 1) <= TOLERANCE else math.ceil(ratio * self._replicas)

    def _left(self, policy: Manifest, sign: int, now_s: float) -> int:
        """Pods that the policy still lets come or go in its period."""
        recent = (change for at_s, change in self._changes if at_s > now_s - policy["periodSeconds"])
        return policy["value"] - sum(abs(change) for change in recent if change * sign > 0)
