"""Whether pickled objects of several ranks are the same, though their pickles may not be: by one digest of each.

In: what `torch.save` made of a list of objects. Out: digests. Knows nothing of: what the objects are; none of them is made.

A pickle is a program. It is followed on a stack of what it would put there, as far as that can be told from the operations
alone: so the order of a set does not count, nor which parts of an object were one in memory.
"""

from __future__ import annotations

import hashlib
import pickletools
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from ..spec import MIB
from .pickled import records

# Named as Python 2 had them, too: `torch.save` pickles by protocol 2.
_SETS: Final = {f"{module} {name}" for module in ("builtins", "__builtin__") for name in ("set", "frozenset")}
_MAX_BYTES: Final = MIB  # it takes a microsecond for each
_INTO_ONE: Final = frozenset({"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"})


class _OperationResult:
    """The result of an operation on values from the stack; and the items that others have put into it since."""

    __slots__ = ("digest", "parts", "what")

    def __init__(self, what: str, parts: Iterable[_OperationResult] = ()) -> None:
        self.what, self.parts = what, [*parts]
        self.digest: bytes | None = None


def object_digests(data: bytes) -> Callable[[int], str]:
    """That of each object of the list, by its number. Raises ValueError for what `torch.save` never makes of a list.

    Of large or very deep pickles, which would take long to follow, only all of the bytes are compared.
    """
    found = records(data)
    if len(found.get("data.pkl", b"")) > _MAX_BYTES:
        return lambda _: _digested([data]).hex()
    try:
        made = _followed(found["data.pkl"])
        told = [_digest(one, found).hex() for one in made.parts]
    except RecursionError:
        return lambda _: _digested([data]).hex()
    except (KeyError, IndexError) as error:
        raise ValueError(f"it is no pickle: {error!r}") from error
    if made.what != "EMPTY_LIST":
        raise ValueError("it is no list of objects")
    return told.__getitem__


def _followed(program: bytes) -> _OperationResult:
    stack: list[_OperationResult] = []
    below: list[list[_OperationResult]] = []  # the stacks under each mark
    memo: dict[object, _OperationResult] = {}
    for opcode, argument, _ in pickletools.genops(program):
        name = opcode.name
        if name == "MARK":
            below.append(stack)
            stack = []
        elif "PUT" in name or name == "MEMOIZE":
            memo[len(memo) if name == "MEMOIZE" else argument] = stack[-1]
        elif "GET" in name:
            stack.append(memo[argument])
        elif name != "STOP":
            before = opcode.stack_before
            if pickletools.markobject in before:
                taken, stack = stack, below.pop()
                own = before.index(pickletools.markobject)  # what it takes from under the mark
            else:
                taken, own = [], len(before)
            at = len(stack) - own
            taken = [*stack[at:], *taken]
            del stack[at:]
            if name in _INTO_ONE:
                taken[0].parts += [_OperationResult(name), *taken[1:]] if name == "BUILD" else taken[1:]
                stack.append(taken[0])
            elif opcode.stack_after:
                told = "" if argument is None else f" {type(argument).__name__} {argument!r}"
                stack += [_OperationResult(f"{_kind(name)}{told}", taken)] * len(opcode.stack_after)
    return stack[-1]


def _kind(name: str) -> str:
    """Whole numbers, texts and tuples are the same however they are written."""
    for kind in ("INT", "LONG", "UNICODE", "BYTES", "TUPLE"):
        if kind in name:
            return "INT" if kind == "LONG" else kind
    return name


def _digest(made: _OperationResult, found: Mapping[str, bytes]) -> bytes:
    if made.digest is None:
        made.digest = b"itself"  # for what holds itself
        parts = [_digest(part, found) for part in made.parts]
        if made.what == "REDUCE" and _is_set(made.parts[0]):
            parts[1] = b"".join(sorted(_digest(item, found) for item in made.parts[1].parts[0].parts))
        if made.what == "BINPERSID":  # ("storage", type, key, where, how many)
            what, kind, key, _, size = made.parts[0].parts
            parts = [_digest(one, found) for one in (what, kind, size)]
            parts.append(found[f"data/{_text(key)}"])
        made.digest = _digested([made.what.encode(), *parts])
    return made.digest


def _is_set(made: _OperationResult) -> bool:
    return made.what.startswith("GLOBAL") and any(made.what.endswith(f"{name!r}") for name in _SETS)


def _text(made: _OperationResult) -> str:
    return made.what.partition("'")[2].rpartition("'")[0]


def _digested(parts: Iterable[bytes]) -> bytes:
    made = hashlib.blake2b(digest_size=8)
    for part in parts:
        made.update(len(part).to_bytes(8, "little"))
        made.update(part)
    return made.digest()
