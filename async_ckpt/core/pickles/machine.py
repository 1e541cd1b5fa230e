"""The machine that runs pickles: a stack with marks, and a memo. Nothing that a program names is created.

In: a program. Out: the object that its last instruction leaves on the stack. Knows nothing of: the classes of objects.

Numbers, texts, lists and tuples are represented by themselves on the stack; for everything else (a name, a call, a
dict), subclasses choose a representation. The time is linear in the size of the program, with one Python call for each
instruction, which reads its argument in place (`pickletools.genops`, with which the tests compare the table, takes ten
times as long). A `Recorder` records the structure of each object.

The instructions are those of https://docs.python.org/3/library/pickletools.html that `torch.save` and
torch.distributed.checkpoint write, in protocols 2 to 5.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Final, NoReturn

_CODES: Final = {opcode.name: ord(opcode.code) for opcode in pickletools.opcodes}
_NAMES: Final = {code: name for name, code in _CODES.items()}


class PickleMachine:
    """The base class of the interpreters. An instance runs one program, once."""

    accepted: ClassVar[frozenset[str]]  # the names of the allowed instructions
    protocols: ClassVar[range]

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._below: list[list[Any]] = []  # for each mark, the stack below it
        self._memo: dict[int, Any] = {}

    def __init_subclass__(cls) -> None:
        cls._steps = [_refuse] * 256
        for name in cls.accepted:
            cls._steps[_CODES[name]] = _STEPS[name]

    _steps: ClassVar[list[Callable[[PickleMachine, bytes, int], int]]]

    def follow(self, program: bytes) -> Any:
        """Run a program, and return the top of its stack at the end. Raises ValueError for a malformed program."""
        steps, at, end = self._steps, 0, len(program)
        try:
            while at < end:
                code = program[at]
                if code == _STOP:
                    return self.stack.pop()
                at = steps[code](self, program, at + 1)
        except (LookupError, struct.error) as error:  # the stack or the memo lacks an operand
            raise ValueError(f"it is malformed ({type(error).__name__}: {error!s:.200})") from error
        raise ValueError("it does not end")

    # --- for subclasses ---------------------------------------------------------------------------------------

    def refuse(self, instruction: str) -> NoReturn:
        """Raise an error for an instruction that is not accepted. `instruction` is its name, or its code if unknown."""
        raise ValueError(f"it has the instruction {instruction}")

    def find_global(self, module: str, name: str) -> Any:
        """The value that represents a class or function."""
        raise NotImplementedError

    def call(self, function: Any, arguments: Any) -> Any:
        """The value that represents the result of a call, or an instance of a class."""
        raise NotImplementedError

    def set_state(self, target: Any, state: Any) -> None:
        """Set the attributes of an object, which stays on the stack."""
        raise NotImplementedError

    def persistent_load(self, key: Any) -> Any:
        """The value that represents an object outside of the pickle."""
        raise NotImplementedError

    def empty_dict(self) -> Any:
        raise NotImplementedError

    def empty_set(self) -> Any:
        raise NotImplementedError

    def set_items(self, into: Any, items: list[Any]) -> None:
        """Add alternating keys and values to a dict."""
        raise NotImplementedError

    def make_tuple(self, items: Iterable[Any]) -> Any:
        return tuple(items)

    def append(self, into: Any, items: list[Any]) -> None:
        if type(into) is not list:
            raise ValueError("it appends to an object that is not a list")
        into += items

    # --- the stack --------------------------------------------------------------------------------------------

    def pop(self, num: int) -> list[Any]:
        items = self.stack[-num:]
        if len(items) < num:
            raise ValueError("its stack is empty")
        del self.stack[-num:]
        return items

    def pop_mark(self) -> list[Any]:
        items, self.stack = self.stack, self._below.pop()
        return items

    def memoize(self, number: int | None = None) -> None:
        self._memo[len(self._memo) if number is None else number] = self.stack[-1]

    def recall(self, number: int) -> None:
        self.stack.append(self._memo[number])

    def mark(self) -> None:
        self._below.append(self.stack)
        self.stack = []


# --- instructions: each reads its argument at `at`, and returns the offset of the next instruction ------------------

_Step = Callable[[PickleMachine, bytes, int], int]
_STOP: Final = _CODES["STOP"]


def _refuse(machine: PickleMachine, program: bytes, at: int) -> int:
    code = program[at - 1]
    machine.refuse(_NAMES.get(code, f"{code:#x}"))


def _constant(value: Any) -> _Step:
    def step(machine: PickleMachine, program: bytes, at: int) -> int:  # noqa: ARG001
        machine.stack.append(value)
        return at

    return step


def _unsigned(size: int, act: Callable[[PickleMachine, int], None]) -> _Step:
    def step(machine: PickleMachine, program: bytes, at: int) -> int:
        act(machine, int.from_bytes(program[at : at + size], "little"))
        return at + size

    return step


def _sized(size: int, value_of: Callable[[bytes], Any]) -> _Step:
    """Push a value that is preceded by its length, a number of `size` bytes."""

    def step(machine: PickleMachine, program: bytes, at: int) -> int:
        begin = at + size
        end = begin + int.from_bytes(program[at:begin], "little")
        if end > len(program):
            raise ValueError("it is cut off")
        machine.stack.append(value_of(program[begin:end]))
        return end

    return step


def _effect(act: Callable[[PickleMachine], None]) -> _Step:
    def step(machine: PickleMachine, program: bytes, at: int) -> int:  # noqa: ARG001
        act(machine)
        return at

    return step


def _result(make: Callable[[PickleMachine], Any]) -> _Step:
    def step(machine: PickleMachine, program: bytes, at: int) -> int:  # noqa: ARG001
        value = make(machine)  # first: it may replace the stack
        machine.stack.append(value)
        return at

    return step


def _byte(machine: PickleMachine, program: bytes, at: int) -> int:
    machine.stack.append(program[at])
    return at + 1


def _number(layout: str) -> _Step:
    number = struct.Struct(layout)
    read, size = number.unpack_from, number.size

    def step(machine: PickleMachine, program: bytes, at: int) -> int:
        machine.stack += read(program, at)
        return at + size

    return step


def _put_byte(machine: PickleMachine, program: bytes, at: int) -> int:
    machine._memo[program[at]] = machine.stack[-1]
    return at + 1


def _protocol(machine: PickleMachine, program: bytes, at: int) -> int:
    if program[at] not in machine.protocols:
        raise ValueError(f"it is of protocol {program[at]}")
    return at + 1


def _global(machine: PickleMachine, program: bytes, at: int) -> int:
    """Push a class or function, named by two lines: its module and its name."""
    middle = program.index(b"\n", at)
    end = program.index(b"\n", middle + 1)
    machine.stack.append(
        machine.find_global(program[at:middle].decode("ascii"), program[middle + 1 : end].decode("ascii"))
    )
    return end + 1


def _stack_global(machine: PickleMachine) -> Any:
    module, name = machine.pop(2)
    if type(module) is not str or type(name) is not str:
        raise ValueError("it refers to an object without a name")
    return machine.find_global(module, name)


def _append(machine: PickleMachine, items: list[Any]) -> None:
    machine.append(machine.stack[-1], items)


def _set_items(machine: PickleMachine, items: list[Any]) -> None:
    machine.set_items(machine.stack[-1], items)


def _build(machine: PickleMachine) -> None:
    (state,) = machine.pop(1)
    machine.set_state(machine.stack[-1], state)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _signed(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


_STEPS: Final[dict[str, _Step]] = {
    "NONE": _constant(None),
    "NEWTRUE": _constant(True),
    "NEWFALSE": _constant(False),
    "BININT": _number("<i"),
    "BININT1": _byte,
    "BININT2": _number("<H"),
    "LONG1": _sized(1, _signed),
    "LONG4": _sized(4, _signed),
    "BINFLOAT": _number(">d"),
    "BINUNICODE": _sized(4, _text),
    "SHORT_BINUNICODE": _sized(1, _text),
    "BINUNICODE8": _sized(8, _text),
    "SHORT_BINSTRING": _sized(1, lambda data: data.decode("latin-1")),
    "BINBYTES": _sized(4, bytes),
    "SHORT_BINBYTES": _sized(1, bytes),
    "EMPTY_LIST": _result(lambda _machine: []),
    "EMPTY_DICT": _result(lambda machine: machine.empty_dict()),
    "EMPTY_SET": _result(lambda machine: machine.empty_set()),
    "EMPTY_TUPLE": _constant(()),
    "TUPLE": _result(lambda machine: machine.make_tuple(machine.pop_mark())),
    "TUPLE1": _result(lambda machine: machine.make_tuple(machine.pop(1))),
    "TUPLE2": _result(lambda machine: machine.make_tuple(machine.pop(2))),
    "TUPLE3": _result(lambda machine: machine.make_tuple(machine.pop(3))),
    "APPEND": _effect(lambda machine: _append(machine, machine.pop(1))),
    "APPENDS": _effect(lambda machine: _append(machine, machine.pop_mark())),
    "SETITEM": _effect(lambda machine: _set_items(machine, machine.pop(2))),
    "SETITEMS": _effect(lambda machine: _set_items(machine, machine.pop_mark())),
    "MARK": _effect(PickleMachine.mark),
    "MEMOIZE": _effect(PickleMachine.memoize),
    "BINPUT": _put_byte,
    "LONG_BINPUT": _unsigned(4, PickleMachine.memoize),
    "BINGET": _unsigned(1, PickleMachine.recall),
    "LONG_BINGET": _unsigned(4, PickleMachine.recall),
    "GLOBAL": _global,
    "STACK_GLOBAL": _result(_stack_global),
    "REDUCE": _result(lambda machine: machine.call(*machine.pop(2))),
    "NEWOBJ": _result(lambda machine: machine.call(*machine.pop(2))),
    "BUILD": _effect(_build),
    "BINPERSID": _result(lambda machine: machine.persistent_load(*machine.pop(1))),
    "PROTO": _protocol,
    "FRAME": lambda _machine, _program, at: at + 8,
    "STOP": lambda _machine, _program, at: at,  # never called: the loop ends before it
}
# LONG4 is an integer of hundreds of digits, which no reader here accepts as plain data.
ALL: Final = frozenset(_STEPS) - {"LONG4"}
# The instructions that `torch.save` writes by default, and the only ones that its weights-only reader accepts.
PROTOCOL_2: Final = ALL - {
    "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "MEMOIZE", "STACK_GLOBAL", "FRAME"
}  # fmt: skip


# --- the operations that would create pickled objects, recorded instead of performed -------------------------------


class UnknownInstructionError(Exception):
    """The program has an instruction that the machine does not know."""


class Recorded:
    """The result of an operation on values of the stack, and the items that were added to it later."""

    __slots__ = ("operation", "parts")

    def __init__(self, operation: str, parts: Iterable[Any] = ()) -> None:
        self.operation, self.parts = operation, [*parts]


class Recorder(PickleMachine):
    """Interprets a pickle, and records the operations that would create each object."""

    accepted: ClassVar = ALL
    protocols: ClassVar = range(2, 6)

    def refuse(self, instruction: str) -> NoReturn:
        raise UnknownInstructionError(instruction)

    def find_global(self, module: str, name: str) -> Recorded:
        return Recorded("name", [f"{module}.{name}"])

    def call(self, function: Any, arguments: Any) -> Recorded:
        return Recorded("call", [function, arguments])

    def set_state(self, target: Any, state: Any) -> None:
        target.parts += [Recorded("state"), state]

    def persistent_load(self, key: Any) -> Recorded:
        return Recorded("storage", key)

    def empty_dict(self) -> Recorded:
        return Recorded("dict")

    def empty_set(self) -> Recorded:
        return Recorded("set")

    def set_items(self, into: Any, items: list[Any]) -> None:
        into.parts += items

    def append(self, into: Any, items: list[Any]) -> None:
        (into.parts if isinstance(into, Recorded) else into).extend(items)
