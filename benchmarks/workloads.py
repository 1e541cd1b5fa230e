"""The saved states, and the trainings that run during saves.

In: sizes. Out: states, and steps of a real training. Knows nothing of: checkpoints, clocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

import torch
from torch import nn
from torch.nn import functional

State = dict[str, Any]

_WIDTH: Final = 2048
_TENSOR_BYTES: Final = _WIDTH * _WIDTH * 4
_RANK: Final = 16


def tensors(num_bytes: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """fp32 matrices of 16 MiB. Headers in the file shift them, so that they straddle segments as real ones do."""
    count = max(1, num_bytes // _TENSOR_BYTES)
    return {f"layers.{i}.weight": torch.rand(_WIDTH, _WIDTH, device=device) for i in range(count)}


def small_tensors(count: int) -> dict[str, torch.Tensor]:
    """Tensors of 1 KiB each."""
    return {f"layers.{i}.scale": torch.randn(256) for i in range(count)}


class Training:
    """Linear layers under AdamW, whose parameters and state have about `num_bytes` together."""

    def __init__(self, num_bytes: int, *, batch: int, device: str = "cpu") -> None:
        count = max(1, num_bytes // (3 * _TENSOR_BYTES))
        layers = [nn.Linear(_WIDTH, _WIDTH, bias=False, device=device) for _ in range(count)]
        self.model: nn.Module = nn.Sequential(*layers)
        # Fused, as one would choose for speed. This step also uses the memory most.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self._inputs = torch.randn(batch, _WIDTH, device=device)
        self.step()  # the optimizer creates its state in the first step

    @property
    def state(self) -> State:
        return {"model": self.model, "optimizer": self.optimizer}

    def state_dict(self) -> State:
        return {name: part.state_dict() for name, part in self.state.items()}

    def step(self) -> None:
        self.forward_backward()
        self.optimizer_step()

    def optimizer_step(self) -> None:
        self.optimizer.step()

    def forward_backward(self) -> None:
        # Gradients keep their memory, so that step times vary less.
        self.optimizer.zero_grad(set_to_none=False)
        self.model(self._inputs).square().mean().backward()


class _Adapted(nn.Module):
    """A frozen layer, and an adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(_WIDTH, _WIDTH, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(_WIDTH, _RANK, bias=False), nn.Linear(_RANK, _WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.up(self.down(x))
        return out


class Lora(Training):
    """Adapters of rank 16 over a frozen base of about `num_bytes`."""

    def __init__(self, num_bytes: int) -> None:
        self.model = nn.Sequential(*(_Adapted() for _ in range(max(1, num_bytes // _TENSOR_BYTES))))
        self.adapter = {name: one for name, one in self.model.named_parameters() if one.requires_grad}
        self.optimizer = torch.optim.AdamW(self.adapter.values(), lr=1e-5, fused=True)
        self._inputs = torch.randn(4, _WIDTH)
        self.step()

    @property
    def base_bytes(self) -> int:
        return _TENSOR_BYTES * len(self.model)  # type: ignore[arg-type]


class Subject(Protocol):
    """A saved state, and the training that changes it."""

    @property
    def state(self) -> State: ...

    @property
    def optimizer(self) -> torch.optim.Optimizer | None: ...

    def state_dict(self) -> State: ...

    def forward_backward(self) -> None: ...

    def optimizer_step(self) -> None: ...


class Still:
    """A state that nothing changes, and a busy processor."""

    optimizer = None

    def __init__(self, state: State) -> None:
        self.state = state
        self._inputs = torch.randn(512, 512)

    def state_dict(self) -> State:
        return self.state

    def forward_backward(self) -> None:
        for _ in range(8):
            self._inputs @ self._inputs

    def optimizer_step(self) -> None:
        """Change nothing."""


class Transformer(nn.Module):
    """GPT-2 with its own shapes and names, and the head tied to the embedding."""

    def __init__(self, num_layers: int = 12, width: int = 768, vocabulary: int = 50257, context: int = 1024) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(context, width)
        self.h = nn.ModuleList(_Block(width) for _ in range(num_layers))
        self.ln_f = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the next token: (batch, length, vocabulary)."""
        hidden = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.h:
            hidden = block(hidden)
        return functional.linear(self.ln_f(hidden), self.wte.weight)


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self._num_heads = max(1, width // 64)
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.c_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden.shape
        heads = self.c_attn(self.ln_1(hidden)).view(batch, length, 3, self._num_heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind()
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.c_proj(mixed.transpose(1, 2).reshape(batch, length, width))
        grown: torch.Tensor = self.c_out(functional.gelu(self.c_fc(self.ln_2(hidden)), approximate="tanh"))
        return hidden + grown


class Gpt2(Training):
    """124 million parameters with AdamW's two moments, 1.5 GB in fp32; fewer layers if that is too much."""

    def __init__(self, num_bytes: int, *, batch: int = 1, length: int = 16, device: str = "cpu") -> None:
        own = 12 * (768 * 768 * 12 + 768 * 13)  # bytes of a block, including its moments
        ends = 12 * (50257 + 1024 + 2) * 768
        tiny = num_bytes < ends + own
        shape = {"num_layers": 2, "width": 128, "vocabulary": 1000} if tiny else {}
        if not tiny:
            shape["num_layers"] = min(12, (num_bytes - ends) // own)
        model = Transformer(**shape).to(device)
        self.model = model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self._tokens = torch.randint(model.wte.num_embeddings, (batch, length), device=device)
        self.step()

    def forward_backward(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        self.loss(self.model).backward()

    def loss(self, model: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """The loss of the model, or of a wrapper that calls it."""
        logits = model(self._tokens)
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), self._tokens[:, 1:].flatten())


_LLAMA: Final = {
    "self_attn.q_proj": (4096, 4096), "self_attn.k_proj": (1024, 4096), "self_attn.v_proj": (1024, 4096),
    "self_attn.o_proj": (4096, 4096), "mlp.gate_proj": (14336, 4096), "mlp.up_proj": (14336, 4096),
    "mlp.down_proj": (4096, 14336), "input_layernorm": (4096,), "post_attention_layernorm": (4096,),
}  # fmt: skip
_RANKS: Final = 8


def rank_of_8b(num_bytes: int) -> Still:
    """One rank of Llama 3 8B under FSDP over 8: shards of each tensor, fp32, with AdamW's moments.

    All 32 layers would be 12 GB. The state has as many layers as fit in `num_bytes`.
    """
    shapes = {name: (shape[0] // _RANKS, *shape[1:]) for name, shape in _LLAMA.items()}
    of_layer = 12 * sum(torch.Size(shape).numel() for shape in shapes.values())
    num_layers = max(1, min(32, num_bytes // of_layer))
    names = {f"model.layers.{i}.{name}.weight": shape for i in range(num_layers) for name, shape in shapes.items()}

    def shards() -> dict[str, torch.Tensor]:
        return {name: torch.rand(shape) for name, shape in names.items()}

    return Still({"model": shards(), "exp_avg": shards(), "exp_avg_sq": shards()})


def lora(num_bytes: int) -> Still:
    """A frozen base in bf16, adapters of rank 16 in fp32, and the moments of the adapters."""
    width, rank = 2048, 16
    count = max(1, num_bytes // (2 * width * width))
    base = {f"layers.{i}.weight": torch.rand(width, width).bfloat16() for i in range(count)}

    def adapters() -> dict[str, torch.Tensor]:
        both = {"lora_A": (rank, width), "lora_B": (width, rank)}
        return {f"layers.{i}.{name}": torch.rand(shape) for i in range(count) for name, shape in both.items()}

    return Still({"base": base, "adapter": adapters(), "exp_avg": adapters(), "exp_avg_sq": adapters()})


def huge(num_bytes: int) -> Still:
    """One tensor."""
    return Still({"model": {"embedding": torch.rand(num_bytes // 4096, 1024)}})


WORKLOADS: Final[dict[str, Callable[[int], Subject]]] = {
    "training": lambda num_bytes: Training(num_bytes, batch=4),
    "gpt2": Gpt2,
    "rank_of_8b": rank_of_8b,
    "lora": lora,
    "lora_training": Lora,
    "small": lambda num_bytes: Still({"model": small_tensors(num_bytes // 1024)}),
    "huge": huge,
}
