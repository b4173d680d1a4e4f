"""Measured peaks in place of estimates: how much memory a batch will take, learned from those that ran.

Memory of an engine is nearly affine in the shape of its batch (weights and context, plus so much per sequence, token or
pixel). So a line is fitted to the measured peaks, once to the shape and once to the caller's own estimate, and the
better one is booked with the largest deviation that was seen on top. Weighted least squares: relative errors count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Shape = tuple[float, ...]
"""What the peak grows with, e.g. (sequences, tokens of all of them); empty for what has no shape, as weights."""

SAMPLES_KEPT = 96
FLOORS_KEPT = 16
KEYS_KEPT = 256
"""Models, by device and dtype; those that were learned of last."""
FALLS_BY = 0.25
"""A lower peak at the same shape brings what is remembered down by this share of the difference only."""
BUCKETS_PER_DOUBLING = 4
UNSEEN = 1.2
"""An estimate is booked with so much on top before anything was measured."""
FEW = 1.1
"""And so much more than the worst ratio seen, while too little was measured for a line."""
AFTER_OOM = 1.25
OOM_FORGOTTEN_AFTER = 8
GROWN = 1.2
"""Lines are fitted again when the samples have grown by this factor, or when one lies above them."""
BAD_FIT = 0.10
"""A line that is off by more than this is no better than a peak that was measured at about this shape."""


@dataclass(frozen=True, slots=True)
class EstimateKey:
    """Whose memory, on what kind of device, in which dtype."""

    model: str
    kind: str
    dtype: str


@dataclass(frozen=True, slots=True)
class Sample:
    """A measured peak, in bytes, and what the caller had estimated."""

    shape: Shape
    peak_bytes: int
    estimate_bytes: int


@dataclass(slots=True)
class Floor:
    """It ran out of memory at this shape: as large ones book so much at least, until enough have run with less."""

    shape: Shape
    bytes: int
    survived: int = 0


@dataclass(frozen=True, slots=True)
class FittedLine:
    """Coefficients over (1, features…) and the largest relative deviation of a peak above it."""

    coefficients: tuple[float, ...]
    on_shape: bool
    deviation: float

    def at(self, shape: Shape, estimate_bytes: int) -> float:
        features = (1.0, *shape) if self.on_shape else (1.0, float(estimate_bytes))
        return sum(c * x for c, x in zip(self.coefficients, features, strict=True))


@dataclass(slots=True)
class _Learned:
    samples: dict[Shape, Sample] = field(default_factory=dict[Shape, Sample])  # by bucket, the newest last
    floors: list[Floor] = field(default_factory=list[Floor])
    lines: list[FittedLine] | None = None
    fitted: int = 0
    """Samples when the lines were fitted."""


class Estimates:
    """`need` before a batch, `learn` after it. Plain data: `to_json` and `from_json` carry it over a restart."""

    def __init__(self) -> None:
        self._learned: dict[EstimateKey, _Learned] = {}  # what was learned of last is the last
        self.revision = 0
        """Grows with all that is learned."""

    def learn(self, key: EstimateKey, shape: Shape, peak_bytes: int, estimate_bytes: int) -> None:
        """A batch of this shape took so much at its peak. `estimate_bytes`: what was estimated, before learning."""
        learned = self._touch(key)
        known = learned.samples.pop(bucket(shape), None)
        if known is not None and _same(known, shape, estimate_bytes) and peak_bytes < known.peak_bytes:
            peak_bytes = math.ceil(known.peak_bytes - FALLS_BY * (known.peak_bytes - peak_bytes))
        learned.samples[bucket(shape)] = Sample(shape, max(1, peak_bytes), max(1, estimate_bytes))
        while len(learned.samples) > SAMPLES_KEPT:
            del learned.samples[next(iter(learned.samples))]
        for floor in learned.floors:
            floor.survived += _covers(shape, floor.shape) and peak_bytes < floor.bytes
        learned.floors = [floor for floor in learned.floors if floor.survived < OOM_FORGOTTEN_AFTER]
        best = learned.lines[0] if learned.lines else None
        bound = 0.0 if best is None else best.at(shape, max(1, estimate_bytes)) * (1 + best.deviation)
        if peak_bytes > bound or len(learned.samples) > GROWN * learned.fitted:
            learned.lines = None  # else they hold for it too

    def need(self, key: EstimateKey, shape: Shape, estimate_bytes: int) -> int:
        """Bytes to book for a batch of this shape."""
        learned = self._learned.get(key)
        if learned is None:
            return math.ceil(UNSEEN * estimate_bytes)
        least = max((floor.bytes for floor in learned.floors if _covers(shape, floor.shape)), default=0)
        booked = self._booked(learned, shape, max(1, estimate_bytes))
        return max(least, math.ceil(booked))

    def raise_after_oom(self, key: EstimateKey, shape: Shape, booked_bytes: int) -> int:
        """It ran out of memory with so much booked. What is booked for such a shape from now on, at least."""
        learned = self._touch(key)
        raised = math.ceil(AFTER_OOM * booked_bytes)
        learned.floors = [floor for floor in learned.floors if floor.shape != shape][-FLOORS_KEPT + 1 :]
        learned.floors.append(Floor(shape, raised))
        return raised

    def _touch(self, key: EstimateKey) -> _Learned:
        self.revision += 1
        learned = self._learned.pop(key, None) or _Learned()
        self._learned[key] = learned
        while len(self._learned) > KEYS_KEPT:
            del self._learned[next(iter(self._learned))]
        return learned

    def measured(self, key: EstimateKey) -> int:
        """How many buckets of shapes were measured."""
        learned = self._learned.get(key)
        return 0 if learned is None else len(learned.samples)

    # -- booking

    def _booked(self, learned: _Learned, shape: Shape, estimate_bytes: int) -> float:
        samples = list(learned.samples.values())
        if not samples:
            return UNSEEN * estimate_bytes
        if learned.lines is None:
            learned.lines, learned.fitted = _lines(samples), len(samples)
        by_ratio = FEW * estimate_bytes * max(one.peak_bytes / one.estimate_bytes for one in samples)
        if not learned.lines:
            return by_ratio
        margin = 0.01 + 0.5 / len(samples)
        booked = [line.at(shape, estimate_bytes) * (1 + line.deviation + margin) for line in learned.lines]
        best = learned.lines[0]
        beyond = any(value > 1.25 * max(one.shape[i] for one in samples) for i, value in enumerate(shape))
        chosen = max(booked) if beyond else booked[0]
        near = learned.samples.get(bucket(shape))
        if best.deviation > BAD_FIT and near is not None and _covers(near.shape, shape):
            chosen = min(chosen, near.peak_bytes * (1 + BAD_FIT))
        # A line through few points may fall below what a smaller batch has taken already.
        smaller = (one.peak_bytes for one in samples if _covers(shape, one.shape))
        return max(chosen, *smaller, 1.0)

    # -- remembering

    def to_json(self) -> dict[str, Any]:
        return {
            "version": 1,
            "learned": [
                {
                    "model": key.model,
                    "kind": key.kind,
                    "dtype": key.dtype,
                    "samples": [[list(s.shape), s.peak_bytes, s.estimate_bytes] for s in learned.samples.values()],
                    "floors": [[list(f.shape), f.bytes, f.survived] for f in learned.floors],
                }
                for key, learned in self._learned.items()
            ],
        }

    @classmethod
    def from_json(cls, remembered: Mapping[str, Any]) -> Estimates:
        """What cannot be read counts as never measured."""
        estimates = cls()
        entries = remembered.get("learned", []) if remembered.get("version") == 1 else []
        for entry in entries:
            try:
                key = EstimateKey(str(entry["model"]), str(entry["kind"]), str(entry["dtype"]))
                samples = [Sample(_shape(s), int(peak), int(known)) for s, peak, known in entry["samples"]]
                floors = [Floor(_shape(s), int(least), int(survived)) for s, least, survived in entry["floors"]]
            except (KeyError, TypeError, ValueError):
                continue
            estimates._learned[key] = _Learned({bucket(s.shape): s for s in samples}, floors)
        return estimates


def bucket(shape: Shape) -> Shape:
    """Shapes that differ by less than a fifth in each part are one: the newest of them is kept."""
    return tuple(float(round(BUCKETS_PER_DOUBLING * math.log2(value))) if value >= 1 else value for value in shape)


def _same(known: Sample, shape: Shape, estimate_bytes: int) -> bool:
    """Whether it was the same batch of the same model: others were estimated otherwise."""
    return known.shape == shape and abs(estimate_bytes - known.estimate_bytes) <= BAD_FIT * known.estimate_bytes


def _shape(values: Sequence[Any]) -> Shape:
    return tuple(float(value) for value in values)


def _covers(larger: Shape, smaller: Shape) -> bool:
    return len(larger) == len(smaller) and all(a >= b for a, b in zip(larger, smaller, strict=True))


def _lines(samples: Sequence[Sample]) -> list[FittedLine]:
    """The lines that can be fitted, the better one first; none while there are too few points for one."""
    lines: list[FittedLine] = []
    for on_shape in (True, False):
        rows = [(1.0, *s.shape) if on_shape else (1.0, float(s.estimate_bytes)) for s in samples]
        if len(samples) < len(rows[0]) + 2 or len({len(row) for row in rows}) > 1:
            continue
        peaks = [float(s.peak_bytes) for s in samples]
        fitted = _least_squares(rows, peaks)
        if fitted is None:
            continue
        line = FittedLine(fitted, on_shape, 0.0)
        values = [line.at(s.shape, s.estimate_bytes) for s in samples]
        if min(values) > 0:
            deviation = max(0.0, *(peak / value - 1 for peak, value in zip(peaks, values, strict=True)))
            lines.append(FittedLine(fitted, on_shape, deviation))
    return sorted(lines, key=lambda line: line.deviation)


def _least_squares(rows: Sequence[tuple[float, ...]], peaks: Sequence[float]) -> tuple[float, ...] | None:
    """Coefficients that make the sum of squared relative errors least, by the normal equations; None if singular."""
    size = len(rows[0])
    scales = [max(abs(row[i]) for row in rows) or 1.0 for i in range(size)]
    matrix = [[0.0] * (size + 1) for _ in range(size)]
    for row, peak in zip(rows, peaks, strict=True):
        scaled = [value / scale / peak for value, scale in zip(row, scales, strict=True)]
        for i in range(size):
            for j in range(size):
                matrix[i][j] += scaled[i] * scaled[j]
            matrix[i][size] += scaled[i]
    return _solved(matrix, scales)


def _solved(matrix: list[list[float]], scales: Sequence[float]) -> tuple[float, ...] | None:
    """Gauss-Jordan elimination with pivoting."""
    size = len(matrix)
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(matrix[row][column]))
        if abs(matrix[pivot][column]) <= 1e-12 * max(1e-300, abs(matrix[column][size])):
            return None
        matrix[column], matrix[pivot] = matrix[pivot], matrix[column]
        for row in range(size):
            if row != column:
                factor = matrix[row][column] / matrix[column][column]
                for at in range(column, size + 1):
                    matrix[row][at] -= factor * matrix[column][at]
    return tuple(matrix[i][size] / matrix[i][i] / scales[i] for i in range(size))
