"""The picture of a report of calls: each scenario with each fault.

In: the file of a report. Out: an SVG. Knows nothing of: how a place is tried.
"""

import json
from pathlib import Path

import matplotlib as mpl

mpl.use("agg")
import matplotlib.pyplot as plt


def draw(report: Path, path: Path) -> None:
    """The number of places in each cell; a red cell has one where a promise was broken."""
    kept = json.loads(report.read_text())
    rows = [list(row.values()) for row in kept["rows"]]
    faults = list(kept["rows"][0])[1:-1]
    wrong = {tuple(place.split(":")[:2]) for place in kept["details"]["wrong"]}
    with mpl.rc_context({"font.size": 8.0, "svg.fonttype": "none", "svg.hashsalt": "async_ckpt"}):
        figure, plot = plt.subplots(figsize=(9.0, 0.26 * len(rows) + 0.6), layout="constrained")
        plot.set(xlim=(0, len(faults)), ylim=(len(rows), 0))
        plot.set_xticks([column + 0.5 for column in range(len(faults))], faults)
        plot.set_yticks([row + 0.5 for row in range(len(rows))], [row[0] for row in rows])
        plot.tick_params(length=0, top=False, labeltop=True, labelbottom=False)
        for y, (name, *counts, _) in enumerate(rows):
            for x, (fault, count) in enumerate(zip(faults, counts, strict=True)):
                color = "#c1121f" if (name, fault) in wrong else "#0b6e4f"
                alpha = 0.08 + 0.5 * min(1.0, count / 150) if count else 0.0
                plot.add_patch(plt.Rectangle((x + 0.03, y + 0.05), 0.94, 0.9, color=color, alpha=alpha, linewidth=0))
                plot.text(x + 0.5, y + 0.5, count or "", ha="center", va="center")
        for side in plot.spines.values():
            side.set_visible(False)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
