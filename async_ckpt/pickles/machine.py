"""The machine that a pickle is a program for: a stack, marks in it, and a memo. Nothing that a program names is made.

In: a program. Out: what its last instruction leaves on the stack. Knows nothing of: what the objects are.

Numbers, texts, lists and tuples are themselves. For everything else subclasses decide what stands on the stack: for a name,
a call, a dict. The time is linear in the program: one Python call for an instruction, whose argument is read in place
(`pickletools.genops`, which the table is checked against in the tests, takes ten times as long).
The instructions are those of https://docs.python.org/3/library/pickletools.html that `torch.save` and
torch.distributed.checkpoint write, of protocols 2 to 5.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Final, NoReturn

_INT32: Final = struct.Struct("<i").unpack_from
_DOUBLE: Final = struct.Struct(">d").unpack_from
_CODES: Final = {opcode.name: ord(opcode.code) for opcode in pickletools.opcodes}
_NAMES: Final = {code: name for name, code in _CODES.items()}


class PickleMachine:
    """The base of those that follow a program. One is made for one program, which its maker has it follow once."""

    accepted: ClassVar[frozenset[str]]  # the names of the instructions that a program may have
    protocols: ClassVar[range]

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._below: list[list[Any]] = []  # the stacks under each mark
        self._memo: dict[int, Any] = {}

    def __init_subclass__(cls) -> None:
        cls._steps = [_refused] * 256
        for name in cls.accepted:
            cls._steps[_CODES[name]] = _STEPS[name]

    _steps: ClassVar[list[Callable[[PickleMachine, bytes, int], int]]]

    def follow(self, program: bytes) -> Any:
        """The last thing on the stack when the program ends. Raises ValueError for what is no program."""
        steps, at, end = self._steps, 0, len(program)
        try:
            while at < end:
                code = program[at]
                if code == _STOP:
                    return self.stack.pop()
                at = steps[code](self, program, at + 1)
        except (
            LookupError,
            struct.error,
        ) as error:  # the stack or the memo has not what an instruction takes
            raise ValueError(f"it is malformed ({type(error).__name__}: {error!s:.200})") from error
        raise ValueError("it does not end")

    # --- what subclasses decide -------------------------------------------------------------------------------

    def refuse(self, instruction: str) -> NoReturn:
        """For an instruction that is not accepted; where there is none of that code, its number."""
        raise ValueError(f"it has the instruction {instruction}")

    def named(self, module: str, name: str) -> Any:
        """A class or function."""
        raise NotImplementedError

    def called(self, function: Any, arguments: Any) -> Any:
        """The result of a call, or of a class made from these arguments."""
        raise NotImplementedError

    def given_state(self, made: Any, state: Any) -> None:
        """Attributes for an object, which stays on the stack."""
        raise NotImplementedError

    def persistent(self, key: Any) -> Any:
        """Something that is kept outside of the pickle."""
        raise NotImplementedError

    def empty_dict(self) -> Any:
        raise NotImplementedError

    def empty_set(self) -> Any:
        raise NotImplementedError

    def set_items(self, into: Any, items: list[Any]) -> None:
        """Keys and values in turn."""
        raise NotImplementedError

    def tuple_of(self, items: Iterable[Any]) -> Any:
        return tuple(items)

    def append(self, into: Any, items: list[Any]) -> None:
        if type(into) is not list:
            raise ValueError("it appends to what is not a list")
        into += items

    # --- the stack --------------------------------------------------------------------------------------------

    def last(self, num: int) -> list[Any]:
        items = self.stack[-num:]
        if len(items) < num:
            raise ValueError("its stack is empty")
        del self.stack[-num:]
        return items

    def to_mark(self) -> list[Any]:
        items, self.stack = self.stack, self._below.pop()
        return items

    def memoize(self, number: int | None = None) -> None:
        self._memo[len(self._memo) if number is None else number] = self.stack[-1]

    def recall(self, number: int) -> None:
        self.stack.append(self._memo[number])

    def mark(self) -> None:
        self._below.append(self.stack)
        self.stack = []


# --- the instructions: each reads its argument at `at`, and tells where the next instruction is ---------------------

_Step = Callable[[PickleMachine, bytes, int], int]
_STOP: Final = _CODES["STOP"]


def _refused(machine: PickleMachine, program: bytes, at: int) -> int:
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


def _counted(size: int, value_of: Callable[[bytes], Any]) -> _Step:
    """A value in so many bytes as a number of `size` bytes says."""

    def step(machine: PickleMachine, program: bytes, at: int) -> int:
        begin = at + size
        end = begin + int.from_bytes(program[at:begin], "little")
        if end > len(program):
            raise ValueError("it is cut off")
        machine.stack.append(value_of(program[begin:end]))
        return end

    return step


def _act(act: Callable[[PickleMachine], None]) -> _Step:
    def step(machine: PickleMachine, program: bytes, at: int) -> int:  # noqa: ARG001
        act(machine)
        return at

    return step


def _result(make: Callable[[PickleMachine], Any]) -> _Step:
    def step(machine: PickleMachine, program: bytes, at: int) -> int:  # noqa: ARG001
        made = make(machine)  # which may take a stack off
        machine.stack.append(made)
        return at

    return step


def _empty_list(machine: PickleMachine, program: bytes, at: int) -> int:  # noqa: ARG001
    machine.stack.append([])
    return at


def _byte(machine: PickleMachine, program: bytes, at: int) -> int:
    machine.stack.append(program[at])
    return at + 1


def _int32(machine: PickleMachine, program: bytes, at: int) -> int:
    machine.stack += _INT32(program, at)
    return at + 4


def _double(machine: PickleMachine, program: bytes, at: int) -> int:
    machine.stack += _DOUBLE(program, at)
    return at + 8


def _put_byte(machine: PickleMachine, program: bytes, at: int) -> int:
    machine._memo[program[at]] = machine.stack[-1]
    return at + 1


def _protocol(machine: PickleMachine, program: bytes, at: int) -> int:
    if program[at] not in machine.protocols:
        raise ValueError(f"it is of protocol {program[at]}")
    return at + 1


def _global(machine: PickleMachine, program: bytes, at: int) -> int:
    """Two lines of text."""
    middle = program.index(b"\n", at)
    end = program.index(b"\n", middle + 1)
    machine.stack.append(
        machine.named(program[at:middle].decode("ascii"), program[middle + 1 : end].decode("ascii"))
    )
    return end + 1


def _stack_global(machine: PickleMachine) -> Any:
    module, name = machine.last(2)
    if type(module) is not str or type(name) is not str:
        raise ValueError("it names what has no name")
    return machine.named(module, name)


def _build(machine: PickleMachine) -> None:
    (state,) = machine.last(1)
    machine.given_state(machine.stack[-1], state)


def _append_one(machine: PickleMachine) -> None:
    items = machine.last(1)
    machine.append(machine.stack[-1], items)


def _append_marked(machine: PickleMachine) -> None:
    items = machine.to_mark()
    machine.append(machine.stack[-1], items)


def _set_one(machine: PickleMachine) -> None:
    items = machine.last(2)
    machine.set_items(machine.stack[-1], items)


def _set_marked(machine: PickleMachine) -> None:
    items = machine.to_mark()
    machine.set_items(machine.stack[-1], items)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _signed(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


def _push(machine: PickleMachine, value: Any) -> None:
    machine.stack.append(value)


_STEPS: Final[dict[str, _Step]] = {
    "NONE": _constant(None),
    "NEWTRUE": _constant(True),
    "NEWFALSE": _constant(False),
    "BININT": _int32,
    "BININT1": _byte,
    "BININT2": _unsigned(2, _push),
    "LONG1": _counted(1, _signed),
    "BINFLOAT": _double,
    "BINUNICODE": _counted(4, _text),
    "SHORT_BINUNICODE": _counted(1, _text),
    "BINUNICODE8": _counted(8, _text),
    "SHORT_BINSTRING": _counted(1, lambda data: data.decode("latin-1")),
    "BINBYTES": _counted(4, bytes),
    "SHORT_BINBYTES": _counted(1, bytes),
    "EMPTY_LIST": _empty_list,
    "EMPTY_DICT": _result(lambda machine: machine.empty_dict()),
    "EMPTY_SET": _result(lambda machine: machine.empty_set()),
    "EMPTY_TUPLE": _constant(()),
    "TUPLE": _result(lambda machine: machine.tuple_of(machine.to_mark())),
    "TUPLE1": _result(lambda machine: machine.tuple_of(machine.last(1))),
    "TUPLE2": _result(lambda machine: machine.tuple_of(machine.last(2))),
    "TUPLE3": _result(lambda machine: machine.tuple_of(machine.last(3))),
    "APPEND": _act(_append_one),
    "APPENDS": _act(_append_marked),
    "SETITEM": _act(_set_one),
    "SETITEMS": _act(_set_marked),
    "MARK": _act(PickleMachine.mark),
    "MEMOIZE": _act(PickleMachine.memoize),
    "BINPUT": _put_byte,
    "LONG_BINPUT": _unsigned(4, PickleMachine.memoize),
    "BINGET": _unsigned(1, PickleMachine.recall),
    "LONG_BINGET": _unsigned(4, PickleMachine.recall),
    "GLOBAL": _global,
    "STACK_GLOBAL": _result(_stack_global),
    "REDUCE": _result(lambda machine: machine.called(*machine.last(2))),
    "NEWOBJ": _result(lambda machine: machine.called(*machine.last(2))),
    "BUILD": _act(_build),
    "BINPERSID": _result(lambda machine: machine.persistent(*machine.last(1))),
    "PROTO": _protocol,
    "FRAME": lambda _machine, _program, at: at + 8,
    "STOP": lambda _machine, _program, at: at,  # the loop ends before it
}
ALL: Final = frozenset(_STEPS)
# Those that `torch.save` writes by default, which are all that its weights-only reader takes.
PROTOCOL_2: Final = ALL - {
    "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "MEMOIZE", "STACK_GLOBAL", "FRAME"
}  # fmt: skip
