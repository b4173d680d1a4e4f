"""Until intake gives `arrivals.Taken`: the same fields, with cost and size."""
from penstock.processors.core import arrivals
from penstock.processors.kafka import intake as old


class Intake(old.Intake):
    def read(self, topic, partition, offset, append_ms, headers, value):
        read = super().read(topic, partition, offset, append_ms, headers, value)
        if isinstance(read, arrivals.Taken | arrivals.Poison):
            return read
        fields = {name: getattr(read, name) for name in type(read).__dataclass_fields__}
        if isinstance(read, old.Poison):
            return arrivals.Poison(**fields)
        from simulation.engines import need_of
        try:
            cost = need_of(read.request)
        except Exception:
            cost = 1
        return arrivals.Taken(**fields, cost=cost, size_bytes=len(value or b"") + 100)
