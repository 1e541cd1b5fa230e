"""The witnesses of frameworks: their sizes, and the state of a training as values that can be kept beside what was saved.

In: a training of `deepspeed_runs`, `titan_trainers`, `verl_runs` or `skyrl_runs`, of which all ranks ask. Out: plain values
and digests of tensors, by name. Knows nothing of: async_ckpt.
"""

import hashlib
import json
import random
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor

LAST = 6  # the last step of a training that goes on from a witness
SAVED = 4  # the last step that a witness has

# Which ranks have what of the model, by the words of `titan_trainers`, and how many they are.
TORCHTITAN = {"one": 1, "fsdp": 2, "tp": 2, "pp": 2}
# The version of FSDP, and the number of ranks: of one, an archive is a file and no folder.
VERL_RANKS = {"fsdp1": (1, 2), "fsdp2": (2, 2), "one": (2, 1)}
# Sizes of models of which a checkpoint takes few kilobytes.
DEEPSPEED: Mapping[int, Mapping[str, Any]] = {
    # Under ZeRO 3, larger parameters are cut, and small ones are whole on each rank.
    stage: {"width": 12, "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 50}}
    for stage in range(4)
}
VERL: Mapping[str, int] = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 8}
SKYRL: Mapping[str, int] = {"hidden_size": 8, "intermediate_size": 16}


class Expected(NamedTuple):
    """What the framework alone had, of each rank: losses by step, and states by step."""

    losses: list[dict[str, float]]
    states: list[dict[str, Any]]
    data: list[list[int]]

    def losses_after(self, step: int) -> list[dict[str, float]]:
        return [{at: loss for at, loss in of_rank.items() if int(at) > step} for of_rank in self.losses]


def expected_of(folder: Path) -> Expected:
    """What the witness in a folder tells."""
    told = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
    return Expected(told["losses"], told["states"], told.get("data", []))


def damage(archive: Path, member: str) -> None:
    """Flip a bit of the last tensor of a file in an archive."""
    with tarfile.open(archive) as tar:
        found = tar.getmember(member)
    data = bytearray(archive.read_bytes())
    data[found.offset_data + found.size - 1] ^= 1
    archive.write_bytes(data)


def digest(value: Any) -> str:
    """A text that is the same for tensors of the same dtype, shape and bits."""
    tensor = value.to_local() if isinstance(value, DTensor) else value
    tensor = tensor.detach().cpu().contiguous()
    told = f"{tensor.dtype} {[*tensor.shape]} ".encode() + tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(told).hexdigest()[:16]


def digests(state: Any) -> dict[str, Any]:
    """The leaves of nested containers by path, tensors as digests."""
    leaves, _ = torch.utils._pytree.tree_flatten_with_path(state)
    return {
        "".join(map(str, path)): digest(value) if isinstance(value, torch.Tensor) else value for path, value in leaves
    }


def _generators() -> dict[str, Any]:
    """What random numbers this process draws next."""
    _, of_numpy, at, *_ = np.random.get_state()
    return {
        "torch": digest(torch.get_rng_state()),
        "numpy": [digest(torch.from_numpy(np.asarray(of_numpy, dtype=np.int64))), at],
        "python": hashlib.sha256(repr(random.getstate()).encode()).hexdigest()[:16],
    }


def of_deepspeed(training: Any) -> dict[str, Any]:
    """Whole parameters and moments, as DeepSpeed gathers them."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    engine = training.engine
    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        engine.optimizer._lazy_init_hp_params_optimizer_state()  # otherwise it is done by the first step
    moments: dict[str, dict[str, str]] = {"exp_avg": {}, "exp_avg_sq": {}}
    weights = {}
    for name, parameter in engine.module.named_parameters():
        is_whole = not engine.zero_optimization()
        weights[name] = digest(parameter if is_whole else safe_get_full_fp32_param(parameter))
        for key, kept in moments.items():
            state = engine.optimizer.state[parameter] if is_whole else None
            kept[name] = digest(state[key] if state else safe_get_full_optimizer_state(parameter, key))
    return {
        "step": training.step,
        "count": engine.module.count.item(),
        "lr": engine.get_lr(),
        "weights": weights,
        **moments,
    }


def of_torchtitan(trainer: Any) -> dict[str, Any]:
    """Whole tensors of the parts that this rank has."""
    found = trainer.all()
    weights = {name: digest(one) for name, one in found.pop("model").items()}
    return {"weights": weights, "others": digests(found)}


def of_verl(training: Any) -> dict[str, Any]:
    """Whole weights, by the digests of `verl_runs`; moments, and generators, of this rank."""
    states = [training.optimizer.state[one] for one in training.optimizer.param_groups[0]["params"]]
    return {
        "step": training.global_steps,
        "lr": training.scheduler.get_last_lr(),
        "weights": training.digest(),
        "optimizer": digests(states),
        "generators": _generators(),
    }


def of_skyrl(training: Any) -> dict[str, Any]:
    """Whole weights; moments, and the generator, of this rank."""
    states = [training.optimizer.state[one] for one in training.optimizer.param_groups[0]["params"]]
    weights = {
        name: one.full_tensor() if isinstance(one, DTensor) else one
        for name, one in training.model.model.state_dict().items()
    }
    return {
        "lr": training.scheduler.get_last_lr(),
        "weights": {name: digest(one) for name, one in weights.items()},
        "optimizer": digests(states),
        "generator": digest(torch.get_rng_state()),
    }
