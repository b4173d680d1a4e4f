"""Draws the spans of one trace as a waterfall, as viewers of traces do.

The picture in docs/how-to/operation.md comes from `make test ARGS=tests/integration/telemetry
PENSTOCK_SCREENSHOTS=$PWD/docs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kit.collector import Seen

KEY = "seconds. Red: the attempt whose worker was killed. Diamond: first token. Dashed: link."
ARROW = {"arrowstyle": "->", "linestyle": "--", "color": "#c04848"}
COLOURS = {"penstock-gateway": "#4878a8", "penstock-worker": "#5a9a5a", "penstock-webhooks": "#9a6aa8"}


def in_order(spans: Sequence[Seen], parent: bytes, depth: int = 0) -> list[tuple[int, Seen]]:
    """The spans below a parent, each followed by its own children."""
    found: list[tuple[int, Seen]] = []
    for one in spans:
        if one.span.parent_span_id == parent:
            found += [(depth, one), *in_order(spans, one.id, depth + 1)]
    return found


def draw(spans: Sequence[Seen], parent: bytes, path: Path) -> None:
    """The spans of a trace, by their beginning, as SVG. `parent` is that of its client, which is not among them."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "trace"
    from matplotlib import pyplot

    rows = in_order(spans, parent)
    at = {one.id: row for row, (_, one) in enumerate(rows)}
    begin = min(one.times[0] for _, one in rows)

    def seconds(time_ns: int) -> float:
        return (time_ns - begin) / 1e9

    whole = max(seconds(one.times[1]) for _, one in rows)
    figure, axes = pyplot.subplots(figsize=(11, 0.42 * len(rows) + 0.9))
    for row, (depth, one) in enumerate(rows):
        start, end = map(seconds, one.times)
        colour = "#c04848" if one.failed else COLOURS.get(one.process, "#888888")
        axes.barh(row, max(end - start, whole / 300), left=start, height=0.6, color=colour)
        events = [seconds(event.time_unix_nano) for event in one.span.events if event.name == "gen_ai.first_token"]
        axes.plot(events, [row] * len(events), "D", color="black", markersize=5)
        axes.text((-0.44 + 0.02 * depth) * whole, row, _label(one), va="center", fontsize=8)
        for linked in one.links.values():
            if linked in at:
                _, other = rows[at[linked]]
                to = seconds(other.times[1]), at[linked]
                axes.annotate(
                    "", (start, row), to, arrowprops={"arrowstyle": "->", "linestyle": "--", "color": "#c04848"}
                )
    axes.set_xlim(-0.45 * whole, 1.02 * whole)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks([])
    axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= whole])
    axes.set_xlabel(KEY, fontsize=8)
    axes.spines[["top", "left", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _label(one: Seen) -> str:
    known = one.attributes
    is_run = "gen_ai.operation.name" in known
    which = f" (attempt {known['penstock.attempt']}, epoch {known['penstock.epoch']})" if is_run else ""
    return f"{one.process.removeprefix('penstock-')}: {one.name}{which}"
