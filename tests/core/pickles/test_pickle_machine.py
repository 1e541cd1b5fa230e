"""The machine of pickles reads every instruction as Python does, and takes no longer than a program's bytes justify."""

import io
import pickle
import pickletools
import zipfile
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_ckpt.core.pickles.machine import ALL, PROTOCOL_2, PickleMachine


class Plain(PickleMachine):
    """Of plain data all can be made."""

    accepted: ClassVar = ALL
    protocols: ClassVar = range(2, 6)

    def empty_dict(self) -> dict[Any, Any]:
        return {}

    def set_items(self, into: Any, items: list[Any]) -> None:
        into.update(zip(items[::2], items[1::2], strict=True))

    def find_global(self, module: str, name: str) -> str:
        return f"{module}.{name}"

    def call(self, function: Any, arguments: Any) -> Any:
        if function == "_codecs.encode":  # as bytes are in protocol 2
            return arguments[0].encode(arguments[1])
        assert (function, arguments) == ("__builtin__.bytes", ())
        return b""


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=()), max_size=300)
    | st.binary(max_size=300),
    lambda inner: (
        st.lists(inner) | st.tuples(inner) | st.tuples(inner, inner, inner, inner) | st.dictionaries(st.text(), inner)
    ),
)


@given(values, st.integers(2, 5))
def test_plain_data_of_every_protocol_are_what_python_makes_of_them(value, protocol):
    assert Plain().follow(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("text", ["", "aäb", "x" * 255])
def test_a_text_of_python_2_is_what_python_makes_of_it(text):
    program = b"\x80\x02U" + bytes([len(text)]) + text.encode("latin-1") + b"."
    assert Plain().follow(program) == pickle.loads(program, encoding="latin-1") == text


@given(values, st.data())
def test_a_program_that_is_cut_off_is_refused(value, data):
    program = pickle.dumps(value, 2)
    with pytest.raises((ValueError, AssertionError)):
        Plain().follow(program[: data.draw(st.integers(0, len(program) - 1))])


def programs_of_torch() -> Iterator[bytes]:
    shared = [torch.ones(2), {"a": (1, 2.5, "ä", None, True)}]
    state = {
        "one": shared,
        "again": shared,
        "set": {1, 2},
        "big": list(range(70_000)),
        "size": torch.Size([3]),
    }
    buffer = io.BytesIO()
    torch.save(state, buffer)
    with zipfile.ZipFile(buffer) as records:
        yield next(records.read(name) for name in records.namelist() if name.endswith("data.pkl"))


def test_each_instruction_is_read_to_its_end():
    """By a machine that tells where it is, beside `pickletools`."""
    for program in programs_of_torch():
        places: list[int] = []

        class Placed(PickleMachine):
            accepted: ClassVar = PROTOCOL_2
            protocols: ClassVar = range(2, 3)

        def noted(step: Any, places: list[int] = places) -> Any:
            def at(machine: Any, code: bytes, at: int) -> int:
                places.append(at - 1)
                return step(machine, code, at)  # type: ignore[no-any-return]

            return at

        for hook in ("find_global", "call", "persistent_load", "empty_dict", "empty_set"):
            setattr(Placed, hook, lambda *_: [])
        for hook in ("set_items", "set_state", "append"):
            setattr(Placed, hook, lambda *_: None)
        Placed._steps = [noted(step) for step in Placed._steps]
        Placed().follow(program)

        assert [*places, len(program) - 1] == [place for _, _, place in pickletools.genops(program)]


@pytest.mark.parametrize(
    "opcode",
    [opcode for opcode in pickletools.opcodes if opcode.name not in ALL],
    ids=lambda opcode: opcode.name,
)
def test_an_instruction_that_is_not_among_those_of_torch_is_refused_by_its_name(opcode):
    with pytest.raises(ValueError, match=f"instruction {opcode.name}$"):
        Plain().follow(b"\x80\x02" + opcode.code.encode("latin-1") + bytes(20) + b".")
