"""A small byte-level GPT, and the text that it learns: the source files of Python's standard library.

In: sizes. Out: a model, and batches that the global torch generator alone decides. Knows nothing of: checkpoints.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

BYTE_VALUES: Final = 256


@dataclass(frozen=True, slots=True)
class Sizes:
    """4.9 million parameters: with AdamW's two moments, 56 MiB in every checkpoint."""

    width: int = 256
    heads: int = 4
    blocks: int = 6
    context: int = 64
    batch: int = 4
    dropout: float = 0.1


class Block(nn.Module):
    """Attention, then a perceptron, each beside a residual path."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.heads, self.dropout = sizes.heads, sizes.dropout
        self.norm_in, self.norm_out = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(sizes.dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm_in(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        x = x + self.project(seen.transpose(1, 2).reshape(batch, length, width))
        thought: Tensor = self.perceptron(self.norm_out(x))
        return x + thought


class GPT(nn.Module):
    """Bytes in, a score for every possible next byte out."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.bytes = nn.Embedding(BYTE_VALUES, sizes.width)
        self.places = nn.Embedding(sizes.context, sizes.width)
        self.dropout = nn.Dropout(sizes.dropout)
        self.blocks = nn.Sequential(*(Block(sizes) for _ in range(sizes.blocks)))
        self.norm = nn.LayerNorm(sizes.width)
        self.scores = nn.Linear(sizes.width, BYTE_VALUES, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        scores: Tensor = self.scores(self.norm(self.blocks(self.dropout(self.bytes(text) + self.places(places)))))
        return scores

    def loss(self, text: Tensor) -> Tensor:
        """Mean surprise, in nats per byte, at every next byte of `text`."""
        scores: Tensor = self(text[:, :-1])
        loss: Tensor = functional.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten())
        return loss


def digest(model: nn.Module) -> str:
    """One hash over every bit of every weight."""
    sha = hashlib.sha256()
    for tensor in model.state_dict().values():
        sha.update(tensor.numpy().tobytes())
    return sha.hexdigest()


def corpus(*, max_bytes: int = 4 << 20) -> Tensor:
    """The source files of the standard library, one after the other, as bytes."""
    text = bytearray()
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        text += path.read_bytes()
    return torch.frombuffer(text[:max_bytes], dtype=torch.uint8)


def batches(sizes: Sizes) -> Callable[[], Tensor]:
    """Draws batches of the text: which ones, the global torch generator decides."""
    data = corpus()

    def draw() -> Tensor:
        starts = torch.randint(len(data) - sizes.context, (sizes.batch, 1))
        return data[starts + torch.arange(sizes.context + 1)].long()

    return draw
