"""The global random generators that training uses, as one object to put into a state.

In: the process. Out: a state dict; or the generators, set to a state dict. Knows nothing of: checkpoints.

A trainer's key set is an entry of `_KEY_SETS`: each key with a function that returns its value, None if the generator
does not exist. Loading does not need the key set, since a key means the same in every set.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any, Final, Literal, NamedTuple

import torch

from ..backends import accelerator
from .generators import put_python

Keys = Literal["skyrl", "verl", "open-instruct"]

# The size of MT19937's buffer of numbers. Its state includes a position in the buffer, which numpy does not check.
_NUMPY_STOCK: Final = 624


class RngState:
    """The random generators of Python, numpy, torch and every device of the accelerator, as an entry of a state.

        ckpt.save({"model": model, "rng": async_ckpt.RngState()}, step=100)

    By default the keys are `python`, `numpy`, `torch`, and the kind of the accelerator (`cuda`, `npu`, …). `keys` names
    a trainer whose own loader reads the state: "skyrl" and "verl" (`cpu`, `numpy`, `random`, and the current device's
    state under the name of its kind), or "open-instruct" (`torch_cpu_rng_state`, …). All of these can be restored with
    any `keys`.

    A missing key is ignored, and so is numpy's state if numpy is not installed. If the number of devices differs, the
    first ones are set, in order; a single state is set on the current device. With several ranks, each rank saves its
    own states. If the number of ranks changes, rank n gets the states of rank n modulo the saved number of ranks.
    """

    def __init__(self, keys: Keys | None = None) -> None:
        if keys not in _KEY_SETS:
            names = ", ".join(repr(name) for name in _KEY_SETS if name)
            raise ValueError(f"keys must be one of {names}, or None for the default keys; got {keys!r}")
        self._getters = _KEY_SETS[keys]

    def state_dict(self) -> dict[str, Any]:
        """The states of the generators, as plain values and CPU tensors. A generator that does not exist is left out.

        states = async_ckpt.RngState().state_dict()  # {"python": …, "numpy": …, "torch": …, "cuda": …}
        """
        kind = accelerator() or _ACCELERATOR
        states = {kind if key is _ACCELERATOR else key: get() for key, get in self._getters.items()}
        return {key: state for key, state in states.items() if state is not None}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set every generator that has a state under one of the known keys.

            async_ckpt.RngState().load_state_dict(states)

        Raises ValueError, and changes no generator, if the state has no known key or cannot be set.
        """
        keys = list(state_dict) if isinstance(state_dict, Mapping) else [type(state_dict)]
        if not any(key in _HOST or key in _devices() for key in keys):
            raise ValueError(
                f"no states of random generators here: expected some of {', '.join([*_HOST, *_devices()])}; "
                f"found {', '.join(map(repr, keys)) or 'nothing':.500}"
            )
        wanted = list(_matched(state_dict))
        before = [(generator, generator.get()) for _, generator, _ in wanted]
        for key, generator, state in wanted:
            try:
                generator.put(state)
            except Exception as error:  # a generator may raise anything for a malformed state
                for other, state_before in before:
                    other.put(state_before)
                raise ValueError(
                    f"{key!r} does not hold the state of a random generator, and none was changed: "
                    f"{type(error).__name__}: {error!s:.200}"
                ) from error


class _Generator(NamedTuple):
    """One generator of this process. `put` may raise any exception for a state that it does not accept."""

    get: Callable[[], Any]
    put: Callable[[Any], None]


# --- on the host ---------------------------------------------------------------------------------------------


def _numpy() -> Any:
    """The module numpy; None if it is not installed, so that nothing uses its generator."""
    with suppress(ImportError):
        return import_module("numpy")
    return None


def _get_numpy(*, legacy: bool = False) -> Any:
    numpy = _numpy()
    return None if numpy is None else numpy.random.get_state(legacy=legacy)


def _put_numpy(state: Any) -> None:
    numpy = _numpy()
    if numpy is None:
        return
    numpy.random.set_state(state)
    position = numpy.random.get_state(legacy=False)["state"].get("pos", 0)
    if not 0 <= position <= _NUMPY_STOCK:
        raise ValueError(f"position {position} lies outside of the {_NUMPY_STOCK} numbers in stock")


# --- on devices ----------------------------------------------------------------------------------------------


def _module(kind: str) -> Any:
    """A device module such as `torch.cuda`; None if no such device exists, or its generators' states cannot be read."""
    module = getattr(torch, kind, None)  # torch.npu exists once its package is imported
    return module if module is not None and hasattr(module, "get_rng_state") and module.is_available() else None


def _get_current() -> Any:
    module = _module(accelerator() or "")
    return None if module is None else module.get_rng_state()


def _get_each(kind: str) -> Any:
    """The states of all devices of a kind."""
    module = _module(kind)
    if module is None:
        return None
    return [module.get_rng_state(*_device_name(kind, module, index)) for index in range(module.device_count())]


def _get_all_in_use() -> Any:
    kind = accelerator() or ""
    module = _module(kind)
    # Reading the states of an unused accelerator would create a context on each device.
    is_used = module is not None and getattr(module, "is_initialized", lambda: True)()
    return _get_each(kind) if is_used else None


def _get_all_by_name() -> Any:
    states = _get_each("cuda")
    return None if states is None else {f"cuda:{index}": state for index, state in enumerate(states)}


def _device_name(kind: str, module: Any, index: int) -> tuple[str, ...]:
    """The arguments that name a device to its module. A single device is addressed without its number."""
    return () if module.device_count() == 1 else (f"{kind}:{index}",)


def _on_devices(kind: str, states: Any) -> Iterator[tuple[_Generator, Any]]:
    """The generators for a tensor, a list of tensors, or tensors by device name.

    Devices that do not exist are ignored.
    """
    if isinstance(states, torch.Tensor):
        by_index: dict[int | None, Any] = {None: states}
    elif isinstance(states, Mapping):
        by_index = {int(str(name).removeprefix(f"{kind}:")): state for name, state in states.items()}
    else:
        by_index = dict(enumerate(states))
    if not all(isinstance(state, torch.Tensor) for state in by_index.values()):
        raise TypeError("the state of a device is a tensor")
    module = _module(kind)
    for index, state in by_index.items() if module is not None else ():
        if index is None or 0 <= index < module.device_count():
            names = () if index is None else _device_name(kind, module, index)
            yield _Generator(partial(module.get_rng_state, *names), partial(_put_device, module, names)), state


def _put_device(module: Any, names: tuple[str, ...], state: torch.Tensor) -> None:
    module.set_rng_state(state.cpu(), *names)


# --- the key sets --------------------------------------------------------------------------------------------

# A key that is replaced by the name of the accelerator's kind.
_ACCELERATOR: Final = "accelerator"

_KEYS_OF_VERL: Final[Mapping[str, Callable[[], Any]]] = {
    "cpu": torch.get_rng_state,
    "numpy": partial(_get_numpy, legacy=True),
    "random": random.getstate,
    _ACCELERATOR: _get_current,
}

_KEY_SETS: Final[Mapping[Keys | None, Mapping[str, Callable[[], Any]]]] = {
    None: {
        "python": random.getstate,
        "torch": torch.get_rng_state,
        "numpy": _get_numpy,
        _ACCELERATOR: _get_all_in_use,
    },
    "skyrl": _KEYS_OF_VERL,
    "verl": _KEYS_OF_VERL,
    "open-instruct": {
        "torch_cpu_rng_state": torch.get_rng_state,
        "numpy_rng_state": partial(_get_numpy, legacy=True),
        "python_rng_state": random.getstate,
        # The loader of open-instruct reads the list only if the states by name also exist.
        "torch_cuda_rng_states": _get_all_by_name,
        "torch_cuda_rng_state_all": partial(_get_each, "cuda"),
    },
}

_HOST: Final[Mapping[str, _Generator]] = {
    **dict.fromkeys(("python", "random", "python_rng_state"), _Generator(random.getstate, partial(put_python, random))),
    **dict.fromkeys(("numpy", "numpy_rng_state"), _Generator(_get_numpy, _put_numpy)),
    **dict.fromkeys(
        ("torch", "cpu", "torch_cpu_rng_state"),
        _Generator(torch.get_rng_state, lambda state: torch.set_rng_state(state.cpu())),
    ),
}
# Keys of device states, and the kind of device. States of kinds that this machine lacks are ignored.
_DEVICES: Final[Mapping[str, str]] = {
    **{kind: kind for kind in ("cuda", "npu", "xpu", "mps", "hpu", "mlu", "musa")},
    "torch_cuda_rng_states": "cuda",
    "torch_cuda_rng_state_all": "cuda",
}


def _devices() -> Mapping[str, str]:
    kind = accelerator()
    return _DEVICES if kind is None else {**_DEVICES, kind: kind}


def _matched(state_dict: Mapping[str, Any]) -> Iterator[tuple[str, _Generator, Any]]:
    """The key, the generator and the state for each known key whose generator exists.

    Raises ValueError for malformed device states.
    """
    devices = _devices()
    for key, state in state_dict.items():
        if key in _HOST:
            yield key, _HOST[key], state
        elif key in devices:
            try:
                parts = list(_on_devices(devices[key], state))
            except Exception as error:
                raise ValueError(
                    f"{key!r} does not hold states of devices, and no generator was changed: {error!s:.200}"
                ) from error
            for generator, part in parts:
                yield key, generator, part
