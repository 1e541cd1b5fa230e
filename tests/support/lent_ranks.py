"""Ranks that lend the slices of a model whose every bit says of which version it is, and the models that readers fill."""

import zlib
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from fake_ranks import distributed, no_collectives
from torch.distributed.tensor import DTensor

from async_ckpt import Publisher, SaveHandle, snapshot
from async_ckpt.weights.publishing.publication import Publication


def values(name: str, like: torch.Tensor, version: int) -> torch.Tensor:
    """A whole tensor of a version."""
    drawn = torch.Generator().manual_seed(1000 * version + zlib.crc32(name.encode()) % 1000)
    return torch.randint(-(2**30), 2**30, tuple(like.shape), generator=drawn).to(like.dtype)


def is_version(tensors: Mapping[str, torch.Tensor], version: int) -> bool:
    """Whether every bit is that of the version."""
    return all(torch.equal(tensor, values(name, tensor, version)) for name, tensor in tensors.items())


def with_steps(model: torch.nn.Module) -> torch.nn.Module:
    """The model with a plain tensor, which every rank has."""
    model.register_buffer("steps", torch.zeros(3, dtype=torch.int64))
    return model


class Training:
    """One rank of a training that lends its weights. It publishes without a collective, snapshots in turn with models."""

    def __init__(self, here: Any, model: torch.nn.Module, root: str, **options: Any) -> None:
        self.here, self.model = here, with_steps(model)
        self.publisher = Publisher(root, **{"local": True, "on_rollback": "retire", **options})

    def publish(self, version: int, *, holds: int | None = None) -> SaveHandle:
        """Publish the weights of a version, by default the version of this number."""
        with torch.no_grad():
            for name, tensor in self.model.state_dict().items():
                whole = values(name, tensor, version if holds is None else holds)
                if isinstance(tensor, DTensor):
                    placed = distributed(whole, tensor.device_mesh, tensor.placements)
                    tensor, whole = tensor.to_local(), placed.to_local()
                tensor.copy_(whole)
        with no_collectives(), ExitStack() as stack:
            given = stack.enter_context(snapshot({"model": self.model}))["model"] if version % 2 else self.model
            return self.publisher.publish(given, version)

    def lend(self, version: int, *, holds: int | None = None) -> SaveHandle:
        """Publish a version, and tell the test once readers can have it."""
        handle = self.publish(version, holds=holds)
        self.publisher.wait_readable(version)
        self.here.say(f"lent{version}-{self.here.rank}")
        return handle

    def hold_commits(self, *versions: int) -> None:
        """Have these versions become durable only when the test says `durable` and the number."""
        commit = Publication._commit

        def late(publication: Publication) -> None:
            if publication.version in versions:
                self.here.hear(f"durable{publication.version}")
            commit(publication)

        Publication._commit = late  # type: ignore[method-assign]

    def close(self) -> None:
        """Go on lending until the test says `over`."""
        self.here.hear("over")
        self.publisher.close()
        self.here.meet("closed")
