"""Pickles in an archive that would run code, take much memory or are broken: always a CheckpointError, and none of it done."""

import io
import itertools
import os
import pickle
import pickletools
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from archives import little_memory
from damage import NUM_LIES, STATE, assert_refused, objects_swapped, refusal, torch_saved
from slices import PART
from states import MIB, difference
from torch import nn

import async_ckpt
from async_ckpt import AsyncCheckpointer, CheckpointError, CorruptCheckpointError, UntrustedObjectError


@pytest.fixture
def saved(archive: Path) -> Path:
    async_ckpt.save(STATE, archive).result()
    return archive


# --- pickles -----------------------------------------------------------------------------------------------------


class Bomb:
    """Unpickling it makes a folder."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.marker,)


def test_a_pickle_runs_no_code_without_trust(archive, tmp_path):
    marker = tmp_path / "executed"
    async_ckpt.save({"w": torch.ones(1), "bomb": Bomb(marker)}, archive).result()
    for how in ({}, {"verify": False}, {"mmap": True}, {"select": "bomb"}):
        assert_refused(archive, UntrustedObjectError, **how)
        assert not marker.exists()
    with pytest.raises(TypeError, match=r"namedtuples, dataclasses, enums or wrapped tensors; got Bomb"):
        async_ckpt.load(archive, types=[Bomb])
    assert async_ckpt.load(archive, select="w")["w"].item() == 1
    assert not marker.exists()
    async_ckpt.load(archive, trust=True)
    assert marker.is_dir()


def test_restoring_runs_no_code_without_trust(tmp_path):
    marker = tmp_path / "executed"
    live = {"w": torch.zeros(1), "bomb": None}
    with AsyncCheckpointer(tmp_path / "run") as ckpt:
        ckpt.save({"w": torch.ones(1), "bomb": Bomb(marker)}, step=1).result()
        with pytest.raises(UntrustedObjectError):
            ckpt.restore(live)
        assert not marker.exists()
        assert live["w"].item() == 0
        assert ckpt.restore(live, trust=True) == 1
    assert marker.is_dir()


PICKLES = {
    "empty": b"",
    "garbage": b"\x80\x04garbage",
    "zip of nothing": b"PK\x05\x06" + bytes(18),
    "not a list": torch_saved({"a": 1}),
    "an empty list": torch_saved([]),
    "cut": torch_saved([{1, 2}])[:-30],
    "old format, cut": torch_saved([{1, 2}], _use_new_zipfile_serialization=False)[:20],
}


@pytest.mark.parametrize("pickled", PICKLES.values(), ids=PICKLES.keys())
@pytest.mark.parametrize("trust", [False, True])
def test_objects_that_cannot_be_loaded_are_a_checkpoint_error(pickled, trust, saved):
    objects_swapped(saved, pickled)
    assert_refused(saved, trust=trust)
    assert difference(async_ckpt.load(saved, select="m")["m"], STATE["m"]) is None


# Pickles that are written by hand, with the opcodes of protocol 2.


def zipped(pickle: bytes, *, compression: int = zipfile.ZIP_STORED, **storages: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as made:
        made.writestr("archive/data.pkl", b"\x80\x02]" + pickle + b"a.")
        made.writestr("archive/byteorder", "little")
        made.writestr("archive/version", "3")
        for key, data in storages.items():
            made.writestr(f"archive/data/{key.strip('_')}", data)
    return buffer.getvalue()


def name(full: str) -> bytes:
    module, _, short = full.rpartition(".")
    return f"c{module}\n{short}\n".encode()


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def number(value: int) -> bytes:
    long = pickle.encode_long(value)
    return b"\x8a" + bytes([len(long)]) + long


def of(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def called(function: str, *arguments: bytes) -> bytes:
    return name(function) + of(*arguments) + b"R"


def stored(num_items: int, kind: str = "torch.FloatStorage", key: str = "0") -> bytes:
    return of(text("storage"), name(kind), text(key), text("cpu"), number(num_items)) + b"Q"


def numbers(*values: int) -> bytes:
    return of(*map(number, values))


def rebuilt(storage: bytes, size: int, stride: int, function: str = "_rebuild_tensor_v2") -> bytes:
    more = (b"\x89", called("collections.OrderedDict"))
    return called(f"torch._utils.{function}", storage, number(0), numbers(size), numbers(stride), *more)


def chained(function: str, times: int, innermost: bytes, *more: bytes) -> bytes:
    return (name(function) + b"(") * times + innermost + (b"".join(more) + b"tR") * times


def repeated(times: int, function: str, argument: bytes) -> bytes:
    """A call with the same arguments again and again."""
    return of(name(function) + b"q\x00" + of(argument) + b"q\x01R", b"h\x00h\x01R" * times)


FOUR = {"_0": bytes(4)}
LATIN = called("_codecs.encode", text("a" * 20_000), text("latin1"))
HUGE = number(2**33)
BOMBS: dict[str, Callable[[], bytes]] = {
    "a tensor by its class": lambda: zipped(called("torch.FloatTensor", HUGE)),
    "a tensor by its base": lambda: zipped(called("torch.Tensor", HUGE)),
    "a tensor by __new__": lambda: zipped(name("torch.Tensor") + of(HUGE) + b"\x81"),
    "a storage": lambda: zipped(called("torch.storage.UntypedStorage", HUGE)),
    "a bytearray": lambda: zipped(called("builtins.bytearray", HUGE)),
    "a bytearray of Python 2": lambda: zipped(called("__builtin__.bytearray", HUGE)),
    "a bytearray as a subclass": lambda: zipped(
        called("torch._tensor._rebuild_from_type_v2", name("builtins.bytearray"), name("builtins.set"), of(HUGE), b"}")
    ),
    "a tensor larger than its storage": lambda: zipped(rebuilt(stored(1), 2**31, 1), **FOUR),
    "a storage larger than its record": lambda: zipped(rebuilt(stored(2**31), 2**31, 1), **FOUR),
    "a record that is compressed": lambda: zipped(
        rebuilt(stored(2**26), 2**26, 1), compression=zipfile.ZIP_DEFLATED, _0=bytes(2**28)
    ),
    "a pickle that is compressed": lambda: zipped(text("a" * 2**28), compression=zipfile.ZIP_DEFLATED),
    "a quantised tensor": lambda: zipped(
        called(
            "torch._utils._rebuild_qtensor", stored(4, "torch.QInt8Storage"), number(0), numbers(2**33), numbers(0),
            of(name("torch.per_tensor_affine"), b"G" + struct.pack(">d", 1.0), number(0)), b"\x89", b"}",
        ), **FOUR,
    ),
    "an expanded tensor on its way to a device": lambda: zipped(
        called(
            "torch._utils._rebuild_device_tensor_from_cpu_tensor",
            rebuilt(stored(1), 2**30, 0), name("torch.complex128"), text("cpu"), b"\x89",
        ), **FOUR,
    ),
    "an expanded tensor made sparse": lambda: zipped(
        called(
            "torch._utils._rebuild_sparse_tensor", called("torch.serialization._get_layout", text("torch.sparse_coo")),
            of(
                called(
                    "torch._utils._rebuild_tensor_v2", stored(4, "torch.CharStorage"), number(0), numbers(1, 2**31),
                    numbers(0, 0), b"\x89", b"}",
                ),
                rebuilt(stored(4, "torch.CharStorage"), 2**31, 0), numbers(2**31), b"\x88",
            ),
        ), **FOUR,
    ),
    "the items of an expanded tensor": lambda: zipped(called("builtins.set", rebuilt(stored(1), 2**40, 0)), **FOUR),
    "a codec that doubles": lambda: zipped(chained("_codecs.encode", 24, LATIN, text("hex"))),
    "a text encoded again and again": lambda: zipped(repeated(200_000, "_codecs.encode", text("a" * 20_000) + text("latin1"))),
    "a bytearray copied again and again": lambda: zipped(repeated(200_000, "builtins.bytearray", LATIN)),
    "a set made again and again": lambda: zipped(
        repeated(100_000, "builtins.set", b"](" + b"".join(map(number, range(5000))) + b"e")
    ),
    "a dict made again and again": lambda: zipped(
        repeated(100_000, "collections.OrderedDict", b"}(" + b"".join(number(i) + b"N" for i in range(5000)) + b"u")
    ),
    "a size made again and again": lambda: zipped(repeated(100_000, "torch.Size", numbers(*range(20_000)))),
    "attributes again and again": lambda: zipped(
        of(
            b"}q\x02(" + b"".join(text(f"a{i}") + b"N" for i in range(5000)) + b"u",
            name("collections.OrderedDict") + b"q\x00)q\x01Rh\x02b", b"h\x00h\x01Rh\x02b" * 100_000,
        )
    ),
    "a key of keys": lambda: zipped(b"}" + b")q\x00" + b"h\x00\x86q\x00" * 60 + b"Ns"),
    "a key within keys": lambda: zipped(b"}" + b")" + b"\x85" * 300_000 + b"Ns"),
    "a member within members": lambda: zipped(called("builtins.set", b"]" + b")" + b"\x85" * 300_000 + b"a")),
    "an old format": lambda: torch_saved([{1, 2}], _use_new_zipfile_serialization=False),
}  # fmt: skip


def test_objects_that_ask_for_much_more_than_they_hold_are_refused(nursery, saved):
    """In a process that may take a quarter of a gigabyte and ten seconds of its processor for each: one more and the
    system ends it.
    """
    honest = saved.read_bytes()
    for name, bomb in BOMBS.items():
        pickled = bomb()
        assert len(pickled) < 2 * MIB
        (path := saved.with_name(name)).write_bytes(honest)
        objects_swapped(path, pickled)
    code = """
        import os, resource, sys, time
        import async_ckpt
        from archives import little_memory
        _, most_seconds = resource.getrlimit(resource.RLIMIT_CPU)
        for name in sys.argv[2:]:
            resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + 10, most_seconds))
            with little_memory(256 << 20):
                try:
                    async_ckpt.load(os.path.join(sys.argv[1], name))
                except (async_ckpt.CorruptCheckpointError, async_ckpt.UntrustedObjectError) as error:
                    told = str(error) if "allocate" in str(error) or "MemoryError" in str(error) else "refused"
                    print(name, told, flush=True)
        os._exit(0)  # how an interpreter ends is for other tests
    """
    ended = nursery.run(code, saved.parent, *BOMBS)
    assert ended.out == "".join(f"{name} refused\n" for name in BOMBS)
    assert (ended.status, ended.err) == (0, "")


def thirds() -> torch.Tensor:
    return torch.tensor([1 / 3])


def test_a_parameter_made_by_a_function_that_torch_was_told_is_safe_loads(saved):
    made = called(f"{__name__}.thirds")
    objects_swapped(saved, zipped(called("torch._utils._rebuild_parameter", made, b"\x89", b"}")))

    assert_refused(saved, UntrustedObjectError)
    with torch.serialization.safe_globals([thirds]):
        parameter = async_ckpt.load(saved)["seen"]
    assert type(parameter) is nn.Parameter
    assert torch.equal(parameter, thirds())


def allowed() -> list[str]:
    """All that torch's weights-only unpickler calls, or takes for a value, without being told to."""
    from torch._weights_only_unpickler import _get_allowed_globals

    return sorted(_get_allowed_globals())


def garbled(honest: bytes, random: Random, names: list[str]) -> bytes:
    """A pickle with some of its opcodes, arguments and names exchanged, repeated or left out."""
    ops = [op[2] for op in pickletools.genops(honest)]
    parts = [honest[begin:end] for begin, end in itertools.pairwise([*ops, len(honest)])]
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(parts))
        act = random.randrange(7)
        if act == 0:
            del parts[at]
        elif act == 1:
            parts.insert(at, random.choice(parts))
        elif act == 2:
            parts[at : at + 1] = parts[at : at + random.randint(1, 9)] * random.randint(1, 30)
        elif act == 3:
            parts[at] = name(random.choice(names))
        elif act == 4:
            parts[at] = number(random.choice([-1, 0, 1, 7, 2**20, 2**31, 2**40, 2**62, 2**63, 2**70]))
        elif act == 5:
            parts[at] = bytes([random.choice(b"()]}tR\x81b\x85\x86\x87asue0NQq\x88")])
        else:
            parts[at] = bytes(byte ^ (random.random() < 0.1) << random.randrange(8) for byte in parts[at])
    return b"".join(parts)


def test_objects_changed_at_random_load_or_are_refused(saved):
    parameter = nn.Parameter(torch.ones(2))
    leaves = [
        {1, (2, "x"), b"bytes"}, bytearray(b"abc"), {torch.float32, torch.Size([1]), torch.device("cpu"), 1j},
        {parameter, torch.arange(6.0).view(2, 3).t(), torch.ones(2).to(torch.uint16), torch.tensor(1.0).expand(9)},
        {torch.eye(2).to_sparse()},
    ]  # fmt: skip
    with zipfile.ZipFile(io.BytesIO(torch_saved(leaves))) as made:
        records = {info.filename: made.read(info) for info in made.infolist()}
    random, names = Random(PART), allowed()
    refused = 0
    with little_memory(256 * MIB), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of old classes
        for _ in range(NUM_LIES // 4):
            pickled = garbled(records["archive/data.pkl"], random, names)
            buffer = io.BytesIO()
            with zipfile.ZipFile(buffer, "w") as made:
                for record, data in (records | {"archive/data.pkl": pickled}).items():
                    made.writestr(record, data)
            objects_swapped(saved, buffer.getvalue())
            error = refusal(lambda: async_ckpt.load(saved, select="seen"))
            if error is not None and not isinstance(error, CheckpointError):
                raise AssertionError(f"{error!r} from {pickled!r}") from error
            assert "allocate" not in str(error), pickled
            assert "MemoryError" not in str(error), pickled
            refused += error is not None
    assert refused > NUM_LIES / 20


def test_records_that_torch_and_python_find_under_one_name_are_refused(saved):
    honest = torch_saved([{1, 2}])
    buffer = io.BytesIO(honest)
    with zipfile.ZipFile(buffer, "a") as made, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.writestr("archive/data.pkl", b"\x80\x02]a.")
    objects_swapped(saved, buffer.getvalue())
    assert_refused(saved, CorruptCheckpointError)


def test_an_unverified_pickle_that_was_damaged_is_corrupt_and_needs_no_trust(saved):
    data = saved.read_bytes()
    saved.write_bytes(data.replace(b"__builtin__\nbytearray", b"__builtin__\nbytearrey"))
    assert_refused(saved, CorruptCheckpointError, verify=False)


def test_objects_put_in_their_place_load(saved):
    """So what is refused above is refused for what it is."""
    objects_swapped(saved, torch_saved([{3}]))
    assert async_ckpt.load(saved)["seen"] == {3}
