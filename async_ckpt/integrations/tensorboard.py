"""TensorBoard: the numbers and the reference of each save, written by torch's SummaryWriter.

In: references to steps. Out: scalars and texts. Knows nothing of: saves.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError as error:
    raise ImportError("this needs TensorBoard: pip install tensorboard") from error


class TensorBoardTracker:
    """Writes the numbers of each save to TensorBoard, and the references as texts.

        ckpt.track(TensorBoardTracker(SummaryWriter("runs/a/log")))

    The texts are `ckpt/latest`, `ckpt/best` and `ckpt/restored_from`.

    Args:
        writer: a SummaryWriter, which stays open. With several ranks, only rank 0 needs one.
    """

    def __init__(self, writer: SummaryWriter | None) -> None:
        self._writer = writer

    def committed(self, reference: dict[str, Any], numbers: dict[str, float], aliases: Sequence[str]) -> None:
        """See `ExperimentTracker`."""
        for name, value in numbers.items():
            self._active().add_scalar(name, value, reference["step"])
        for alias in aliases:
            self._write(alias, reference)

    def restored(self, reference: dict[str, Any]) -> None:
        """See `ExperimentTracker`."""
        self._write("restored_from", reference)

    def _write(self, name: str, reference: dict[str, Any]) -> None:
        # Markdown shows text that is indented by four spaces verbatim.
        text = "\n".join("    " + line for line in json.dumps(reference, indent=1).splitlines())
        self._active().add_text(f"ckpt/{name}", text, reference["step"])
        self._active().flush()

    def _active(self) -> SummaryWriter:
        if self._writer is None:
            raise ValueError("there is no writer; give it a SummaryWriter")
        return self._writer
