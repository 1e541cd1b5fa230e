"""Live and saved objects, side by side: the live memory that each saved tensor belongs to.

In: live objects, and the structure of an archive. Out: tensors to fill, actions to take then, and differences.
Knows nothing of: files, steps.

Modules and torch's own optimizers are filled directly; other objects get their value by their own `load_state_dict`.
`container_match` has what is about containers.
"""

from __future__ import annotations

import functools
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, cast

import torch

from ....errors import UnsupportedStateError
from ...slicing.boxes import Box
from ...slicing.sharded import (
    Placed,
    Slicer,
    as_declared,
    declare_like,
    has_shards,
    is_dtensor,
    is_of_megatron,
    is_sharded,
)
from ...slicing.slices import Ints
from ...spec import Json, with_article
from ...state.capture import why_not
from ...state.captured import SnapshotView
from ...state.megatron_tensors import name_of
from ...state.names import Path, Selector, dtype_name, printable, shown
from ...state.optimizers import is_optimizer, is_plain_optimizer
from ...state.plain import SCALARS, method_of
from ...state.tree import (
    LOADER,
    InnerTensors,
    StoredLeaf,
    ValuesByRank,
    classes_at,
    facts_of,
    note_at,
    parts_in,
    replaced,
)
from ...state.wrapped import Wrapper, is_sparse_layout, plain_parts, taken_apart
from ...state.wrappers import (
    PlainNames,
    StateDictCache,
    live_metadata,
    may_be_wrapped,
    names_of_parameters,
    paired,
)
from ..archives.contents import Part
from .container_match import HOW_TO_MAKE_ONE, ContainerMatch
from .containers import is_plain
from .kinds import is_on_device, is_optimizer_state, is_plain_module, state_of_parameter
from .optimizer_forms import OptimizerConverter, another_kind
from .optimizer_kinds import has_shape_of_parameter


class Match(ContainerMatch):
    """One walk over the live objects and the saved structure, side by side, on the thread that restores.

    `restore_state` creates one for each archive. `wanted` fills live tensors, and new ones for values that `actions`
    then set; `differences` lists what does not fit.
    """

    def __init__(
        self,
        part: Part,
        objects: list[Any],
        chosen: Selector | None,
        state_dicts: StateDictCache,
        root: Any,
        *,
        goes_back: bool,
    ) -> None:
        """`root` is the whole live state, whose modules name parameters; the rest is as for `ContainerMatch`."""
        super().__init__(part, objects, chosen, state_dicts, goes_back=goes_back)
        self._root, self._slicer = root, Slicer()
        self._has_tensors = False  # even if this rank holds no part of them

    @property
    def fits(self) -> bool:
        """True if anything saved has a place in the live state."""
        return bool(self._has_tensors or self.wanted or self.actions)

    def visit(self, live: Any, saved: Any, path: Path) -> Any:
        if type(live) in SCALARS and type(saved) in SCALARS:
            return saved
        if isinstance(live, SnapshotView):
            raise TypeError(
                f"restore fills objects in place and cannot fill a snapshot, as {shown(path)} is; give it the live "
                "objects"
            )
        if isinstance(saved, ValuesByRank):
            self.differences.add_value_of_each_rank(saved)
            return live
        if isinstance(live, torch.Tensor):
            return (
                self._copied(live, saved, path) if isinstance(saved, torch.Tensor) else self._tensor(live, saved, path)
            )
        if is_plain_module(live, self._state_dicts.of):
            return self._module(live, saved, path)
        if isinstance(live, torch.optim.Optimizer):
            return self._any_optimizer(live, saved, path)
        return self._object(live, saved, path)

    def _object(self, live: Any, saved: Any, path: Path) -> Any:
        if method_of(live, "load_state_dict") is not None:
            if saved is None and self._state_dicts.of(live) is not None:
                self._add_kind_difference(path, f"is {with_article(type(live).__qualname__)} here", saved)
                return live
            if type(saved) is dict and not (self._keeps_empty or isinstance(live, torch.nn.Module)):
                with suppress(Exception):  # an object that has no state dict now has nothing empty in it either
                    saved = self._with_left_out(saved, self._state_dicts.of(live))
            self.differences.add_loader(path, live, note_at(self.archive.index.skeleton, path, LOADER))
            if is_optimizer(live) and (why := another_kind(live, saved, self._names, self._classes(path))):
                self.differences.add(path, why)
                return live
            expected = self._as_live_expects(live, saved, path)
            return self._load(live, expected, self._own_state(live, expected), path)
        return self._value(live, saved, path)

    def _load(self, live: Any, expected: Any, state: dict[Any, Any] | None, path: Path) -> Any:
        """Load a value by the object's own `load_state_dict`: its own `state`, filled, if there is one."""
        value = self._materialize(expected) if state is None else self.visit(state, expected, path)
        self.actions.append(lambda: live.load_state_dict(value))
        return live

    def _any_optimizer(self, live: torch.optim.Optimizer, saved: Any, path: Path) -> Any:
        """Fill one of torch's optimizers, or convert the state to the form that another one loads."""
        try:
            saved = self._with_empty_state(saved, path)
            converter = OptimizerConverter(live, saved, self._names, self._state_dicts.of)
            if why := another_kind(live, saved, converter.known_names, self._classes(path)):
                raise ValueError(why)
            saved = converter.convert(saved, is_of_some=lambda key: self.archive.is_of_some((*path, key)))
            if is_plain_optimizer(live):
                return self._optimizer(live, saved, path)
            state = self._own_state(live, saved, lambda own: converter.with_room(own, saved, self._room_for))
        except ValueError as error:
            self.differences.add(path, str(error))
            return live
        return self._load(live, saved, state, path)

    def _names(self) -> dict[int, set[str]]:
        return names_of_parameters(self._root)

    def _classes(self, path: Path) -> list[list[str]]:
        """The names of the classes of an optimizer that was saved; empty if they are not known."""
        return classes_at(self.archive.index.skeleton, path)

    def _room_for(self, parameter: torch.Tensor, saved: Any) -> torch.Tensor | None:
        """New memory for an optimizer's tensor, sharded like the parameter; None if it is not sharded, or wrapped."""
        if isinstance(saved, InnerTensors) and saved.wrapper is not None:
            wrapped: torch.Tensor = self._new_wrapped(parameter, saved)
            return wrapped
        if not (isinstance(saved, StoredLeaf) and saved.kind == "tensor" and is_sharded(parameter)):
            return None
        if tuple(as_declared(parameter).shape) != self.archive.index.tensors[saved.number].shape:
            return None
        room = torch.empty_like(parameter.detach(), dtype=self.archive.dtype(saved.number))
        declare_like(room, parameter)
        return room

    def _own_state(
        self, live: Any, saved: Any, with_room: Callable[[Any], Any] = lambda state: state
    ) -> dict[Any, Any] | None:
        """An object's own state dict, if it has shards: they are filled in place, and loaded with the rest.

        Taking it may have any effect, so it is taken only for a checkpoint of several ranks, and for an optimizer or a
        value with tensors. It also tells whether there are names that only other ranks may have saved, such as those
        of another stage of a pipeline. A wrapped tensor is filled in place, too: its class may be known only there.
        """
        tensors = [leaf for leaf in parts_in(saved, StoredLeaf) if leaf.kind == "tensor"]
        are_spread = any(self.archive.index.tensors[leaf.number].is_spread for leaf in tensors)
        are_wrapped = next(parts_in(saved, InnerTensors), None) is not None
        may_lack = not self.archive.has_all_names and (tensors or isinstance(live, torch.optim.Optimizer))
        if not (are_spread or are_wrapped or may_lack):
            return None
        state = self._state_dicts.of(live)
        self.differences.add_own_names(state, saved)
        state = with_room(state) if are_spread or are_wrapped else None
        return state if isinstance(state, dict) and (are_wrapped or has_shards(state)) else None

    def _copied(self, live: Any, saved: Any, path: Path) -> Any:
        """Match a live tensor with one in a pickled container."""
        if (live.shape, live.dtype) != (saved.shape, saved.dtype) or why_not(live) or _is_expanded(live):
            self.differences.add(
                path,
                f"is {dtype_name(live.dtype)}{list(live.shape)} here and {dtype_name(saved.dtype)}{list(saved.shape)} "
                "in the checkpoint",
            )
        else:
            self.actions.append(lambda: live.copy_(saved))
        return live

    def _tensor(self, live: Any, saved: Any, path: Path) -> Any:
        try:
            apart = taken_apart(live, path)
            if apart is not None:
                return self._wrapped(live, *apart, saved, path)
        except UnsupportedStateError as error:
            self._add_refusal(error, path)
            return live
        if not (isinstance(saved, StoredLeaf) and saved.kind == "tensor"):
            self._add_kind_difference(path, "is a tensor here", saved)
            return live
        indexed = self.archive.index.tensors[saved.number]
        is_keyed = is_of_megatron(live)
        shape = tuple(live.global_shape if is_keyed else as_declared(live).shape)
        dtype = dtype_name(live.data.dtype if is_keyed and live.data is not None else live.dtype)
        try:
            parts = self._local_parts(live, path)
        except UnsupportedStateError as error:
            self._add_refusal(error, path)
            return live
        fits = shape == indexed.shape
        if is_keyed and getattr(live, "allow_shape_mismatch", False) and len(shape) == len(indexed.shape):
            fits, parts = True, list(_overlaps(parts, indexed.shape))
        why = next(filter(None, (why_not(part) for _, part in parts)), None)
        if why:
            self.differences.add(path, f"cannot be filled: {why}")
        elif not fits or dtype != indexed.dtype:
            self.differences.add(
                path, f"is {dtype}{list(shape)} here and {indexed.dtype}{list(indexed.shape)} in the checkpoint"
            )
        elif any(_is_expanded(part) for _, part in parts):
            self.differences.add(path, "cannot be filled: it is expanded, several items share one place")
        else:
            self._has_tensors = True
            for offsets, part in parts:
                self._request(saved.number, part, offsets)
        return live

    def _add_refusal(self, error: UnsupportedStateError, path: Path) -> None:
        refusal = str(error).removeprefix(f"{shown(path)}: ").removesuffix("; nothing was written")
        self.differences.add(path, f"cannot be filled: {refusal}")

    def _wrapped(self, live: Any, wrapper: Wrapper, parts: dict[str, Any], saved: Any, path: Path) -> Any:
        """Match a tensor that is made of others: these are filled if all else is alike."""
        if not isinstance(saved, InnerTensors):
            self._add_kind_difference(path, f"is {with_article(wrapper.kind)} here", saved)
        elif differences := list(_differing(facts_of(wrapper, path, set()), parts, saved)):
            self.differences.add(path, "; ".join(differences))
        else:
            for name, part in parts.items():
                self._tensor(part, saved[name], (*path, name))
            if is_sparse_layout(wrapper.kind):
                self.actions.append(lambda: self.archive.check_indices(live, path))
        return live

    def _local_parts(self, live: Any, path: Path) -> list[tuple[Ints | None, torch.Tensor]]:
        """The parts of a tensor that this rank holds, and their offsets in it; None for the whole tensor."""
        if not is_sharded(live):
            return [(None, live)]
        slices, parts = self._slicer.slice(live, name=shown(path))
        return [(rectangle.global_offsets, part) for rectangle, part in zip(slices.rectangles, parts, strict=True)]

    def _module(self, module: torch.nn.Module, saved: Any, path: Path) -> Any:
        if not isinstance(saved, dict):
            self._add_kind_difference(path, "is a module here", saved)
            return module
        live = self._state_dicts.of(module)
        names = PlainNames(module).of(live)
        saved = self._by_plain_name(names, saved, path)
        self._compare_names(names.values(), saved, path)
        extra: dict[str, Any] = {}
        for here, value in live.items():
            name = names[here]
            if name not in saved:
                continue
            if isinstance(value, torch.Tensor):
                self._tensor(value, saved[name], (*path, name))
            else:
                extra[here] = self._materialize(saved[name])
        if extra:  # for set_extra_state
            self.actions.append(lambda: module.load_state_dict(extra, strict=False))
        return module

    def _by_plain_name(self, names: dict[str, str], saved: dict[Any, Any], path: Path) -> dict[Any, Any]:
        """The saved state of a module by the plain names of the live one; names that the live one lacks are kept."""
        live_names, ambiguous = paired(names, saved)
        self.differences.add_all_of(path, (f"{line}; load() it and rename one of them" for line in ambiguous))
        plain = {live_names[here]: name for here, name in names.items() if here in live_names}
        return {plain.get(name, name): value for name, value in saved.items()}

    def _as_live_expects(self, live: Any, saved: Any, path: Path) -> Any:
        """The saved state of an object, by the names that its own `load_state_dict` expects."""
        if not (isinstance(live, torch.nn.Module) and isinstance(saved, dict)):
            return saved
        plain = PlainNames(live)
        expected = saved
        # Taking the state dict may gather what is sharded.
        if (plain.are_shown or may_be_wrapped(saved)) and isinstance(state := self._state_dicts.of(live), dict):
            names = plain.of(state)
            live_name_of = {name: raw for raw, name in names.items()}
            values = self._by_plain_name(names, saved, path)
            expected = type(saved)((live_name_of.get(name, name), value) for name, value in values.items())
        if isinstance(metadata := getattr(saved, "__dict__", {}).get("_metadata"), dict):
            expected = OrderedDict(expected)
            expected._metadata = live_metadata(live, plain, metadata)  # type: ignore[attr-defined]
        return expected

    def _with_empty_state(self, saved: Any, path: Path) -> Any:
        """The saved state of an optimizer, with the empty dict that torch.distributed.checkpoint leaves out."""
        if isinstance(saved, dict) and "param_groups" in saved and "state" not in saved:
            # The dict may also be missing because it was not selected.
            below = (*path, "state")
            if not any(tensor.path[: len(below)] == below for tensor in self.archive.index.tensors):
                return {**saved, "state": {}}
        return saved

    def _optimizer(self, optimizer: torch.optim.Optimizer, saved: Any, path: Path) -> Any:
        """Load like Optimizer.load_state_dict, but in place, and without its cast to the dtype of the parameter."""
        if not is_optimizer_state(saved):
            self._add_kind_difference(path, "is an optimizer here", saved)
            return optimizer
        groups = saved["param_groups"]
        sizes = [len(group["params"]) for group in groups]
        live_sizes = [len(group["params"]) for group in optimizer.param_groups]
        if sizes != live_sizes:
            self.differences.add(path, f"has parameter groups of {live_sizes} here and of {sizes} in the checkpoint")
            return optimizer
        for i, (live_group, group) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
            for key, value in group.items():
                if key not in ("params", "param_names"):  # the live model has names of its own
                    self._setting(live_group, key, value, (*path, "param_groups", i, key))
            for param, number in zip(live_group["params"], group["params"], strict=True):
                state, inner = state_of_parameter(saved["state"], number), (*path, "state", number)
                self._optimizer_state(optimizer, param, state, is_on_device(group), inner)
        # As load_state_dict does at its end: classes bring older states up to date there.
        self.actions.append(
            lambda: optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})
        )
        return optimizer

    def _optimizer_state(
        self,
        optimizer: torch.optim.Optimizer,
        param: torch.Tensor,
        saved: Any,
        step_on_device: bool,
        path: Path,
    ) -> None:
        live = optimizer.state.get(param, {})
        state: dict[Any, Any] = {}
        whole = as_declared(param)
        for key, value in saved.items():
            live_tensor = live.get(key)
            if isinstance(value, InnerTensors):
                state[key] = self._wrapped_state(param, live_tensor, value, (*path, key))
                continue
            if not (isinstance(value, StoredLeaf) and value.kind == "tensor"):
                state[key] = self._materialize(value)
                continue
            tensor = self.archive.index.tensors[value.number]
            declare_like(live_tensor, param)
            fits = (type(live_tensor) is torch.Tensor or is_sharded(live_tensor)) and (
                tuple(as_declared(live_tensor).shape),
                dtype_name(live_tensor.dtype),
            ) == (tensor.shape, tensor.dtype)
            if has_shape_of_parameter(optimizer, key) and tensor.shape != tuple(whole.shape):
                self.differences.add(
                    (*path, key),
                    f"is {list(tensor.shape)} in the checkpoint, and its parameter {list(whole.shape)} here",
                )
            if not fits and tensor.shape and (room := self._room_for(param, value)) is not None:
                live_tensor = room
            elif not fits:
                # Like torch, keep `step` on the host unless the update kernel reads it from the device.
                device = param.device if key != "step" or step_on_device else torch.device("cpu")
                live_tensor = self.archive.empty(self.archive.primary(value.number), device)
            state[key] = self._tensor(live_tensor, value, (*path, key))

        def hand_over() -> None:
            if state:
                optimizer.state[param] = state
            else:
                optimizer.state.pop(param, None)

        self.actions.append(hand_over)

    def _wrapped_state(self, param: torch.Tensor, live: Any, saved: InnerTensors, path: Path) -> Any:
        """Match a wrapped tensor of an optimizer, which has none before its first step."""
        if not isinstance(live, torch.Tensor):
            if saved.wrapper is None:
                self.differences.add(path, f"is {with_article(saved.kind)} in the checkpoint, and {HOW_TO_MAKE_ONE}")
                return None
            live = self._new_wrapped(param, saved)
        return self._tensor(live, saved, path)

    def _new_wrapped(self, param: torch.Tensor, saved: InnerTensors) -> Any:
        """A wrapped tensor that is still to be filled, on the device of the parameter, and sharded like it."""
        assert saved.wrapper is not None
        row = (0,) * len(saved.wrapper.shards)
        shapes: Iterator[Ints] | None = None
        if is_dtensor(param) and not row:
            # On no device: the class itself cuts the whole as the parameter is cut.
            like = replaced(saved, lambda leaf: torch.empty(self._shape(leaf), dtype=self._dtype(leaf), device="meta"))
            for rectangle in self._slicer.slice(param, name=shown(saved.path)).slices.rectangles[:1]:
                for dim, (at, size) in enumerate(zip(rectangle.global_offsets, rectangle.sizes, strict=True)):
                    like = like if size == like.shape[dim] else like.narrow(dim, at, size)
            shapes = iter([tuple(part.shape) for part in plain_parts(like)])
            saved = saved.of_size(like)

        def room(leaf: StoredLeaf) -> torch.Tensor:
            shape = self._shape(leaf)[len(row) :] if shapes is None else next(shapes)
            box = Box(row + (0,) * len(shape), (1,) * len(row) + shape)
            self.archive.need([(leaf.number, box)])
            self.archive.sources(self.archive.primary(leaf.number), box)  # it is really there
            return torch.empty(shape, dtype=self._dtype(leaf), device=param.device)

        local = replaced(saved, room, of_inner=functools.partial(InnerTensors.made, of_shard=True))
        return Placed.of(param.detach()).around(local) if is_dtensor(param) else local

    def _shape(self, leaf: StoredLeaf) -> Ints:
        return self.archive.index.tensors[leaf.number].shape

    def _dtype(self, leaf: StoredLeaf) -> torch.dtype:
        return self.archive.dtype(leaf.number)

    def _setting(self, group: dict[str, Any], key: str, saved: Any, path: Path) -> None:
        """Match a setting of an optimizer, which the live one may lack."""
        now = group.get(key)
        with self._history(is_plain(now, with_arrays=True)):  # groups may share one list by default
            value = self.visit(now, saved, path)
        if value is not now:
            self.actions.append(lambda: group.__setitem__(key, value))

    def megatron_tensor(self, live: Any, path: Path) -> None:
        name = name_of(live, path)
        if live.key in self._groups.get(name[:-1], {}):
            self._tensor(live, self._groups[name[:-1]][live.key], path)
        else:
            self.differences.add_missing(name)


def _differing(here: dict[str, Json], parts: Mapping[str, Any], saved: InnerTensors) -> Iterator[str]:
    """The differences between a live wrapped tensor and a saved one, in words."""
    there = {**saved.facts, "inner tensors": [*saved]}
    here = {**here, "inner tensors": [*parts]}
    for fact in dict.fromkeys((*here, *there)):
        one, other = cast("tuple[Json, Json]", (here.get(fact), there.get(fact)))
        if fact == "context" and all(isinstance(node, dict) and [*node] == ["dict"] for node in (one, other)):
            one, other = (
                [entry for entry in a["dict"] if entry not in b["dict"]] for a, b in ((one, other), (other, one))
            )
        if one != other:
            yield f"has the {fact} {_shown_node(one)} here and {_shown_node(other)} in the checkpoint"


def _shown_node(node: Json) -> str:
    return printable(node if isinstance(node, str) else json.dumps(node))[:200]


def _overlaps(
    parts: Iterable[tuple[Ints | None, torch.Tensor]], shape: Ints
) -> Iterator[tuple[Ints | None, torch.Tensor]]:
    """The parts of a tensor as far as they lie in one of another shape."""
    for offsets, part in parts:
        at = (0,) * part.ndim if offsets is None else offsets
        sizes = [min(size, whole - begin) for size, whole, begin in zip(part.shape, shape, at, strict=True)]
        if all(size > 0 for size in sizes):
            yield at, part.detach()[tuple(map(slice, sizes))]


def _is_expanded(tensor: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
