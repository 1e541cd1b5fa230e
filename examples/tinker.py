"""What tinker's client is to a training loop, with its server in the same process: a model that is trained by calls.

In: batches of text, names of checkpoints. Out: losses, paths of archives. Knows nothing of: loops, when to save.

Paths are relative to the place of the archives, as `tinker://` names are to that of the server: what a loop has written
down stays right when the archives are moved.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import torch
from torch import Tensor

from async_ckpt import SaveHandle
from async_ckpt import files as paths
from async_ckpt.integrations.skyrl import CheckpointBackend
from examples.dispatch import LocalDispatch, Trainee
from examples.gpt import GPT, Sizes

MODEL_ID: Final = "model_a"
_WORLD_SIZE: Final = 2


@dataclass(frozen=True, slots=True)
class Saving:
    """A checkpoint on its way. It is at `path`, for the client that returned this, once `result_async` has returned."""

    path: str
    handle: SaveHandle

    async def result_async(self) -> Saving:
        await self.handle
        return self


class TrainingClient:
    """One owner's model. Within a `with` block; at its end every save has ended, and one that nobody saw fail is raised."""

    def __init__(self, checkpoints_base: str, sizes: Sizes) -> None:
        torch.manual_seed(0)
        self.model = GPT(sizes)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-4)
        scheduler = torch.optim.lr_scheduler.StepLR(self._optimizer, step_size=10, gamma=0.9)
        trainee = Trainee(self.model, self._optimizer, scheduler, {"model_type": "bytes", **asdict(sizes)})
        dispatch = LocalDispatch({MODEL_ID: trainee}, world_size=_WORLD_SIZE)
        self._scheduler = scheduler
        self._backend = CheckpointBackend(dispatch, role={MODEL_ID: "policy"}, tokenizer=ByteTokenizer())
        self._base = checkpoints_base.rstrip("/")

    async def forward_backward_async(self, text: Tensor) -> float:
        """The loss of a batch; its gradients are kept for the step."""
        self._optimizer.zero_grad()
        loss = self.model.loss(text)
        loss.backward()
        return float(loss.item())

    async def optim_step_async(self) -> None:
        self._optimizer.step()
        self._scheduler.step()

    async def save_state_async(self, name: str) -> Saving:
        """All that training goes on from: back as soon as the workers have written it down."""
        path = f"{MODEL_ID}/{name}.tar.gz"
        return Saving(path, self._backend.save_checkpoint(self._place_of(path), MODEL_ID))

    async def save_weights_for_sampler_async(self, name: str) -> Saving:
        path = f"{MODEL_ID}/sampler_weights/{name}.tar.gz"
        handle = await self._backend.save_sampler_checkpoint_async(self._place_of(path), MODEL_ID)
        return Saving(path, handle)

    async def load_state_with_optimizer_async(self, path: str) -> None:
        self._backend.load_checkpoint(self._place_of(path), MODEL_ID, load_optimizer=True)

    async def delete_async(self, path: str) -> None:
        """Delete a checkpoint, which may be gone already."""
        with suppress(FileNotFoundError):
            await asyncio.to_thread(paths.remove, self._place_of(path))

    def _place_of(self, path: str) -> str:
        return f"{self._base}/{path}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._backend.__exit__(kind, error, trace)


class ByteTokenizer:
    """Every byte is a token."""

    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "ByteTokenizer"}\n')
