"""What other trainers call with the states of their generators, written out, and the keys of each."""

import random
from typing import Any

import torch


def _set_numpy(state: Any) -> None:
    if state is not None:  # without numpy, no state of it is saved
        import numpy as np

        np.random.set_state(state)


def skyrl_restores(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    _set_numpy(state.get("numpy"))
    random.setstate(state["random"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def verl_restores(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    _set_numpy(state.get("numpy"))
    random.setstate(state["random"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def open_instruct_restores(state: dict[str, Any]) -> None:
    """As its main branch does: the list counts only beside the states by name."""
    torch.set_rng_state(state["torch_cpu_rng_state"])
    _set_numpy(state.get("numpy_rng_state"))
    random.setstate(state["python_rng_state"])
    if torch.cuda.is_available() and "torch_cuda_rng_states" in state:
        for name, one in state["torch_cuda_rng_states"].items():
            torch.cuda.set_rng_state(one, int(name.split(":")[1]))
        if "torch_cuda_rng_state_all" in state:
            torch.cuda.set_rng_state_all(state["torch_cuda_rng_state_all"])


def open_instruct_restores_by_list(state: dict[str, Any]) -> None:
    """As it does once the states by name are gone."""
    torch.set_rng_state(state["torch_cpu_rng_state"])
    _set_numpy(state.get("numpy_rng_state"))
    random.setstate(state["python_rng_state"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["torch_cuda_rng_state_all"])


TRAINERS = [
    ("skyrl", skyrl_restores),
    ("verl", verl_restores),
    ("open-instruct", open_instruct_restores),
    ("open-instruct", open_instruct_restores_by_list),
]
# key set -> its keys for Python, numpy and torch
NAMES: dict[Any, tuple[str, str, str]] = {
    None: ("python", "numpy", "torch"),
    "skyrl": ("random", "numpy", "cpu"),
    "verl": ("random", "numpy", "cpu"),
    "open-instruct": ("python_rng_state", "numpy_rng_state", "torch_cpu_rng_state"),
}
