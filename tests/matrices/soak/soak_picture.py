"""The picture of a soak, drawn from its report and nothing else.

In: the file of a report. Out: an SVG. Knows nothing of: how it was sampled.
"""

import json
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl

mpl.use("agg")
import matplotlib.pyplot as plt

_SHOWN: Final = ("resident memory", "descriptors", "threads", "files of the runs on disk")
_STYLE: Final[dict[Any, Any]] = {
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "async_ckpt",
    "figure.constrained_layout.use": True,
}


def draw(report: Path, path: Path) -> None:
    """One small plot for each quantity, from zero up, against minutes."""
    kept = json.loads(report.read_text())["details"]
    minutes = [seconds / 60 for seconds in kept["times"]]
    with mpl.rc_context(_STYLE):
        figure, plots = plt.subplots(1, len(_SHOWN), figsize=(10.0, 2.2))
        for plot, name in zip(plots, _SHOWN, strict=True):
            plot.plot(minutes, [sample[name] for sample in kept["samples"]], color="#0b6e4f", linewidth=1.2)
            plot.set_title(f"{name}, MiB" if "memory" in name else name)
            plot.set_ylim(bottom=0)
            plot.set_xlabel("minutes")
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
