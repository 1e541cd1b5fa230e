"""An accelerator in Python, whose memory is the host's: `device="sim:0"`, `"sim:1"`, and torch's operations on them.

It is a PrivateUse1 backend, as torch knows those of other makers, and has what such a one publishes: `torch.sim` with
`Stream`, `Event`, `current_stream`, `stream`, `device`, `simrt()`. Every operation is enqueued on the current stream,
and runs when the schedule says so (`sim_streams`). Memory that is freed is poisoned, and lent again as a caching
allocator would. `SIM` is told to refuse memory or pinning, and to break.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from sim_streams import Access, Mark, Queue, Scheduler
from torch.utils import _pytree as pytree
from torch.utils import backend_registration

NUM_DEVICES = 2
_ARENA_BYTES = 2 << 30  # of addresses; memory is taken as it is written to
_ALIGNMENT = 512
_POISON = 0xDB
_TYPE = int(torch._C._autograd.DeviceType.PrivateUse1)  # type: ignore[attr-defined]
_REFUSED = 1  # of cudaHostRegister: invalid value
_NOT_REGISTERED = 713


# --- memory ----------------------------------------------------------------------------------------------------


class _Block:
    """Memory that is lent, or was."""

    def __init__(self, address: int, num_bytes: int, home: Queue) -> None:
        self.address, self.num_bytes, self.home = address, num_bytes, home
        self.used_by: set[Queue] = set()  # other streams, by record_stream
        self.is_lent = True
        self.instead: _Block | None = None  # what its storage was given when it was resized


class Memory:
    """The memory of one device. What is freed is lent again at once to the stream that it was allocated on.

    To others, and where `record_stream` has named others, once these have done what was enqueued there by then.
    """

    def __init__(self, device: int, scheduler: Scheduler) -> None:
        self.device, self._scheduler = device, scheduler
        self._map = mmap.mmap(-1, _ARENA_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._map.madvise(mmap.MADV_DONTFORK)
        self.begin = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.blocks: dict[int, _Block] = {}
        self.freed: deque[_Block] = deque()  # by destructors, which run anywhere
        self.restart()

    def restart(self) -> None:
        """Of what was lent only what is still held is known; the rest is taken anew."""
        while self.freed:
            self.freed.popleft().is_lent = False
        self.blocks = {at: block for at, block in self.blocks.items() if block.is_lent}
        self._gaps = list(self._between_blocks())
        for begin, end in self._gaps:
            first, last = _page_after(begin - self.begin), (end - self.begin) // mmap.PAGESIZE * mmap.PAGESIZE
            if first < last:
                self._map.madvise(mmap.MADV_DONTNEED, first, last - first)
        self._free: dict[tuple[int, int], list[_Block]] = {}
        self._waiting: list[tuple[_Block, list[Mark]]] = []
        for address in self.blocks:
            self._scheduler.know_block(address)
        self.lent_bytes = self.most_bytes = sum(block.num_bytes for block in self.blocks.values())
        self.limit_bytes: int | None = None
        self.refuse: set[int] = set()  # which of the next allocations fail
        self.num_allocations = 0

    def allocate(self, num_bytes: int, home: Queue) -> _Block:
        with self._scheduler.changed:
            self.settle()
            self._scheduler.check(self.device)
            if not num_bytes:  # takes no memory
                nothing = _Block(self.begin, 0, home)
                nothing.is_lent = False
                return nothing
            self.num_allocations += 1
            size = -(-max(1, num_bytes) // _ALIGNMENT) * _ALIGNMENT
            full = self.limit_bytes is not None and self.lent_bytes + size > self.limit_bytes
            if full or self.num_allocations in self.refuse:
                raise torch.OutOfMemoryError(f"simulated device {self.device} has no {size:,} bytes left")
            free = self._free.get((home.number, size))
            if free:
                block = free.pop()
                block = _Block(block.address, size, home)  # another, to whoever frees it
                self.blocks[block.address] = block
            else:
                block = _Block(self._take(size), size, home)
                self.blocks[block.address] = block
                self._scheduler.know_block(block.address)
            self.lent_bytes += size
            self.most_bytes = max(self.most_bytes, self.lent_bytes)
            return block

    def settle(self) -> None:
        """Take back what destructors have freed, and what other streams do not use any more."""
        while self.freed:
            self.free(self.freed.popleft())
        for block, marks in list(self._waiting):
            if all(mark.is_reached() for mark in marks):
                for mark in marks:
                    self._scheduler._see(mark)
                self._waiting.remove((block, marks))
                self._lend_again(block)

    def free(self, block: _Block) -> None:
        if block.instead is not None:
            self.free(block.instead)
        if not block.is_lent:  # its storage was resized
            return
        block.is_lent = False
        self.lent_bytes -= block.num_bytes
        if self.device in self._scheduler.broken:
            return
        if block.used_by:
            with self._scheduler.changed:
                self._waiting.append((block, [self._scheduler.mark(queue) for queue in block.used_by]))
                self._scheduler.num_operations -= len(block.used_by)  # destructors run when they like
        else:
            self._lend_again(block)

    def _lend_again(self, block: _Block) -> None:
        """Whoever has it next writes to it, in the order of its stream."""
        if self.device in self._scheduler.broken:
            return
        begin, length = block.address, block.num_bytes
        access = Access(begin, begin + length, is_write=True)
        with self._scheduler.changed:
            self._scheduler.enqueue(
                block.home, lambda: _poison(begin, length), [access], f"reuse of {length:,} freed bytes"
            )
            self._scheduler.num_operations -= 1  # nobody has enqueued it
        self._free.setdefault((block.home.number, length), []).append(block)

    def _between_blocks(self) -> Iterator[tuple[int, int]]:
        """Addresses in which nothing is lent."""
        begin = self.begin
        for address in sorted(self.blocks):
            if begin < address:
                yield begin, address
            begin = address + self.blocks[address].num_bytes
        yield begin, self.begin + _ARENA_BYTES

    def _take(self, num_bytes: int) -> int:
        """Memory that nobody has had since the start."""
        for number, (begin, end) in enumerate(self._gaps):
            if end - begin >= num_bytes:
                self._gaps[number] = (begin + num_bytes, end)
                return begin
        raise AssertionError("the arena is too small for this test")

    def block_at(self, address: int) -> _Block | None:
        return self.blocks.get(address)


def _page_after(offset: int) -> int:
    return -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE


def _poison(address: int, num_bytes: int) -> None:
    ctypes.memset(address, _POISON, num_bytes)


# --- tensors with memory of ours, by DLPack --------------------------------------------------------------------


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.c_void_p), ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


class _Managed(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = (("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))
_K_EXT_DEV = 12  # what torch calls PrivateUse1
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_given_out: dict[int, Any] = {}
_ended: deque[Any] = deque(maxlen=10_000)  # is read by torch a little longer


@_Deleter
def _delete(
    managed: Any, given_out: dict[int, Any] = _given_out, ended: deque[Any] = _ended, address_of: Any = ctypes.addressof
) -> None:
    """At the interpreter's end tensors go after the names of this module."""
    given = given_out.pop(address_of(managed.contents))
    given[0].freed.append(given[1])
    ended.append(given)


ctypes.pythonapi.Py_IncRef(ctypes.py_object(_delete))  # tensors may outlive this module


def _bytes_in(block: _Block, num_bytes: int, device: int) -> torch.Tensor:
    managed, shape = _Managed(), (ctypes.c_int64 * 1)(num_bytes)
    told = managed.tensor
    told.data, told.device_type, told.device_id, told.ndim = block.address, _K_EXT_DEV, device, 1
    told.code, told.bits, told.lanes, told.shape = 1, 8, 1, shape
    managed.deleter = _delete
    at = ctypes.addressof(managed)
    _given_out[at] = (SIM.memories[device], block, managed, shape)
    return torch._C._from_dlpack(_new_capsule(at, b"dltensor", None))


def seen_from_host(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, as a tensor on the host; it keeps nothing alive. A conjugated or negated view is one there, too."""
    if tensor.device.type != "sim":
        return tensor
    host = _bits_from_host(tensor)
    host = torch.conj(host) if tensor.is_conj() else host
    return torch._neg_view(host) if tensor.is_neg() else host


def _bits_from_host(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    num_bytes = storage.nbytes()
    if not num_bytes:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
    memory = (ctypes.c_ubyte * num_bytes).from_address(storage.data_ptr())
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    host = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return host.set_(flat.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    if not tensor.numel():
        return 0, 0
    items = 1 + sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + items * tensor.element_size()


# --- what such a backend publishes, as torch.sim ---------------------------------------------------------------


class Stream(torch.Stream):
    """A stream of its own; those of the test are `SIM.stream()`."""

    queue: Queue

    def __new__(cls, device: Any = None, *, queue: Queue | None = None) -> Stream:
        index = _index(device)
        queue = queue or SIM.scheduler.new_queue(index, of_training=False)
        made = super().__new__(cls, stream_id=queue.number, device_index=index, device_type=_TYPE)
        made.queue = queue
        return made

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> Stream:
        """Make it the current one, as torch's own do from 2.7 on."""
        thread, index = SIM.thread, self.queue.device
        thread.left.append((index, thread.streams.get(index), thread.device))
        thread.streams[index], thread.device = self, index
        return self

    def __exit__(self, *_: object) -> None:
        index, before, SIM.thread.device = SIM.thread.left.pop()
        if before is None:
            del SIM.thread.streams[index]
        else:
            SIM.thread.streams[index] = before

    def wait_event(self, event: Event) -> None:
        if event.mark is not None:
            SIM.scheduler.wait_in(self.queue, event.mark)

    def wait_stream(self, other: Stream) -> None:
        SIM.scheduler.wait_in(self.queue, SIM.scheduler.mark(other.queue))

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return SIM.scheduler.is_reached(SIM.scheduler.mark(self.queue))

    def synchronize(self) -> None:
        SIM.scheduler.wait(SIM.scheduler.mark(self.queue))


class Event:
    """A point in a stream."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.timed = enable_timing
        self.mark: Mark | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.mark = SIM.scheduler.mark((stream or current_stream()).queue)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        return self.mark is None or SIM.scheduler.is_reached(self.mark)

    def synchronize(self) -> None:
        if self.mark is not None:
            SIM.scheduler.wait(self.mark)

    def elapsed_time(self, end: Event) -> float:
        assert self.timed
        assert end.timed
        assert self.mark is not None
        assert end.mark is not None
        if not (self.mark.is_reached() and end.mark.is_reached()):
            raise RuntimeError("CUDA error: device not ready (simulated)")
        return (end.mark.seconds - self.mark.seconds) * 1e3


class _Thread(threading.local):
    device = 0

    def __init__(self) -> None:
        self.streams: dict[int, Stream] = {}
        self.left: list[tuple[int, Stream | None, int]] = []  # what is current again after a stream is


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return SIM.thread.device if index is None else index


def current_stream(device: Any = None) -> Stream:
    index = _index(device)
    return SIM.thread.streams.get(index) or SIM.default_stream(index)


class Runtime:
    """What page-locks memory of the host: `simrt()`, after `cudart()` and `npurt()`."""

    def simHostRegister(self, address: int, num_bytes: int, flags: int = 0) -> int:  # noqa: N802
        if SIM.refuses_pinning:
            return _REFUSED
        with SIM.scheduler.changed:
            SIM.scheduler.check(SIM.thread.device)
            SIM.registered[address] = num_bytes
            SIM.num_registrations += 1
            SIM.scheduler.know_block(address)
        return 0

    def simHostUnregister(self, address: int) -> int:  # noqa: N802
        SIM.scheduler.check_process()
        if SIM.scheduler.broken:
            raise RuntimeError("CUDA error: device-side assert triggered (simulated)")
        with SIM.scheduler.changed:
            return 0 if SIM.registered.pop(address, None) else _NOT_REGISTERED


def _hook() -> Any:
    """Whom torch.accelerator asks."""

    class Hook(torch._C._acc.PrivateUse1Hooks):  # type: ignore[name-defined,misc]
        def is_available(self) -> bool:
            return SIM.is_here

        def has_primary_context(self, dev_id: int) -> bool:
            return SIM.is_here

        def is_built(self) -> bool:
            return True

    return Hook()


class Module:
    """`torch.sim`."""

    Stream, Event = Stream, Event
    current_stream = staticmethod(current_stream)

    def is_initialized(self) -> bool:
        return SIM.is_here

    def is_available(self) -> bool:
        return SIM.is_here

    def _is_in_bad_fork(self) -> bool:
        return SIM.is_here and not SIM.scheduler.belongs_here

    def device_count(self) -> int:
        return NUM_DEVICES if SIM.is_here else 0

    def current_device(self) -> int:
        SIM.scheduler.check_process()
        return SIM.thread.device

    def set_device(self, device: Any) -> None:
        SIM.thread.device = _index(device)

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before, SIM.thread.device = SIM.thread.device, _index(device)
        try:
            yield
        finally:
            SIM.thread.device = before

    def stream(self, stream: Stream) -> Stream:
        return stream

    def synchronize(self, device: Any = None) -> None:
        index = _index(device)
        for queue in SIM.scheduler.queues:
            if queue.device == index:
                SIM.scheduler.wait(SIM.scheduler.mark(queue))

    def simrt(self) -> Runtime:
        return Runtime()

    def manual_seed_all(self, seed: int) -> None:
        for generator in SIM.generators:
            generator.manual_seed(seed)

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        SIM.scheduler.check_process()
        return SIM.generators[_index(device)].get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        SIM.generators[_index(device)].set_state(state)


# --- torch's operations ----------------------------------------------------------------------------------------

_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_VIEWS = {
    "aten::as_strided", "aten::view", "aten::_reshape_alias", "aten::set_.source_Storage_storage_offset",
    "aten::set_.source_Storage", "aten::set_.source_Tensor", "aten::unfold", "aten::view_as_real", "aten::view_as_complex",
}  # fmt: skip


def _empty(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: Any) -> torch.Tensor:
    index = _index(device)
    items = 0 if 0 in size else 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    num_bytes = items * dtype.itemsize
    block = SIM.memories[index].allocate(num_bytes, current_stream(index).queue)
    with torch._C._AutoDispatchBelowAutograd():  # type: ignore[attr-defined]
        return _bytes_in(block, num_bytes, index).view(dtype).as_strided(size, stride)


def _dispatch(op: Any, *args: Any, **kwargs: Any) -> Any:
    name = op.name()
    if name in _VIEWS:
        return op.redispatch(_CPU, *args, **kwargs)
    if name == "aten::empty.memory_format":
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        stride = torch.empty(args[0], device="meta").stride()
        return _empty(args[0], stride, dtype, kwargs.get("device"))
    if name == "aten::empty_strided":
        return _empty(args[0], args[1], kwargs.get("dtype") or torch.get_default_dtype(), kwargs.get("device"))
    if name == "aten::_copy_from":
        return _copy(args[0], args[1], args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    if name == "aten::record_stream":
        return SIM.record_stream(*args)
    if name == "aten::_local_scalar_dense":
        return _on_host(args[0]).item()
    if name == "aten::equal":
        return torch.equal(_on_host(args[0]), _on_host(args[1]))
    return _enqueue(op, args, kwargs)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Its values, waited for."""
    if tensor.device.type != "sim":
        return tensor
    queue = current_stream(tensor.device).queue
    SIM.scheduler.enqueue(queue, None, [Access(*_span(tensor), is_write=False)], "read")
    SIM.scheduler.wait(SIM.scheduler.mark(queue))
    return seen_from_host(tensor)


def _copy(source: torch.Tensor, target: torch.Tensor, non_blocking: bool) -> torch.Tensor:
    device = target.device if target.device.type == "sim" else source.device
    queue = current_stream(device).queue
    waits = False
    if target.device.type != "sim":
        # As CUDA's driver has it: a copy to pageable memory has ended when the call returns.
        waits = not (non_blocking and SIM.is_registered(target))
    elif source.device.type != "sim" and not (non_blocking and SIM.is_registered(source)):
        source = source.clone()  # pageable memory is read before the call returns
    into, of = seen_from_host(target), seen_from_host(source)
    accesses = [Access(*_span(source), is_write=False), Access(*_span(target), is_write=True)]
    SIM.settle()
    SIM.copies.append((source.device.type, target.device.type, target.numel() * target.element_size()))
    other = source.device if source.device.type == "sim" and source.device != device else None
    if other is not None:  # after what both streams have enqueued, and before what they will
        SIM.scheduler.wait_in(queue, SIM.scheduler.mark(current_stream(other).queue))
    SIM.scheduler.enqueue(queue, lambda: _assign(into, of), accesses, "copy")
    if other is not None:
        SIM.scheduler.wait_in(current_stream(other).queue, SIM.scheduler.mark(queue))
    if waits:
        SIM.scheduler.wait(SIM.scheduler.mark(queue))
    return target


def _assign(into: torch.Tensor, of: torch.Tensor) -> None:
    with torch.inference_mode():
        into.copy_(of)


def _enqueue(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Any other operation: done on the host's view of the memory, later; what it makes is allocated now."""
    everything: list[Any] = pytree.tree_leaves((args, kwargs))
    tensors = [leaf for leaf in everything if isinstance(leaf, torch.Tensor)]
    given = [t.device for t in tensors if t.device.type == "sim"]
    device = given[0] if given else torch.device("sim", _index(kwargs.get("device")))
    names = [argument.name for argument in op._schema.arguments]
    bound = dict(zip(names, args, strict=False)) | kwargs
    written = [
        leaf
        for argument in op._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
        for leaf in pytree.tree_leaves(bound.get(argument.name))
        if isinstance(leaf, torch.Tensor)
    ]
    SIM.settle()
    if written:
        made, outputs = None, written
        if ".out" in op.name() or op.name().endswith("_out"):
            _resize(op, bound, written)
    else:
        to_meta = _each_tensor(lambda t: torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="meta"))
        try:
            meta = op(*pytree.tree_map(to_meta, args), **pytree.tree_map(to_meta, _with_device(kwargs, "meta")))
        except NotImplementedError:  # its size is in the values
            waited = pytree.tree_map(_each_tensor(_on_host), (args, _with_device(kwargs, "cpu")))
            return pytree.tree_map(_each_tensor(lambda t: t.to(device)), op(*waited[0], **waited[1]))
        made = pytree.tree_map(_each_tensor(lambda t: _empty(t.size(), t.stride(), t.dtype, device)), meta)
        outputs = pytree.tree_leaves(made)
    is_output = {id(tensor) for tensor in outputs}
    accesses = [Access(*_span(t), is_write=False) for t in tensors if id(t) not in is_output]
    accesses += [Access(*_span(t), is_write=True) for t in outputs]
    on_host = pytree.tree_map(_each_tensor(seen_from_host), (args, _with_device(kwargs, "cpu")))
    into = [seen_from_host(tensor) for tensor in outputs]
    if "generator" in names:
        on_host[1]["generator"] = SIM.generators[device.index or 0]

    def run() -> None:
        with torch.inference_mode():
            found = op(*on_host[0], **on_host[1])
            if made is not None:
                for target, value in zip(into, pytree.tree_leaves(found), strict=True):
                    target.copy_(value)

    queue = current_stream(device).queue
    if "generator" in names:  # numbers are drawn in the order of the calls
        drawn = torch.empty_like(into[0])
        op(drawn, *args[1:], **on_host[1])
        SIM.scheduler.enqueue(queue, lambda: _assign(into[0], drawn), accesses, op.name())
    else:
        SIM.scheduler.enqueue(queue, run, accesses, op.name())
    if made is not None:
        return made
    returned = [argument.name for argument in op._schema.arguments if argument.alias_info is not None]
    if len(op._schema.returns) > 1:
        return tuple(bound[name] for name in returned)
    return bound[returned[0]] if op._schema.returns else None


def _resize(op: Any, bound: dict[str, Any], outs: list[torch.Tensor]) -> None:
    """What an operation writes to is given memory if it has none."""
    if len(outs) != 1 or outs[0].numel():
        return
    others = {k: v for k, v in bound.items() if k != "out"}
    to_meta = _each_tensor(lambda t: torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="meta"))
    out = torch.empty(0, dtype=outs[0].dtype, device="meta")
    op(**pytree.tree_map(to_meta, others), out=out)
    if out.numel():
        memory = _empty(out.size(), out.stride(), out.dtype, outs[0].device)
        outs[0].set_(memory.untyped_storage(), 0, out.size(), out.stride())


def _each_tensor(change: Any) -> Any:
    return lambda leaf: change(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _with_device(kwargs: dict[str, Any], device: str) -> dict[str, Any]:
    return {**kwargs, "device": torch.device(device)} if "device" in kwargs else dict(kwargs)


# --- the device as a test sees it -------------------------------------------------------------------------------


class Simulation:
    """What a test tells the devices, and asks them."""

    def __init__(self) -> None:
        self.is_here = False  # for torch; the tests of a process without an accelerator come before and after
        self.scheduler = Scheduler()
        self.memories = [Memory(device, self.scheduler) for device in range(NUM_DEVICES)]
        self.registered: dict[int, int] = {}
        self.num_registrations = 0
        self.reset("early")

    def reset(self, schedule: str | int) -> None:
        """Devices as new ones; but for the library's streams, registered memory and tensors that are still held."""
        self.scheduler.restart(schedule)
        self._defaults: dict[int, Stream] = {}
        for memory in self.memories:
            memory.restart()
        for address in self.registered:
            self.scheduler.know_block(address)
        self.thread = _Thread()
        self._resized: dict[int, Any] = {}  # the first block of storages, which their destructors free
        self.refuses_pinning = False
        self.copies: list[tuple[str, str, int]] = []
        self.generators = [torch.Generator().manual_seed(7 + device) for device in range(NUM_DEVICES)]

    def default_stream(self, index: int) -> Stream:
        with self.scheduler.changed:
            if index not in self._defaults:
                self._defaults[index] = self.stream(index)
            return self._defaults[index]

    def stream(self, device: Any = 0) -> Stream:
        """A stream of the training's."""
        return Stream(device, queue=self.scheduler.new_queue(_index(device), of_training=True))

    def settle(self) -> None:
        with self.scheduler.changed:
            for memory in self.memories:
                memory.settle()

    def is_registered(self, tensor: torch.Tensor) -> bool:
        begin, end = _span(tensor)
        with self.scheduler.changed:
            touched = [(at, at + n) for at, n in self.registered.items() if at < end and begin < at + n]
        if touched and not (touched[0][0] <= begin and end <= touched[0][1]):
            raise RuntimeError("CUDA error: invalid argument: a copy crosses the end of registered memory")
        return bool(touched)

    def record_stream(self, tensor: torch.Tensor, stream: torch.Stream) -> None:
        block = self.memories[tensor.device.index].block_at(tensor.untyped_storage().data_ptr())
        queue = next(q for q in self.scheduler.queues if q.number == stream.stream_id)
        if block is not None and queue is not block.home:
            block.used_by.add(queue)

    def resize(self, tensor: torch.Tensor, num_bytes: int) -> None:
        """What `untyped_storage().resize_()` does where a backend in C++ stands behind it."""
        storage, memory = tensor.untyped_storage(), self.memories[tensor.device.index]
        words = (ctypes.c_size_t * 12).from_address(storage._cdata)
        block = self._resized.setdefault(storage._cdata, memory.blocks.get(storage.data_ptr()))
        memory.free(block)
        block.instead = memory.allocate(num_bytes, current_stream(tensor.device).queue) if num_bytes else None
        fresh = block.instead.address if block.instead is not None else 0
        for at, word in zip(_storage_words(), (fresh, num_bytes), strict=True):
            words[at] = word
        assert (storage.data_ptr(), storage.nbytes()) == (fresh, num_bytes)

    def break_down(self, device: int = 0) -> None:
        self.scheduler.break_down(device)

    @property
    def races(self) -> list[str]:
        return self.scheduler.races


@functools.cache
def _storage_words() -> tuple[int, int]:
    """Where a storage of torch's keeps its address, and its size."""
    storage = torch.empty(12345, dtype=torch.uint8, device="cpu").untyped_storage()
    words = list((ctypes.c_size_t * 12).from_address(storage._cdata))
    return words.index(storage.data_ptr()), words.index(12345)


SIM = Simulation.__new__(Simulation)
_libraries: list[torch.library.Library] = []


def is_possible() -> bool:
    """False for a torch that takes no accelerator written in Python."""
    return hasattr(backend_registration, "_setup_privateuseone_for_python_backend")


def install() -> Simulation:
    """Have this process know the device. Once; there is no way back. A process that runs a backward installs it before.

    It `is_here` only while a test says so: at any other time torch has no accelerator available.
    """
    if not _libraries:
        SIM.__init__()  # type: ignore[misc]
        backend_registration._setup_privateuseone_for_python_backend("sim", backend_module=Module(), hook=_hook())
        _libraries.extend((torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")))
        _libraries[0].fallback(_dispatch, "PrivateUse1")
        # A view that is conjugated or negated comes as it is: torch would make it a plain one first, by a copy.
        for key in ("Conjugate", "Negative"):
            _libraries[1].impl("_copy_from", torch.library.fallthrough_kernel, key)
    return SIM
