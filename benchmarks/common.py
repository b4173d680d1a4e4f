"""What every benchmark shares: the machine's steal share, interleaved rounds, medians with spread, one result table."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from system import System, running  # noqa: E402


def cpu_times() -> tuple[int, int]:
    """Jiffies of all processors so far: (stolen, total)."""
    fields = [int(value) for value in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return fields[7], sum(fields)


@dataclass
class Steal:
    """Share of the processor that the hypervisor took while the block ran, 0 to 1."""

    share: float = 0.0
    _began: tuple[int, int] = field(default_factory=cpu_times)

    def __enter__(self) -> Steal:
        self._began = cpu_times()
        return self

    def __exit__(self, *_: object) -> None:
        stolen, total = cpu_times()
        self.share = (stolen - self._began[0]) / max(1, total - self._began[1])


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass
class Row:
    """One line of the table: the product's figure, the floor's in the same rounds, their ratio and the steal share.

    A figure that has no floor leaves `floor` empty.
    """

    name: str
    unit: str
    product: list[float]
    floor: list[float]
    steal: list[float]
    aim: str

    def ratios(self) -> list[float]:
        return [p / f for p, f in zip(self.product, self.floor, strict=True) if f] if self.floor else []

    def record(self) -> dict[str, Any]:
        """Medians for programs to read."""

        def median(values: Sequence[float]) -> float | None:
            return round(statistics.median(values), 4) if values else None

        figures = {"product": self.product, "floor": self.floor, "ratio": self.ratios(), "steal": self.steal}
        medians = {name: median(values) for name, values in figures.items()}
        return {"what": self.name, "unit": self.unit, **medians, "aim": self.aim, "rounds": len(self.product)}

    def cells(self) -> list[str]:
        def spread(values: Sequence[float]) -> str:
            return f"{statistics.median(values):.4g} ({min(values):.3g}–{max(values):.3g})" if values else "–"

        steal = f"{100 * statistics.median(self.steal):.0f} % (max {100 * max(self.steal):.0f} %)"
        return [self.name, self.unit, spread(self.product), spread(self.floor), spread(self.ratios()), self.aim, steal]


HEADER = ["what", "unit", "Penstock", "floor", "ratio", "aim", "steal"]


def markdown(rows: Sequence[Row]) -> str:
    lines = ["| " + " | ".join(HEADER) + " |", "|" + " --- |" * len(HEADER)]
    return "\n".join(lines + ["| " + " | ".join(row.cells()) + " |" for row in rows])


Figures = dict[str, float]


def rotate(
    rounds: int, sides: Mapping[str, Callable[[], Figures]]
) -> tuple[dict[str, dict[str, list[float]]], list[float]]:
    """Runs the sides by turns, each round beginning with another one, so that a wave of stolen time hits all of them.

    Gives side → name of the figure → a value a round, and the steal share of each round.
    """
    results: dict[str, dict[str, list[float]]] = {name: {} for name in sides}
    steals: list[float] = []
    names = list(sides)
    for number in range(rounds):
        first = number % len(names)
        with Steal() as steal:
            for name in names[first:] + names[:first]:
                for figure, value in sides[name]().items():
                    results[name].setdefault(figure, []).append(value)
        steals.append(steal.share)
        print(f"  round {number + 1}/{rounds}: steal {100 * steal.share:.0f} %", file=sys.stderr, flush=True)
    return results, steals


def interleave(
    rounds: int, product: Callable[[], Figures], floor: Callable[[], Figures]
) -> tuple[dict[str, list[float]], dict[str, list[float]], list[float]]:
    """`rotate` with two sides: the product's figures, the floor's, the steal share of each round."""
    results, steals = rotate(rounds, {"product": product, "floor": floor})
    return results["product"], results["floor"], steals


def options(description: str | None, *, rounds: int) -> argparse.Namespace:
    """What every benchmark takes: `--rounds N`, and `--quick` for one short round that shows only that it works."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--quick", action="store_true")
    found = parser.parse_known_args()[0]
    found.rounds = found.rounds or (1 if found.quick else rounds)
    return found


@contextmanager
def broker() -> Iterator[str]:
    """PENSTOCK_TEST_KAFKA's broker, or an embedded one for the time of the block."""
    if found := os.environ.get("PENSTOCK_TEST_KAFKA"):
        yield found
        return
    from penstock.cli.embedded_kafka import EmbeddedKafka
    from system import free_port

    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        kafka = EmbeddedKafka(Path(folder), free_port())
        kafka.start()
        try:
            yield kafka.bootstrap_servers
        finally:
            kafka.stop()


@contextmanager
def system(bootstrap: str, **options: Any) -> Iterator[System]:
    with (
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder,
        running(System(bootstrap, f"b{uuid.uuid4().hex[:6]}-", Path(folder), **options)) as found,
    ):
        yield found


def save(name: str, rows: Sequence[Row]) -> None:
    folder = ROOT / "benchmarks" / "results"
    folder.mkdir(exist_ok=True)
    record = {"name": name, "at": time.strftime("%Y-%m-%d %H:%M"), "rows": [row.__dict__ for row in rows]}
    (folder / f"{name}.json").write_text(json.dumps(record, indent=1))
    print(markdown(rows), flush=True)
    print(json.dumps({"name": name, "at": record["at"], "rows": [row.record() for row in rows]}), flush=True)
