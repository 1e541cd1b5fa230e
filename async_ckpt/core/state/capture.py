"""Captures a state: takes it apart into its tensors, their specs, and a skeleton of everything else.

In: the state that the user passed to `save`. Out: a `Capture`. Knows nothing of: the destination.

`capture` runs on the caller's thread, so it costs only a few microseconds per tensor, and copies no tensor's bytes.
"""

from __future__ import annotations

import io
import json
import logging
import pickle
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...errors import UnsupportedStateError
from ..backends import has_plain_bytes
from ..garbage import no_collection
from ..slicing.sharded import InnerShard, Placed, Slicer, as_declared, is_declared, is_dtensor, is_ordinary, is_sharded
from ..slicing.slices import Slices
from ..spec import DTYPES, Json, SliceFacts, TensorSpec, with_article
from .captured import NOTHING, Capture, FrozenParts, FrozenTensors, Mark, SnapshotView, notes_in, per_rank_in, tree_of
from .loaders import loader_facts
from .megatron_tensors import MegatronTensors, refuse_others, with_megatron
from .names import Path, Select, dotted, dtype_name, is_describable, selector, shown
from .optimizers import classes_of, is_optimizer
from .rng import RngState
from .tree import CLASSES, LOADER, Encoder, is_omitted, with_notes
from .wrappers import StateDictOf, StateDicts, plain_model, state_dict_of

_log = logging.getLogger("async_ckpt")
_known_types: weakref.WeakSet[type] = weakref.WeakSet()  # types of leaves that were already pickled
_DTYPE_NAMES = {dtype: dtype_name(dtype) for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def capture(
    state: Any,
    select: Select = None,
    *,
    slicer: Slicer | None = None,
    local_parts: bool = False,
    state_dict_of: StateDictOf = state_dict_of,
) -> Capture:
    """Take a state apart; with `select`, only its entries with these names.

    With `slicer`, several ranks hold the state together: the capture has all slices on this rank, even if another rank
    writes them. With `local_parts`, it has the local tensors of DTensors, and `placed` has their placements. Raises
    UnsupportedStateError, naming the leaf, for tensors without bytes of their own (meta, fake, quantised, lazy, and
    wrapper subclasses that do not implement torch's protocol, or whose context is not plain data), cycles, keys that
    cannot be stored, and leaves that cannot be pickled.
    """
    walk = _CaptureWalk(state, slicer, state_dict_of, local_parts=local_parts)
    try:
        with no_collection():
            chosen = selector(select)
            encoder = Encoder(walk.leaf, chosen, walk.contents, walk.megatron.take)
            node, numbers = encoder.encode(state), walk.megatron_tensors(chosen)
            node = with_megatron({"dict": []} if is_omitted(node) and numbers else node, numbers)
            if is_omitted(node):
                raise KeyError(f"select={select!r} matches nothing in the state")
            if chosen is not None and chosen.unused:
                raise KeyError(f"select={select!r}, {chosen.unused[0]!r} matches nothing in the state")
            skeleton = json.dumps(with_notes(node, walk.notes), separators=(",", ":"), check_circular=False)
    except RecursionError as error:
        raise UnsupportedStateError("the state is nested too deeply to be stored", path="") from error
    return Capture(
        walk.specs,
        walk.tensors,
        skeleton,
        walk.pickled_leaves(),
        walk.marks,
        tuple(walk.frozen.completions),
        frozenset(walk.frozen.numbers),
        walk.modules,
        encoder.types,
        walk.slices,
        tuple(walk.per_rank),
        walk.placed,
        walk.notes,
    )


class _CaptureWalk:
    def __init__(
        self, state: Any, slicer: Slicer | None, state_dict_of: StateDictOf, *, local_parts: bool = False
    ) -> None:
        self._state_dicts = StateDicts(state, state_dict_of)
        self._slicer, self._local = slicer, Slicer() if local_parts else None
        self.placed: dict[int, Placed] = {}
        self.megatron = MegatronTensors(slicer)
        self.slices: list[Slices] = []
        self.per_rank: list[str] = []
        self.specs: list[TensorSpec] = []
        self.tensors: list[torch.Tensor] = []
        self.marks: list[Mark | None] = []
        self._objects: list[tuple[Any, str]] = []  # with their names
        self._at: dict[int, int] = {}  # the first tensor at an address
        self.modules: dict[Path, weakref.ref[torch.nn.Module]] = {}
        self.frozen = FrozenParts()
        self.notes: dict[Path, Mapping[str, Json]] = {}

    def contents(self, value: Any, path: Path) -> Any:
        """The contents of an object with a state dict."""
        if isinstance(value, SnapshotView | FrozenTensors):
            view = value.view if isinstance(value, FrozenTensors) else value
            self.frozen.add(view)
            if view is not value:
                return value.state_dict()
            self.per_rank += per_rank_in(view, path)
            self.notes |= notes_in(view, path)
            return tree_of(view)
        if isinstance(value, RngState):
            self.per_rank.append(dotted(path))
        if isinstance(value, torch.nn.Module):
            self.modules[path] = weakref.ref(plain_model(value))  # a wrapper may exist only during the call
        elif is_optimizer(value):
            self.notes[path] = {CLASSES: classes_of(value)}
        elif facts := loader_facts(value):
            self.notes[path] = {LOADER: facts}
        return self._state_dicts.of(value)

    def leaf(self, value: Any, path: Path) -> Json:
        if self._slicer is None and is_ordinary(value) and not is_declared(value):  # most leaves
            return {"tensor": self._tensor(value, path)}
        value = as_declared(value)
        if isinstance(value, torch.Tensor | InnerShard):
            if self._local is not None and (is_dtensor(value) or isinstance(value, InnerShard)):
                return {"tensor": self._local_part(value, path)}
            if self._slicer is not None:
                return {"tensor": self._sliced(value, path)}
            return {"tensor": self._tensor(value.of if isinstance(value, InnerShard) else value, path)}
        if type(value) is bytes:
            return {"bytes": self._bytes(value, path, "uint8", (len(value),))}
        numpy = sys.modules.get("numpy")
        if numpy is not None and type(value) in (numpy.ndarray, numpy.memmap) and is_describable(value.dtype):
            return self._array(numpy, value, path)
        refuse_others(value, path)
        self._objects.append((value, shown(path)))
        return {"object": len(self._objects) - 1}

    def _local_part(self, tensor: Any, path: Path) -> int:
        """The number of a DTensor's local tensor. Raises UnsupportedStateError like a save of the DTensor."""
        assert self._local is not None
        if isinstance(tensor, InnerShard):
            raise UnsupportedStateError(
                f"{shown(path)}: a snapshot cannot hold a DTensor whose local tensor is wrapped; save the live state "
                "instead; nothing was written",
                path=shown(path),
            )
        number = self._tensor(self._local.local_tensor(tensor, name=shown(path)), path)
        self.placed[number] = Placed.of(tensor)
        return number

    def _sliced(self, tensor: torch.Tensor | InnerShard, path: Path) -> int:
        """The number of a tensor of which other ranks may hold shards or replicas."""
        assert self._slicer is not None
        slices, parts = self._slicer.slice(tensor, name=shown(path))
        return self._with_slices(slices, parts, tensor.dtype, path)

    def megatron_tensors(self, chosen: Callable[[Path], bool] | None) -> dict[Path, int]:
        """The numbers of Megatron's tensors, by the names that they carry."""
        return {
            path: self._with_slices(slices, parts, dtype, path)
            for path, slices, parts, dtype in self.megatron.tensors()
            if chosen is None or chosen(path)
        }

    def _with_slices(self, slices: Slices, parts: Sequence[torch.Tensor], dtype: torch.dtype, path: Path) -> int:
        number = len(self.slices)
        self.slices.append(slices)
        tied = self._tied_to(slices, parts)
        for rectangle, part in zip(slices.rectangles, parts, strict=True):
            offsets = rectangle.global_offsets if tied is None else None
            self._tensor(part, path, SliceFacts(number, slices.global_shape, offsets), tied)
            if tied is not None:
                break  # one alias represents all slices
        if not parts:
            of = SliceFacts(number, slices.global_shape, None)
            self._add(TensorSpec(path, dtype_name(dtype), (0,), None, of), NOTHING)
        return number

    def _tied_to(self, slices: Slices, parts: Sequence[torch.Tensor]) -> int | None:
        """The first slice of an earlier tensor with the same memory and the same slices."""
        pointer = _pointer(parts[0]) if parts else None
        other = None if pointer is None else self._at.get(pointer)
        of = None if other is None else self.specs[other].of
        if other is None or of is None or self.slices[of.number] != slices:
            return None
        is_first = self.specs[other].alias_of is None and slices.rectangles[0].global_offsets == of.offsets
        return other if is_first and _same_memory(parts[0], self.tensors[other]) else None

    def _tensor(self, tensor: torch.Tensor, path: Path, of: SliceFacts | None = None, alias: int | None = None) -> int:
        """The number of a tensor's spec. For a slice, given by `of`, the caller passes the `alias`."""
        name = _DTYPE_NAMES.get(tensor.dtype, "")
        pointer = _pointer(tensor) if name in DTYPES else None
        if pointer is None and (why := _spread_over_ranks(tensor) or why_not(tensor)):
            raise UnsupportedStateError(f"{shown(path)}: {why}; nothing was written", path=shown(path))
        number, mark = len(self.specs), None
        if pointer and self.frozen.has(tensor):
            self.frozen.numbers.add(number)
            mark = self.frozen.mark(tensor)
        elif pointer:
            mark = None if tensor.is_inference() else (pointer, tensor._version)
        if not has_plain_bytes(tensor):
            tensor = tensor.detach().cpu()  # mps, xpu, …: one plain copy, without a side stream
        if pointer:
            other = self._at.setdefault(pointer, number)
            if of is None and other != number and _same_memory(tensor, self.tensors[other]):
                alias = other
        return self._add(TensorSpec(path, name, tuple(tensor.shape), alias, of), tensor, mark)

    def _add(self, spec: TensorSpec, tensor: torch.Tensor, mark: Mark | None = None) -> int:
        self.specs.append(spec)
        self.tensors.append(tensor)
        self.marks.append(mark)
        return len(self.specs) - 1

    def _bytes(self, data: Any, path: Path, dtype: str, shape: tuple[int, ...]) -> int:
        raw = bytearray(data) if isinstance(data, bytes) else data
        tensor = torch.frombuffer(raw, dtype=torch.uint8) if len(raw) else NOTHING
        if self._slicer is None:
            return self._add(TensorSpec(path, dtype, shape), tensor)
        number, slices = len(self.slices), Slices.plain(shape)
        self.slices.append(slices)
        offsets = slices.rectangles[0].global_offsets if slices.rectangles else None
        self._add(TensorSpec(path, dtype, shape, None, SliceFacts(number, shape, offsets)), tensor)
        return number

    def _array(self, numpy: Any, array: Any, path: Path) -> Json:
        shape = array.shape
        raw = numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8) if array.size else numpy.empty(0, "u1")
        if not raw.flags.writeable:  # torch would warn about a read-only array
            raw = raw.copy()
        name = array.dtype.name
        if name in DTYPES and array.dtype.isnative and not array.dtype.names:
            return {"ndarray": [self._bytes(raw, path, name, shape)]}
        descr = numpy.lib.format.dtype_to_descr(array.dtype)
        return {"ndarray": [self._bytes(raw, path, "uint8", (raw.size,)), descr, list(shape)]}

    def pickled_leaves(self) -> bytes | None:
        """The leaves that are not plain data, pickled by torch.save; None if there are none."""
        if not self._objects:
            return None
        try:
            data = pickled([value for value, _ in self._objects])
        except Exception:
            for value, name in self._objects:
                try:
                    pickled(value)
                except Exception as error:
                    raise UnsupportedStateError(
                        f"{name}: {with_article(type(value).__qualname__)} cannot be pickled ({error}); "
                        "leave it out, or give it a state_dict()",
                        path=name,
                    ) from error
            raise
        self._warn_of_trust(data)
        return data

    def _warn_of_trust(self, data: bytes) -> None:
        """Warn of leaves that will need trust=True to load, once for each type."""
        new: dict[type, tuple[Any, str]] = {}
        for value, name in self._objects:
            if type(value) not in _known_types:
                new.setdefault(type(value), (value, name))
        _known_types.update(new)
        if not new or not _needs_trust(data):
            return
        for value, name in new.values():
            if _needs_trust(pickled(value)):
                _log.warning(
                    "async_ckpt: %s is %s, which is pickled: loading it will need trust=True. Store text or "
                    "numbers instead to avoid this",
                    name,
                    with_article(type(value).__qualname__),
                )


def _pointer(tensor: torch.Tensor) -> int | None:
    """The address of an ordinary tensor's bytes; None if it has no bytes or not all of them, or is not ordinary."""
    if not is_ordinary(tensor) or tensor.is_nested:
        return None
    try:
        pointer = tensor.data_ptr()
    except RuntimeError:  # wrapped by a functional transform
        return None
    return None if not pointer or _ends_early(tensor) else pointer


def is_cut_short(tensor: torch.Tensor) -> bool:
    """True if the storage ends before the last element, since it was resized. Reading the tensor would be unsafe."""
    return is_ordinary(tensor) and not tensor.is_nested and _ends_early(tensor)


def _ends_early(tensor: torch.Tensor) -> bool:
    """`is_cut_short` of an ordinary tensor. Called for each tensor of a save while the training waits."""
    num_bytes = tensor.nbytes
    if num_bytes and not tensor.is_contiguous():
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        num_bytes = (last + 1) * tensor.itemsize
    end = tensor.storage_offset() * tensor.itemsize + num_bytes
    return num_bytes > 0 and end > tensor.untyped_storage().nbytes()


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if two tensors at one address are tied. False for different views that begin at the same byte."""
    return (a.shape, a.dtype, a.stride(), a.device, a.is_conj(), a.is_neg()) == (
        b.shape, b.dtype, b.stride(), b.device, b.is_conj(), b.is_neg()
    )  # fmt: skip


def _spread_over_ranks(tensor: torch.Tensor) -> str | None:
    if not is_sharded(tensor):
        return None
    return (
        f"{with_article(type(tensor).__qualname__)} is sharded over ranks; save it on every rank with an "
        "AsyncCheckpointer, or save its full_tensor()"
    )


def why_not(tensor: torch.Tensor) -> str | None:
    """The reason why a tensor cannot be stored or filled, or None."""
    kind = type(tensor).__qualname__
    if tensor.is_meta:
        return "a meta tensor has no values; materialise the module first"
    if tensor.is_nested:
        if tensor.layout is torch.jagged:
            return "a nested tensor has no memory of its own; save its values() and offsets()"
        return "a nested tensor of strided layout cannot be stored; make it with layout=torch.jagged, or save its parts"
    if tensor.layout is not torch.strided:
        return f"a sparse tensor ({tensor.layout}) cannot be stored; save its indices and values, or to_dense()"
    if tensor.is_quantized:
        return "a quantised tensor cannot be stored; save int_repr() with its scale and zero point"
    if _DTYPE_NAMES.get(tensor.dtype) not in DTYPES:
        return f"dtype {tensor.dtype} is not known to this version"
    if torch.nn.parameter.is_lazy(tensor):
        return "a lazy parameter has no values yet; run one forward pass first"
    if kind == "FakeTensor":
        return "a fake tensor has no values; save outside of the fake mode"
    try:
        has_bytes = not torch._is_functional_tensor(tensor) and tensor.data_ptr() != 0
    except RuntimeError:
        has_bytes = False
    if (has_bytes and not is_cut_short(tensor)) or (not tensor.numel() and is_ordinary(tensor)):
        return None
    if is_ordinary(tensor) and not torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        size = f"{tensor.untyped_storage().nbytes():,} bytes" if has_bytes else "zero"
        return f"its memory was freed (resized to {size}); gather or unshard it first"
    return f"{with_article(kind)} has no memory of its own; save the plain tensors that it wraps"


def pickled(value: Any) -> bytes:
    """The value, pickled by torch.save."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _needs_trust(data: bytes) -> bool:
    """True if torch's weights-only unpickler refuses the data.

    The data is not loaded: it may be large, or on a device.
    """
    try:
        return bool(torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data)))
    except pickle.UnpicklingError:  # the pickle has an integer of hundreds of digits
        return True
