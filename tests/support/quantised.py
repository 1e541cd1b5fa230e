"""Small models whose weights are quantised, as transformers has them in memory once it has loaded one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from exported import Tensors, transformers
from safetensors.torch import save_file

_SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99,
}  # fmt: skip


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SIZES)).to(torch.bfloat16)


def experts() -> Any:
    config = transformers.Qwen3MoeConfig(
        **_SIZES, num_experts=3, moe_intermediate_size=32, num_key_value_heads=2, head_dim=16
    )
    return transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16)


def in_fp8(model: Any, **options: Any) -> Any:
    """The model in fine-grained FP8, with weights and scales of any bits; transformers itself makes it on GPUs alone."""
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    quantiser = FineGrainedFP8HfQuantizer(transformers.FineGrainedFP8Config(weight_block_size=(16, 16), **options))
    quantiser.preprocess_model(model)
    for part in model.modules():
        if any(parameter.is_meta for parameter in part.parameters(recurse=False)):
            part.to_empty(device="cpu", recurse=False)
    changed_bits(model, share=1)
    quantiser.postprocess_model(model)
    model.hf_quantizer = quantiser
    return model


def changed_bits(model: Any, share: float = 0.02) -> None:
    """Other bits in a share of the bytes of each tensor, none of which becomes NaN: the two highest bits stay clear."""
    for tensor in model.state_dict().values():
        octets = tensor.view(torch.uint8).view(-1) if tensor.dim() else tensor.view(1).view(torch.uint8)
        some = torch.rand(octets.shape) < share
        octets[some] = torch.randint(0x3F, (int(some.sum()),), dtype=torch.uint8)


def with_experts_apart(state: Tensors) -> Tensors:
    """The weights and scales of each expert by names of their own, as in checkpoints."""
    apart: Tensors = {}
    for name, tensor in state.items():
        above, _, leaf = name.rpartition(".")
        if not above.endswith(".experts"):
            apart[name] = tensor
            continue
        kind = "weight_scale_inv" if leaf.endswith("_scale_inv") else "weight"
        for number, one in enumerate(tensor):
            if leaf.startswith("gate_up_proj"):
                gate, up = one.chunk(2)
                apart |= {f"{above}.{number}.gate_proj.{kind}": gate, f"{above}.{number}.up_proj.{kind}": up}
            else:
                apart[f"{above}.{number}.down_proj.{kind}"] = one
    return {name: tensor.contiguous().clone() for name, tensor in apart.items()}


def checkpoint(folder: Path, model: Any, state: Tensors, quantisation: dict[str, Any] | None = None) -> Path:
    """A folder as a quantised model is published in the wild."""
    folder.mkdir()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads(model.config.to_json_string())
    config["architectures"] = [type(model).__name__]
    if quantisation is not None:
        config["quantization_config"] = quantisation
    (folder / "config.json").write_text(json.dumps(config))
    return folder
