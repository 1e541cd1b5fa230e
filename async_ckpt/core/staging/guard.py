"""The guard keeps an optimizer from stepping while one of its tensors is still being copied.

In: optimizers, and snapshots in progress. Out: the tensors whose copy may overlap training; steps that wait. Knows
nothing of: files, segments.

By passing `guard=` the caller states that a tensor changes only inside `optimizer.step()`. This is never inferred, and
the tripwires check it.
"""

from __future__ import annotations

import queue
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any, Final

import torch

from ..backends import device_of, has_plain_bytes, is_capturing, is_dense, is_on_host
from ..host.waits import ENDS_THE_WAIT, LIVENESS_SECONDS, Wait
from ..spec import MIB
from ..state.optimizers import all_of
from ..state.wrapped import plain_parts
from ..timing import Clock, Trace

# Copying a smaller tensor costs less than tracking it.
DEFERRED_BYTES: Final = MIB

Optimizers = Sequence[torch.optim.Optimizer]
# Returns when an optimizer may step, after blocking the thread or its stream until then.
Hold = Callable[[], None]


class Gate:
    """The snapshots that hold the steps of one optimizer. A hook calls `hold` on each thread that steps.

    `gate_of` registers the hook once, permanently: hooks that come and go defeat `torch.compile`.
    """

    def __init__(self) -> None:
        # Without a lock: Ctrl-C may end a step at any line, and a lock held at that moment would stay locked. Each
        # change of the set, and each copy of it, is one atomic call of C.
        self._pending: set[Hold] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> Gate:
        """Give a copied optimizer a new gate: the copy is for saving, and never steps."""
        return Gate()

    def close(self, hold: Hold) -> None:
        self._pending.add(hold)

    def open(self, hold: Hold) -> None:
        self._pending.discard(hold)

    def hold(self) -> None:
        for hold in list(self._pending):
            hold()


def _before_step(gate: Gate, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Hold a step: at its beginning or, if it begins with a closure, after the closure.

    A closure computes the forward and backward pass, which the copies may overlap. The step also waits for a save that
    begins in the closure. Returns other arguments for the step, or None.
    """
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure) or not _calls_closure_first(optimizer):
        gate.hold()
        return None

    def closure_then_hold() -> Any:
        result = closure()
        gate.hold()
        return result

    return (optimizer,), {**kwargs, "closure": closure_then_hold}


def _calls_closure_first(optimizer: torch.optim.Optimizer) -> bool:
    """True if the step is one of torch's own: these change nothing before they have called the closure."""
    return str(getattr(type(optimizer).step, "__module__", "")).startswith("torch.optim.")


@cache
def _untraced_hook() -> Callable[..., None]:
    """`_before_step`, excluded from torch.compile: if it were traced into the step, the compiled step would depend on
    the snapshots.

    Making it imports only modules that the constructor of an optimizer has imported already.
    """
    hook: Callable[..., None] = torch.compiler.disable(_before_step)
    return hook


_gates: weakref.WeakKeyDictionary[torch.optim.Optimizer, Gate] = weakref.WeakKeyDictionary()


def gate_of(optimizer: torch.optim.Optimizer) -> Gate:
    gate = _gates.get(optimizer)
    if gate is None:
        gate = Gate()
        optimizer.register_step_pre_hook(partial(_untraced_hook(), gate))
        _gates[optimizer] = gate  # last, so that every known gate is registered
    return gate


class FirstSteps:
    """Shows `see`, a method, the tensors of guarded optimizers before their first steps, in which most create their
    state.

    The gates own this object until it has shown that state. It keeps no optimizer alive, and never fails a step.
    """

    def __init__(self, optimizers: Optimizers, see: Callable[[list[Any]], None]) -> None:
        self._optimizers, self._see = [weakref.ref(one) for one in optimizers], weakref.WeakMethod(see)
        self._num_left = 2 * len(optimizers)  # some optimizers never have a state
        for one in optimizers:
            gate_of(one).close(self.hold)

    def hold(self) -> None:
        """Show the tensors. This does not hold the step, since `see` leaves all work to other threads."""
        with suppress(Exception):  # any error will be raised by a save
            if is_capturing():
                return
            see, optimizers = self._see(), [one for ref in self._optimizers if (one := ref()) is not None]
            self._num_left -= 1
            if see is None or self._num_left <= 0 or all(one.state for one in optimizers):
                for one in optimizers:
                    gate_of(one).open(self.hold)
            if see is not None:
                params = [p for one in optimizers for group in one.param_groups for p in group["params"]]
                see([*params, *(v for one in optimizers for state in one.state.values() for v in state.values())])


class StepBarrier:
    """Keeps the guarded optimizers from stepping until every copy of one snapshot is enqueued, and measures how long
    they wait.

    The snapshot owns it: the caller's thread closes it, the thread that copies lifts it, and steps wait on any thread.
    """

    def __init__(self, optimizers: Optimizers, clock: Clock, trace: Trace) -> None:
        self._gates = [gate_of(optimizer) for optimizer in optimizers]
        self._clock, self._trace = clock, trace
        self.seconds = 0.0  # how long steps have waited; known once the barrier is lifted
        self._waiting_since: list[float] = []
        # Only `lift` takes the lock. A step waits without a lock: Ctrl-C may end the wait at any line, and a lock held
        # at that moment would stay locked. A waiter registers by one append, and puts the token that it takes from the
        # bell back.
        self._lifting = threading.Lock()
        self.is_lifted = False
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()

    def close(self, hold: Hold) -> None:
        """Make every step call `hold` from now on."""
        for gate in self._gates:
            gate.close(hold)

    def open(self, hold: Hold) -> None:
        for gate in self._gates:
            gate.open(hold)

    def wait(self, progress: Callable[[], str]) -> None:
        """Return when the barrier is lifted."""
        with self._trace.span("guard"):
            if not self.is_lifted:
                self._waiting_since.append(self._clock())
                wait = Wait("in optimizer.step()", ENDS_THE_WAIT)
                while not self.is_lifted:
                    try:
                        self._bell.put(self._bell.get(timeout=LIVENESS_SECONDS))
                    except queue.Empty:
                        wait.goes_on(progress)

    def lift(self) -> None:
        """Let all steps continue. Idempotent."""
        with self._lifting:
            if self.is_lifted:
                return
            self.is_lifted = True
            now = self._clock()
            self.seconds = sum(now - since for since in self._waiting_since)
        self._bell.put(None)

    @property
    def holds_steps(self) -> bool:
        return bool(self._waiting_since) and not self.is_lifted


def unwrapped(guard: Any) -> Optimizers:
    """The torch optimizers that the user has passed as `guard`: one, several, containers of several, or wrappers such
    as accelerate's. A container stands for the optimizers that it steps, and for itself if it has hooks: a step of any
    of them waits.

    Raises TypeError for other values.
    """
    if guard is None:
        return ()
    several = isinstance(guard, Iterable) and not isinstance(guard, torch.optim.Optimizer)
    found: list[torch.optim.Optimizer] = []
    for wrapper in guard if several else (guard,):
        optimizer = _innermost(wrapper)
        stepped = [] if optimizer is None else all_of(optimizer)
        hooked = [one for one in stepped if _has_hooks(one)]
        if not hooked:
            raise TypeError(
                f"guard must be a torch optimizer, or several; got {type(wrapper).__qualname__}. "
                "Where no optimizer's step() changes the state, use handle.wait_staged() instead."
            )
        found += hooked
    return tuple({id(one): one for one in found}.values())


def _innermost(wrapper: Any) -> torch.optim.Optimizer | None:
    """The innermost torch optimizer of a wrapper; None if there is none.

    A wrapper may be a torch optimizer itself, as accelerate's is, and yet run no hooks.
    """
    # A scheduler has an optimizer and a step(), but that is not the optimizer's step().
    if isinstance(wrapper, torch.optim.lr_scheduler.LRScheduler):
        return None
    inner = _innermost(wrapper.optimizer) if hasattr(wrapper, "optimizer") else None
    return wrapper if inner is None and isinstance(wrapper, torch.optim.Optimizer) else inner


def _has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """True if its step() calls hooks. An optimizer that was never initialised as one has none."""
    is_hooked = getattr(type(optimizer).step, "hooked", False)
    return bool(is_hooked) and hasattr(optimizer, "_optimizer_step_pre_hooks")


def deferrable(optimizers: Optimizers, tensors: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """The tensors that may be copied after `save` has returned: large, dense tensors in an optimizer's params and
    state, or inside a wrapped tensor there.

    The result maps the number of each tensor to the optimizer's own tensor of the same memory, which may be another
    object. It is empty while a stream is captured into a graph. It has no tensor of an optimizer with `capturable`
    groups, or of a container that holds such an optimizer: replaying a graph runs no hooks. A CPU tensor in the state
    of an optimizer for a device (AdamW's `step`) is never deferred, nor is a tensor on a device without streams.
    """
    if not optimizers or is_capturing():
        return {}
    guarded: dict[int, torch.Tensor] = {}  # keyed by address: the largest tensor that begins there
    captured: set[int] = set()  # addresses that a graph may change
    for optimizer in optimizers:
        is_captured = any(group.get("capturable") for group in optimizer.param_groups)
        for tensor in _params_and_state(optimizer):
            if is_captured:
                captured.add(tensor.data_ptr())
            elif is_large(tensor) and tensor.is_contiguous():
                other = guarded.setdefault(tensor.data_ptr(), tensor)
                if other is not tensor and tensor.nbytes > other.nbytes:
                    guarded[tensor.data_ptr()] = tensor
    for address in captured:
        guarded.pop(address, None)
    return {
        i: owner
        for i, tensor in enumerate(tensors)
        # A flat buffer begins at the address of its first parameter, but has more bytes.
        if is_large(tensor)
        and (owner := guarded.get(tensor.data_ptr())) is not None
        and (tensor is owner or tensor.nbytes <= owner.nbytes)
        and is_dense(tensor)
    }


_seen_guards: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def warn_if_foreign(optimizers: Optimizers, tensors: Sequence[torch.Tensor], *, stacklevel: int) -> None:
    """Warn at the first save of a guard if the state contains no parameter or state tensor of these optimizers: then
    the call copies everything. The optimizers may have been created before the model was moved or wrapped.

    Views of the optimizers' memory count. One match is enough for all optimizers.
    """
    if not tensors or all(one in _seen_guards for one in optimizers):
        return
    _seen_guards.update(optimizers)
    guarded = {address for one in optimizers for tensor in _params_and_state(one) if (address := _memory_of(tensor))}
    if guarded and guarded.isdisjoint(map(_memory_of, tensors)):
        kinds = ", ".join(type(one).__name__ for one in optimizers)
        warnings.warn(
            f"guard={kinds}: the state has no tensor of this optimizer, so the call copies everything before it "
            "returns; give the optimizer of the model that is saved, or leave guard= out",
            RuntimeWarning,
            stacklevel=stacklevel,
        )


def _memory_of(tensor: torch.Tensor) -> int:
    """The address of the memory that a tensor lies in; 0 if it has none."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def _params_and_state(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    params = [part for group in optimizer.param_groups for p in group["params"] for part in plain_parts(p)]
    on_host = all(map(is_on_host, params))
    yield from (p for p in params if type(p) in (torch.Tensor, torch.nn.Parameter) and has_plain_bytes(p))
    for state in optimizer.state.values():
        values = state.values() if isinstance(state, dict) else ()
        for part in (part for value in values if isinstance(value, torch.Tensor) for part in plain_parts(value)):
            if type(part) is torch.Tensor and (on_host or device_of(part) is not None):
                yield part


def is_large(tensor: torch.Tensor) -> bool:
    """True for a strided tensor that is large enough to be deferred."""
    return tensor.layout is torch.strided and tensor.nbytes >= DEFERRED_BYTES


class _InheritedGuard:
    """Represents the checkpointer's guard in the signature of `save`."""

    def __repr__(self) -> str:
        return "that of the checkpointer"


INHERITED: Any = _InheritedGuard()


def refuse_guard(completions: Collection[object], guard: Any) -> None:
    """Raises ValueError for a guard in addition to held snapshots, which are copied already."""
    if completions and guard:
        raise ValueError(
            "guard= belongs in the call of snapshot(), which is already done; leave it out here, even if the "
            "snapshot is only a part of the state"
        )
