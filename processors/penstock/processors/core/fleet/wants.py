"""Who wants a replica, and in which order they are served; and which replica nobody wants any more. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from penstock.processors.core.fleet.views import NEVER, NO_DEMAND, ModelView, PlacementSettings, ReplicaView, Want


@dataclass(frozen=True, slots=True)
class Wants:
    """Those of one placement."""

    now: float
    models: Mapping[str, ModelView]
    replicas: Sequence[ReplicaView]
    of_model: Mapping[str, Sequence[ReplicaView]]
    settings: PlacementSettings

    def in_order(self) -> list[Want]:
        wants = [want for view in self.models.values() if (want := self._want(view)) is not None]
        if not wants:
            return []
        promised = self._promised()
        orders = {want.view.model: min(want.order, promised.get(want.view.model, NEVER)) for want in wants}
        first: dict[float, float] = {}
        for want in wants:
            order = orders[want.view.model]
            first[order] = min(first.get(order, NEVER), want.oldest)

        def by_lookahead(want: Want) -> tuple[float, ...]:
            view, order = want.view, orders[want.view.model]
            near = 0.0 if want.oldest == NEVER else (want.oldest - first[order]) // max(self.settings.lookahead_s, 1e-9)
            weight = view.demand.weight or float(sum(view.demand.counts.values()))
            # Of those that are near: Smith's rule, weight over time. It makes the weighted sum of waiting least on one
            # machine (W. E. Smith, "Various optimizers for single-stage production", 1956).
            # Before them come runs of loaded models: were another model loaded in place of theirs, its runs would wait
            # as theirs do now, and none would ever end.
            rate = weight / max(view.load_seconds, 1e-3)
            return (order, view.model not in promised, near, view.at is None, -rate, want.oldest)

        return sorted(wants, key=by_lookahead)

    def to_scale_out(self) -> Iterator[Want]:
        """Saturated models, of which one replica more may be loaded when all that is asked for is loaded."""
        for view in self.models.values():
            since = view.saturated_since
            if since is None or view.paused or view.desired_loaded is False or self.now < view.broken_until:
                continue
            replicas = [one for one in self.of_model[view.model] if one.state in ("loading", "ready")]
            if not 0 < len(replicas) < view.max_replicas or any(one.state == "loading" for one in replicas):
                continue
            if self.now - since >= max(self.settings.scale_after_s, view.load_seconds):
                yield Want(view, "saturated", NO_DEMAND, NEVER, NEVER)

    def outlived(self, view: ModelView, replica: ReplicaView) -> bool:
        """Whether nobody has used an idle replica for as long as it is kept alive."""
        if view.keep_alive_s is None or view.pinned or view.preload or view.desired_loaded:
            return False
        if view.most_urgent()[0] < NO_DEMAND or len(self.of_model[view.model]) <= view.min_replicas:
            return False
        times = [at for at in (replica.last_used_at, replica.ready_at) if at is not None]
        return bool(times) and self.now - max(times) >= view.keep_alive_s

    def _promised(self) -> dict[str, float]:
        """The models that others are given up for, and the rank of the most urgent of those.

        The room that comes is theirs: who gave it up does not take it back, or the two would take turns for ever.
        """
        promised: dict[str, float] = {}
        for replica in self.replicas:
            if replica.for_model is not None and replica.state in ("draining", "unloading"):
                victim = self.models.get(replica.model)
                rank = NEVER if victim is None else victim.most_urgent()[0]
                promised[replica.for_model] = min(promised.get(replica.for_model, NEVER), rank)
        return promised

    def _want(self, view: ModelView) -> Want | None:
        if view.desired_loaded is False or self.now < view.broken_until:
            return None
        up = sum(replica.state in ("loading", "ready") for replica in self.of_model[view.model])
        rank, oldest = view.most_urgent()
        if up == 0 and rank < NO_DEMAND:
            waited = self.now - min(view.demand.oldest[klass] for klass, count in view.demand.counts.items() if count)
            aged = rank > 0 and waited > self.settings.aging_s
            starved = rank > 0 and waited > self.settings.aging_s * self.settings.aged_share
            return Want(view, "demand", rank, oldest, 0.0 if starved else float(rank), aged)
        standing = (
            (view.pinned and up == 0, "pinned"),
            (view.desired_loaded is True and up == 0, "desired"),
            (view.preload and up == 0, "preload"),
            (up < min(view.min_replicas, view.max_replicas), "replicas"),
        )
        for place, (holds, reason) in enumerate(standing):
            if holds:
                return Want(view, reason, NO_DEMAND, NEVER, float(NO_DEMAND + place))
        return None
