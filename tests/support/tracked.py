"""Runs that experiment trackers are told of, and a tracker that keeps what it is told."""

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from racing import PATIENCE
from states import state_at

from async_ckpt import AsyncCheckpointer
from async_ckpt.core.host.operations import flush_all


class Recorder:
    """A tracker that keeps what it is told."""

    def __init__(self) -> None:
        self.committed_steps: list[tuple[dict[str, Any], dict[str, float], list[str]]] = []
        self.restored_from: list[dict[str, Any]] = []

    def committed(self, reference: dict[str, Any], numbers: dict[str, float], aliases: list[str]) -> None:
        self.committed_steps.append((reference, numbers, aliases))

    def restored(self, reference: dict[str, Any]) -> None:
        self.restored_from.append(reference)

    @property
    def aliases(self) -> dict[int, list[str]]:
        return {reference["step"]: aliases for reference, _, aliases in self.committed_steps}


def folder_of(reference: dict[str, Any]) -> Path:
    return Path(url2pathname(urlsplit(reference["url"]).path))


def save_with_losses(ckpt: AsyncCheckpointer, *losses: float) -> None:
    for step, loss in enumerate(losses, start=1):
        ckpt.save(state_at(step), step, record={"loss": loss}).result()
        flush_all(PATIENCE)  # a step of which a tracker is told after the next commit is not the latest
