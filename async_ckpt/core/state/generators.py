"""Random generator objects of torch, numpy and Python as plain data.

In: a generator, or an untrusted node. Out: a node, or a `SavedGenerator`, which sets a live generator or makes a new
one. Knows nothing of: files, the global generators of the process.

A node is `{"generator": [kind, state, …]}`. This module defines the kinds, so a file cannot cause an import. A state is
tried on a scratch generator first, since numpy itself checks only a part of it.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import torch

from ..backends import is_host
from ..spec import Json, with_article
from .plain import from_base64, hashable_value, scalar_node, to_base64

_BIT_GENERATORS: Final = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
# Positions in a buffer of numbers, and the buffer's size, which numpy does not check.
_STOCKS: Final = {"pos": 624, "buffer_pos": 4}
# A seed of more digits is not stored, since the time to mix it grows with the square of its length.
_MAX_SEED_CHARACTERS: Final = 4096
_MAX_POOL: Final = 64


def generator_node(value: Any) -> Json | None:
    """The node of a random generator with its state; None for any other value, and for unknown kinds."""
    facts = _facts(value)
    return None if facts is None else {"generator": facts}


def is_generator(value: Any) -> bool:
    """True for a random generator of torch, numpy or Python, including kinds that are not stored as plain data."""
    if isinstance(value, torch.Generator | random.Random):
        return True
    numpy = sys.modules.get("numpy.random")
    return numpy is not None and isinstance(value, numpy.Generator | numpy.RandomState | numpy.BitGenerator)


def copy_state(source: Any, target: Any) -> None:
    """Copy the state of a generator to another one of the same class, for kinds that are not stored as plain data."""
    if isinstance(source, random.Random):
        target.setstate(source.getstate())
    else:
        _bit_generator(target).state = _bit_generator(source).state


def _facts(value: Any) -> Json | None:
    if isinstance(value, torch.Generator):
        return ["torch", to_base64(bytes(value.get_state().tolist())), str(value.device)]
    if isinstance(value, random.Random):
        # A subclass with its own state is pickled. SystemRandom has no state.
        is_known = type(value).getstate is random.Random.getstate
        return ["python", _tree(value.getstate())] if is_known else None
    if not is_generator(value) or type(_bit_generator(value)).__name__ not in _BIT_GENERATORS:
        return None
    numpy = sys.modules["numpy.random"]
    if isinstance(value, numpy.RandomState):
        return ["numpy.RandomState", _tree(value.get_state(legacy=False))]
    kind = "numpy.Generator" if isinstance(value, numpy.Generator) else "numpy.BitGenerator"
    inner = _bit_generator(value)
    return [kind, _tree(inner.state), *_seed_facts(numpy, getattr(inner, "seed_seq", None))]


def _bit_generator(value: Any) -> Any:
    """The numpy object that holds the state of a generator."""
    for name in ("bit_generator", "_bit_generator"):
        if (inner := getattr(value, name, None)) is not None:
            return inner
    return value


def _seed_facts(numpy: Any, seed: Any) -> list[Json]:
    """The seed sequence, from which `spawn` makes further generators; empty if it cannot be stored."""
    if type(seed) is not numpy.SeedSequence or seed.pool_size > _MAX_POOL:
        return []
    facts = _tree(seed.state)
    return [facts] if len(json.dumps(facts)) <= _MAX_SEED_CHARACTERS else []


@dataclass(frozen=True)
class SavedGenerator:
    """A random generator in a skeleton. Equal generators continue with the same numbers.

    `facts` are the contents of the node: the kind, the state, and for torch the device, for numpy the seed sequence.
    """

    facts: list[Json]

    @classmethod
    def of_node(cls, facts: Json) -> SavedGenerator:
        """The generator of an untrusted node. Raises an unspecified error for an invalid node."""
        saved = cls(facts)
        if facts[0] == "torch" and not is_host(torch.device(facts[2])):
            from_base64(facts[1])  # this machine may lack the device
        else:
            saved.made()
        return saved

    @classmethod
    def of(cls, generator: Any) -> SavedGenerator | None:
        """The saved form of a generator; None if its kind is unknown."""
        facts = _facts(generator)
        return None if facts is None else cls(facts)

    def made(self) -> Any:
        """A new generator with this state; if this machine lacks its device, the state as a uint8 tensor."""
        kind, state, *more = self.facts
        if kind == "torch":
            tensor, device = torch.frombuffer(bytearray(from_base64(state)), dtype=torch.uint8), torch.device(more[0])
            if is_host(device):
                return torch.Generator().set_state(tensor)
            for name in (more[0], more[0].partition(":")[0]):  # the machine may have fewer devices
                with suppress(Exception):
                    return torch.Generator(name).set_state(tensor)
            return tensor
        new = _blank(kind, state)
        _put(new, state, *more)
        return new

    def put_into(self, live: Any) -> None:
        """Set a live generator to this state. `why_not` has returned None for it."""
        kind, state, *more = self.facts
        if kind == "torch":
            live.set_state(torch.frombuffer(bytearray(from_base64(state)), dtype=torch.uint8))
        else:
            _put(live, state, *more)

    def why_not(self, live: Any) -> str | None:
        """The reason why this state cannot be put into a live generator; None if it can."""
        if isinstance(live, random.SystemRandom):
            return "draws from the operating system and has no state that could be set; leave it out"
        if (here := _kind_of(live)) != (there := self.kind):
            return f"is {with_article(here)} here and {with_article(there)} in the checkpoint"
        try:  # on a scratch generator, so that a refused state does not change the live generator
            if isinstance(live, torch.Generator):
                self.put_into(torch.Generator(live.device))
            else:
                self.made()
        except Exception as error:
            return f"cannot be set to the state in the checkpoint: {error!s:.200}"
        return None

    @property
    def kind(self) -> str:
        """The kind as text. A state fits only generators of the same kind."""
        kind, state, *more = self.facts
        if kind == "torch":
            return f"torch.Generator of {torch.device(more[0]).type}"
        return "random.Random" if kind == "python" else f"{_NUMPY_WORDS[kind]} of {_bit_generator_name(state)}"

    def __repr__(self) -> str:
        state = hashlib.blake2b(json.dumps(self.facts).encode(), digest_size=4).hexdigest()
        return f"<{self.kind} in state {state}>"


_NUMPY_WORDS: Final = {
    "numpy.Generator": "numpy Generator",
    "numpy.RandomState": "numpy RandomState",
    "numpy.BitGenerator": "numpy bit generator",
}


def _kind_of(live: Any) -> str:
    saved = SavedGenerator.of(live)
    return type(live).__qualname__ if saved is None else saved.kind


def _bit_generator_name(state: Json) -> str:
    name = state["dict"]["bit_generator"]
    if name not in _BIT_GENERATORS:
        raise ValueError(f"{name!r:.50} is not a bit generator of numpy")
    return str(name)


def _blank(kind: str, state: Json) -> Any:
    """A new generator of this kind. Raises ValueError for an unknown kind."""
    if kind == "python":
        return random.Random()  # nosec B311
    if kind not in _NUMPY_WORDS:
        raise ValueError(f"the skeleton has a random generator of the unknown kind {kind!r:.50}")
    import numpy.random

    inner = getattr(numpy.random, _bit_generator_name(state))()
    if kind == "numpy.BitGenerator":
        return inner
    return numpy.random.Generator(inner) if kind == "numpy.Generator" else numpy.random.RandomState(inner)


def put_python(generator: Any, state: Any) -> None:
    """Set the state of one of Python's generators; with the module `random`, of the process's global generator."""
    version, internal, gauss = state
    if gauss is not None and not isinstance(gauss, float):  # setstate accepts any value, and gauss() fails later
        raise TypeError(f"{with_article(type(gauss).__name__)} is not a number that gauss() keeps")
    generator.setstate((version, tuple(internal), gauss))


def _put(generator: Any, tree: Json, seed: Json = None) -> None:
    state = _value(tree)
    if isinstance(generator, random.Random):
        put_python(generator, state)
        return
    import numpy.random

    if isinstance(generator, numpy.random.RandomState):
        _check_like(generator.get_state(legacy=False), state)
        generator.set_state(state)
        return
    inner = _bit_generator(generator)
    _check_like(inner.state, state)
    inner.state = state
    if seed is not None:
        with suppress(TypeError):  # before 2.0, numpy cannot replace a generator's seed sequence
            inner.__setstate__((state, _seed_sequence(numpy.random, seed)))


def _seed_sequence(numpy: Any, tree: Json) -> Any:
    facts = _value(tree)
    pool_size = facts["pool_size"]
    if len(json.dumps(tree)) > _MAX_SEED_CHARACTERS or type(pool_size) is not int or not 0 < pool_size <= _MAX_POOL:
        raise ValueError("the seed of a random generator is too large")
    return numpy.SeedSequence(**facts)


def _check_like(own: Any, state: Any, name: str = "") -> None:
    """Check an untrusted state against a generator's own state.

    Raises ValueError if the structure differs, or a position is out of range.
    """
    if isinstance(own, Mapping):
        if not isinstance(state, Mapping) or own.keys() != state.keys():
            raise ValueError("the state of a random generator has other parts than it should")
        for key, value in own.items():
            _check_like(value, state[key], key)
    elif hasattr(own, "dtype"):
        if (own.dtype, own.shape) != (getattr(state, "dtype", None), getattr(state, "shape", None)):
            raise ValueError(f"{name} in the state of a random generator has another shape than it should")
    elif not isinstance(state, type(own)):
        raise ValueError(f"{name} in the state of a random generator is {with_article(type(state).__name__)}")
    elif name in _STOCKS and not 0 <= state <= _STOCKS[name]:
        raise ValueError(f"position {state} lies outside of the {_STOCKS[name]} numbers in stock")


# --- states as JSON: dicts, tuples, arrays of numpy, numbers and text ------------------------------------------------


def _tree(value: Any) -> Json:
    if isinstance(value, Mapping):
        return {"dict": {key: _tree(item) for key, item in value.items()}}
    if isinstance(value, tuple | list):
        return {"tuple": [_tree(item) for item in value]}
    if not hasattr(value, "dtype"):
        return scalar_node(value)
    if value.dtype.str[1:] not in ("u4", "u8") or not value.shape:  # a seed of any integers
        return _tree(value.tolist())
    little = value.astype(value.dtype.newbyteorder("<"))
    return {"array": [little.dtype.str, to_base64(little.tobytes())]}


def _value(node: Json) -> Any:
    kind = next(iter(node), None) if isinstance(node, dict) else None
    if kind == "dict":
        return {str(key): _value(item) for key, item in node[kind].items()}
    if kind == "tuple":
        return tuple(map(_value, node[kind]))
    if kind == "array":
        import numpy

        name, text = node[kind]
        if name not in ("<u4", "<u8"):
            raise ValueError(f"{name!r:.50} is not a dtype in the state of a random generator")
        return numpy.frombuffer(from_base64(text), name).astype(numpy.dtype(name).newbyteorder("="))
    return hashable_value(node)
