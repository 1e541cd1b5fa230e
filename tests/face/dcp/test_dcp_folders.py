"""Folders of torch.distributed.checkpoint: what torch has written is read, and what is written is read by torch."""

from __future__ import annotations

import io
import itertools
import os
import pickle
import random
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from dcp_states import dcp, emptied, plain, training
from megatron_parts import ShardedTensor
from states import difference, open_run
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

import async_ckpt
from async_ckpt import CorruptCheckpointError, NotCommittedError, StateMismatchError, UntrustedObjectError
from async_ckpt.core.loading.archives.contents import Part
from async_ckpt.core.loading.archives.find import from_path
from async_ckpt.face.around.ranges import Range, read_ranges
from async_ckpt.face.dcp import convert
from async_ckpt.face.foreign.dcp_checksums import RecordCheck
from async_ckpt.face.foreign.dcp_metadata import ZipRecord
from async_ckpt.integrations.dcp import TarStorageWriter, restore, to_dcp


def of_torch(state: Any, path: Path) -> Path:
    dcp.save(state, checkpoint_id=path)
    return path


def by_torch(state: Any, path: Path) -> Any:
    dcp.load(state, checkpoint_id=path)
    return state


KINDS = {
    "bfloat16": torch.ones(3).bfloat16(),
    "float8": torch.ones(3).to(torch.float8_e4m3fn),
    "bool": torch.tensor([True, False]),
    "complex": torch.ones(2, dtype=torch.complex64),
    "uint16": torch.ones(3, dtype=torch.uint16),
    "a view": torch.arange(10.0)[3:7],
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "channels last": torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "a scalar": torch.tensor(3),
    "a parameter": torch.nn.Parameter(torch.ones(2)),
    "nothing": torch.empty(0, 4),
}


# --- what torch has written ---------------------------------------------------------------------------------------


def test_load_gives_the_state_that_torch_has_saved(tmp_path):
    state = {**training(), "kinds": {name: one.detach() for name, one in KINDS.items()}}
    folder = of_torch(state, tmp_path / "x")

    assert difference(plain(async_ckpt.load(folder)), plain(state)) is None
    assert difference(plain(async_ckpt.load(folder, select="optim")), plain({"optim": state["optim"]})) is None


class Loader:
    """As a data loader: a state dict with an empty dict in it."""

    def __init__(self, position: int) -> None:
        self.position, self.workers = position, None

    def state_dict(self) -> Any:
        empty = {"none": {}, "nested": {"a": {}, "b": {"c": {}}}, "listed": [{}, {}], "list": [], "pair": ()}
        return {"position": self.position, "workers": {}, "deep": {"at": self.position, **empty}}

    def load_state_dict(self, state: Any) -> None:
        self.position, self.workers = state["position"], state["workers"]
        assert state == Loader(self.position).state_dict()


EMPTY: dict[str, Callable[[float], Any]] = {
    "dicts in dicts": lambda _: {"a": {}, "b": {"c": {}}},
    "empty dicts alone": lambda _: [{}, {}],
    "a list that ends with one": lambda fill: [torch.full((3,), fill), {}],
    "a list that begins with one": lambda fill: [{}, torch.full((3,), fill)],
    "in dicts in a list": lambda fill: [{"a": torch.full((3,), fill)}, {"b": {}}],
    "a scaler that is off": lambda _: torch.amp.GradScaler("cpu", enabled=False),
    "a module without state": lambda _: torch.nn.ReLU(),
}


@pytest.mark.parametrize("by", ["torch", "us"])
@pytest.mark.parametrize("what", EMPTY)
def test_what_is_empty_is_not_missing_wherever_it_lies(tmp_path, by, what):
    def state(fill: float) -> Any:
        return {"w": torch.full((3,), fill), "x": EMPTY[what](fill)}

    how = {"checkpoint_id": tmp_path / "x"} if by == "torch" else {"storage_writer": TarStorageWriter(tmp_path / "x")}
    dcp.save(state(1.0), **how)
    live = state(0.0)
    restore(live, tmp_path / "x")

    assert torch.equal(live["w"], torch.ones(3))
    if isinstance(live["x"], list | dict):
        assert difference(live["x"], EMPTY[what](1.0)) is None
    for other in ([{}, torch.ones(2)], [], (), [[]]):  # what torch does not leave out is missing all the same
        with pytest.raises(StateMismatchError):
            restore({**live, "y": other}, tmp_path / "x")
    with pytest.raises(StateMismatchError, match=r"missing in the checkpoint: more$"):
        restore({**live, "more": {"d": {}, "e": torch.ones(2)}}, tmp_path / "x")


@pytest.mark.parametrize("by", ["torch", "us"])
def test_an_object_gets_the_empty_dicts_of_its_state_back(tmp_path, by):
    how = {"checkpoint_id": tmp_path / "x"} if by == "torch" else {"storage_writer": TarStorageWriter(tmp_path / "x")}
    dcp.save({"w": torch.ones(3), "loader": Loader(7)}, **how)
    live = {"w": torch.zeros(3), "loader": Loader(0)}
    restore(live, tmp_path / "x")

    assert (live["loader"].position, live["loader"].workers) == (7, {})


def test_restore_fills_a_model_and_its_optimizer(tmp_path):
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.randn(2, 5)).sum().backward()
    optimizer.step()
    folder = of_torch({"model": model, "optim": optimizer, "step": 7}, tmp_path / "x")
    other = torch.nn.Linear(5, 3)
    live = torch.optim.AdamW(other.parameters())
    state = {"model": other, "optim": live, "step": 0}

    restore(state, folder)
    assert difference(other.state_dict(), model.state_dict()) is None
    assert difference(live.state_dict(), optimizer.state_dict()) is None
    assert state["step"] == 7
    with pytest.raises(StateMismatchError, match="weight is float32"):
        restore({"model": torch.nn.Linear(5, 4)}, folder)


def test_only_ranges_are_read(tmp_path, num_read):
    folder = of_torch({"large": torch.ones(8 << 20), "small": torch.ones(1000)}, tmp_path / "x")
    assert async_ckpt.load(folder, select="small")["small"].sum() == 1000
    assert 4000 <= sum(num_read.values()) < 32 << 10


def test_a_folder_in_a_store_is_read_by_ranges_too(bucket, tmp_path):
    state = training()
    folder = of_torch(state, tmp_path / "x")
    for name in os.listdir(folder):
        bucket.server.client.put_object(Bucket=bucket, Key=f"old/{name}", Body=(folder / name).read_bytes())
    assert difference(plain(async_ckpt.load(bucket.place("old"))), plain(state)) is None


def test_objects_take_trust(tmp_path):
    folder = of_torch({"x": Ran(), "w": torch.ones(1)}, tmp_path / "x")
    assert async_ckpt.load(folder, select="w")["w"].tolist() == [1]
    with pytest.raises(UntrustedObjectError, match="x is a Python object"):
        async_ckpt.load(folder)
    assert Ran.calls == 0
    async_ckpt.load(folder, trust=True)
    assert Ran.calls == 1


class Ran:
    """Tells whether a pickle has run."""

    calls = 0

    def __reduce__(self) -> Any:
        return Ran.run, ()

    @classmethod
    def run(cls) -> Ran:
        cls.calls += 1
        return cls()


@pytest.mark.parametrize("where", ["planner_data", "storage_meta", "state_dict_metadata", "storage_data"])
def test_a_hostile_metadata_runs_nothing(tmp_path, where):
    folder = of_torch({"w": torch.ones(2)}, tmp_path / "x")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    setattr(metadata, where, Ran())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    Ran.calls = 0
    with pytest.raises(CorruptCheckpointError, match=r"it names '.*getattr', .* nothing was run"):
        async_ckpt.load(folder)
    assert Ran.calls == 0


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04.",
        b"\x80\x04K\x00r\xff\xff\xff\x7f.",  # a memo of two billion places
        b"\x80\x04\x96" + struct.pack("<Q", 1 << 60) + b".",  # a bytearray of an exabyte
        b"\x80\x04cos\nsystem\n\x8c\x04true\x85R.",
        b"\x80\x04)" + b"\x94h\x00h\x00\x86" * 2000 + b".",
        b"(lp0\n.",
    ],
)
def test_what_is_no_metadata_is_an_error_whatever_it_says(tmp_path, data):
    (tmp_path / ".metadata").write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match="cannot be trusted"):
        async_ckpt.load(tmp_path)


def doubled(num_levels: int, field: str) -> bytes:
    """Metadata with a tuple that holds one tuple twice, which holds one twice, and so on."""
    tuples = b")\x94" + b"".join(b"h%c\x86\x94" % level for level in range(num_levels))
    names = [
        b"\x8c%c%b" % (len(name), name.encode()) for name in ("state_dict_metadata", "storage_data", "planner_data")
    ]
    values = [tuples if field.encode() in name else b"}" for name in names]
    fields = b"".join(name + value for name, value in zip(names, values, strict=True))
    return b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81}(" + fields + b"ub."


@pytest.mark.parametrize("field", ["state_dict_metadata", "storage_data"])
def test_a_message_is_no_longer_than_the_metadata_justifies(tmp_path, field):
    (tmp_path / ".metadata").write_bytes(doubled(60, field))
    with pytest.raises(CorruptCheckpointError, match="a tuple is not a dict"):
        async_ckpt.load(tmp_path)


@pytest.mark.parametrize(
    "key",
    [b"h\x3b", b"h\x3b\x85", b"(h\x3bh\x3bl", b"\x8c\x05torchh\x3b\x93"],
    ids=["it", "in", "list", "name"],
)
def test_nothing_in_a_metadata_is_hashed_or_shown_whole(tmp_path, key):
    tuples = b")\x94" + b"".join(b"h%c\x86\x94" % level for level in range(60)) + b"0"
    data = doubled(0, "").replace(b"}(", b"}(" + tuples).replace(b"storage_data}", b"storage_data}" + key + b"K\x01s")
    (tmp_path / ".metadata").write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match="cannot be trusted"):
        async_ckpt.load(tmp_path)


@pytest.mark.parametrize("what", ["chunks", "state", "path"])
def test_one_list_that_many_things_name_is_not_gone_through_each_time(tmp_path, what):
    """In two bytes a pickle names what it had before: a thousand names of a thousand items are a million."""
    num = 1000
    empty = [ChunkStorageMetadata(torch.Size([at]), torch.Size([0])) for at in range(num if what == "chunks" else 1)]
    if what == "state":
        vars(empty[0]).update({f"more{at}": at for at in range(num)})
        empty *= num
    told = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([num]), empty)
    path = tuple(range(num))
    metadata = Metadata(
        {f"w{at}": told for at in range(num)},
        planner_data={f"w{at}": path for at in range(num if what == "path" else 0)},
        storage_data={},
    )
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptCheckpointError, match="it repeats the same references without end"):
        async_ckpt.load(tmp_path)


def test_two_names_in_the_same_bytes_are_refused(tmp_path):
    """Not even tied weights are: torch writes them twice."""
    tied = torch.ones(3)
    folder = of_torch({"v": tied, "w": tied}, tmp_path / "x")
    assert set(async_ckpt.load(folder)) == {"v", "w"}
    data = pickle.loads((folder / ".metadata").read_bytes())
    first, second = data.storage_data.values()
    for begin, length in ((0, 0), (first.length - 1, -1)):
        second.offset, second.length = begin, first.length + length
        (folder / ".metadata").write_bytes(pickle.dumps(data))
        with pytest.raises(CorruptCheckpointError, match=r"'w' and 'v' are in the same bytes of '__0_0\.distcp'"):
            async_ckpt.load(folder)


@pytest.mark.parametrize("shape", [(1 << 46,), (1000,)])
def test_items_that_share_their_places_are_refused_before_memory_is_taken(tmp_path, shape):
    folder = of_torch({"w": torch.ones(4)}, tmp_path / "x")
    (file,) = folder.glob("*.distcp")
    torch.save(torch.ones(1).expand(shape), file)
    data = pickle.loads((folder / ".metadata").read_bytes())
    told = data.state_dict_metadata["w"]
    told.size = told.chunks[0].sizes = torch.Size(shape)
    for info in data.storage_data.values():
        info.length = file.stat().st_size
    (folder / ".metadata").write_bytes(pickle.dumps(data))
    with pytest.raises(CorruptCheckpointError, match="larger than its storage"):
        async_ckpt.load(folder)


@pytest.mark.parametrize("name", ["byteorder", "data.pkl"])
def test_a_compressed_record_is_not_opened(tmp_path, name):
    folder = of_torch({"w": torch.ones(4)}, tmp_path / "x")
    (file,) = folder.glob("*.distcp")
    with zipfile.ZipFile(file) as before:
        records = {info.filename: before.read(info) for info in before.infolist()}
    with zipfile.ZipFile(file, "w") as after:
        for record, data in records.items():
            kind = zipfile.ZIP_DEFLATED if record.endswith(name) else zipfile.ZIP_STORED
            after.writestr(record, data, compress_type=kind)
    told = pickle.loads((folder / ".metadata").read_bytes())
    next(iter(told.storage_data.values())).length = file.stat().st_size
    (folder / ".metadata").write_bytes(pickle.dumps(told))
    with pytest.raises(CorruptCheckpointError, match=rf"its '.*/{name}' is compressed"):
        async_ckpt.load(folder)


def test_what_each_rank_has_written_alone_is_named(tmp_path):
    dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "x", use_collectives=False)
    with pytest.raises(NotCommittedError, match="with use_collectives=False, a checkpoint for each rank"):
        async_ckpt.load(tmp_path / "x")


def test_a_conjugate_is_left_to_torch(tmp_path):
    folder = of_torch({"w": torch.ones(4, dtype=torch.complex64).conj()}, tmp_path / "x")
    with pytest.raises(
        CorruptCheckpointError, match=r"such as a conjugate; load it with torch\.distributed\.checkpoint$"
    ):
        async_ckpt.load(folder)


def test_metadata_damaged_at_random_is_told_or_means_the_same(tmp_path):
    state = {"a": torch.ones(5), "b": [torch.zeros(2, 3)], "n": 3}
    folder = of_torch(state, tmp_path / "x")
    whole = (folder / ".metadata").read_bytes()
    draw = random.Random(0)
    for _ in range(400):
        data = bytearray(whole)
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        (folder / ".metadata").write_bytes(data)
        try:
            async_ckpt.load(folder)
        except (CorruptCheckpointError, UntrustedObjectError):
            pass


def test_metadata_of_newer_versions_of_torch_is_read(tmp_path, monkeypatch):
    """From torch 2.15 on the properties of a tensor have a sixth field."""
    now = TensorProperties.__getstate__
    monkeypatch.setattr(TensorProperties, "__getstate__", lambda self: (*now(self), (2, 1)))
    folder = of_torch({"w": torch.ones(3, 2)}, tmp_path / "x")
    monkeypatch.undo()
    with pytest.raises(ValueError, match="too many values"):
        pickle.loads((folder / ".metadata").read_bytes())
    assert async_ckpt.load(folder)["w"].sum() == 6


def test_damage_is_named(tmp_path):
    folder = of_torch({"w": torch.ones(1000), "v": torch.ones(10)}, tmp_path / "x")
    (file,) = folder.glob("*.distcp")
    whole = file.read_bytes()
    file.write_bytes(whole[:-10])
    with pytest.raises(CorruptCheckpointError, match="truncated"):
        async_ckpt.load(folder)
    file.write_bytes(bytes(len(whole)))
    with pytest.raises(CorruptCheckpointError, match="not a tensor as"):
        async_ckpt.load(folder)
    file.unlink()
    with pytest.raises(CorruptCheckpointError, match="is missing"):
        async_ckpt.load(folder)


def flip(folder: Path, name: str, record: str, at: float = 0.5) -> None:
    """Flip a bit in a record of the zip that holds an entry of the checkpoint."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    (place,) = (info for index, info in metadata.storage_data.items() if index.fqn == name)
    path = folder / place.relative_path
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(io.BytesIO(data[place.offset : place.offset + place.length])) as records:
        (info,) = (info for info in records.infolist() if info.filename.partition("/")[2] == record)
    begin = place.offset + info.header_offset
    begin += 30 + sum(int.from_bytes(data[begin + field : begin + field + 2], "little") for field in (26, 28))
    data[begin + int(at * (info.file_size - 1))] ^= 1
    path.write_bytes(data)


def damaged_state() -> dict[str, Any]:
    return {
        "w": torch.arange(10_000_000, dtype=torch.float32),  # five reads
        "small": torch.ones(3),
        "turned": torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "part": torch.arange(1000.0)[100:200],
        "step": 7,
        "object": Ran(),
    }


@pytest.mark.parametrize(
    ("name", "record", "at"),
    [
        ("w", "data/0", 0.0),
        ("w", "data/0", 0.5),
        ("w", "data/0", 1.0),
        ("w", "data.pkl", 0.9),
        ("small", "data/0", 0.5),
        ("turned", "data/0", 0.5),
        ("part", "data/0", 0.5),
        ("step", "data.pkl", 0.9),
        ("object", "data.pkl", 0.5),
    ],
)
def test_a_flipped_bit_is_an_error_of_load_and_restore_that_names_it(tmp_path, name, record, at):
    folder = of_torch(damaged_state(), tmp_path / "x")
    flip(folder, name, record, at)

    with pytest.raises(CorruptCheckpointError, match=r"distcp: at byte .*; fetch it again") as caught:
        async_ckpt.load(folder, trust=True)
    if record != "data.pkl" or name in ("step", "object"):
        assert caught.value.tensors == (name,)
    with pytest.raises(CorruptCheckpointError, match="at byte"):
        restore({**damaged_state(), "step": 0}, folder, trust=True)
    others = sorted(damaged_state().keys() - {name})
    assert async_ckpt.load(folder, select=others, trust=True).keys() == {*others}


def test_a_flipped_bit_is_not_looked_for_with_verify_false(tmp_path):
    folder = of_torch(damaged_state(), tmp_path / "x")
    for name in ("w", "turned"):
        flip(folder, name, "data/0")

    loaded = async_ckpt.load(folder, select=["w", "turned", "step"], verify=False)

    assert (loaded["w"] != damaged_state()["w"]).sum() == 1
    assert (loaded["turned"] != damaged_state()["turned"]).sum() == 1
    assert loaded["step"] == 7


@pytest.mark.parametrize("at", [0.1, 0.9])
def test_whoever_takes_a_part_of_an_entry_compares_all_of_it(tmp_path, at):
    folder = of_torch({"w": torch.ones(5000, 1000)}, tmp_path / "x")
    flip(folder, "w", "data/0", at)

    with pytest.raises(CorruptCheckpointError, match="which has w, does not match its checksum"):
        restore({"w": ShardedTensor.of("w", torch.zeros(500, 1000), (0, 4, 10))}, folder)
    live = {"w": ShardedTensor.of("w", torch.zeros(500, 1000), (0, 4, 10))}
    restore(live, folder, verify=False)
    assert bool((live["w"].data == 1).all())


def test_an_entry_that_was_compared_is_read_by_ranges_from_then_on(tmp_path, num_read):
    num_bytes = 5000 * 1000 * 4
    folder = of_torch({"w": torch.ones(5000, 1000)}, tmp_path / "x")
    memory = torch.empty(4096, dtype=torch.uint8)

    def read_some(parts: Sequence[Part]) -> list[int]:
        sizes = []
        for begin in range(0, num_bytes, num_bytes // 8):
            before = sum(num_read.values())
            read_ranges([Range(parts[0].archive, 0, begin, 4096, 0)], memory)
            sizes.append(sum(num_read.values()) - before)
        return sizes

    first, *others = from_path(folder, read_some, verify=True)

    assert num_bytes <= first < num_bytes + (64 << 10)
    assert max(others) < 64 << 10


def test_pieces_are_compared_in_any_order_and_after_reads_that_ended_early():
    for seed in range(100):
        draw = random.Random(seed)
        data = draw.randbytes(draw.randrange(1, 5000))
        image, crc = memoryview(b"before" + data + b"after"), zlib.crc32(data)
        checks = [RecordCheck("w", ZipRecord("data/0", 6, len(data), crc ^ wrong)) for wrong in (0, 1)]

        def pieces(draw: random.Random, size: int) -> list[tuple[int, int]]:
            cuts = sorted({0, size, *(draw.randrange(6, size - 5) for _ in range(draw.randrange(7)))})
            return draw.sample(pairs := [*itertools.pairwise(cuts)], len(pairs))

        early, rest = pieces(draw, len(image)), pieces(draw, len(image))
        results = [[check.matches(begin, image[begin:end]) for begin, end in early[1:] + rest] for check in checks]

        assert all(results[0])
        assert not all(results[1])
        assert [check.is_done for check in checks] == [True, False]


def test_a_tensor_of_another_shape_than_the_metadata_says_is_refused(tmp_path):
    small, large = (
        of_torch({"w": torch.ones(4)}, tmp_path / "x"),
        of_torch({"w": torch.ones(5)}, tmp_path / "y"),
    )
    data = pickle.loads((large / ".metadata").read_bytes())
    blob = next(iter(pickle.loads((small / ".metadata").read_bytes()).storage_data.values()))
    data.storage_data = dict.fromkeys(data.storage_data, blob)
    (small / ".metadata").write_bytes(pickle.dumps(data))
    with pytest.raises(CorruptCheckpointError, match="not of the shape or dtype"):
        async_ckpt.load(small)


def test_a_gap_names_the_tensor(tmp_path):
    folder = of_torch({"w": torch.ones(4, 2)}, tmp_path / "x")
    data = pickle.loads((folder / ".metadata").read_bytes())
    data.state_dict_metadata["w"].size = torch.Size([6, 2])
    (folder / ".metadata").write_bytes(pickle.dumps(data))
    with pytest.raises(CorruptCheckpointError, match=r"w: \[4:6, 0:2\] of shape \[6, 2\] is in none"):
        async_ckpt.load(folder)


def test_what_was_written_through_extensions_is_refused_by_name(tmp_path):
    folder = of_torch({"w": torch.ones(4)}, tmp_path / "x")
    data = pickle.loads((folder / ".metadata").read_bytes())
    for info in data.storage_data.values():
        info.transform_descriptors = ["stream.zstd"]
    (folder / ".metadata").write_bytes(pickle.dumps(data))
    with pytest.raises(CorruptCheckpointError, match=r"extensions \(\['stream.zstd'\]\); load it with torch"):
        async_ckpt.load(folder)


def test_no_run_takes_it_for_a_step(tmp_path):
    folder = of_torch({"w": torch.ones(4)}, tmp_path / "run")
    with open_run(folder) as ckpt, pytest.warns(RuntimeWarning, match=r"integrations\.dcp\.restore"):
        assert ckpt.restore({"w": torch.zeros(4)}) is None


# --- what torch reads ---------------------------------------------------------------------------------------------


def test_a_step_becomes_a_folder_that_torch_loads(tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "_BATCH_BYTES", 100)
    monkeypatch.setattr(convert, "_FILE_BYTES", 4000)
    state = {**training(), "kinds": {name: one.detach() for name, one in KINDS.items()}}
    with open_run(tmp_path / "run") as ckpt:
        ckpt.save(state, 1).result()

    to_dcp(tmp_path / "run", tmp_path / "x")

    assert len(list((tmp_path / "x").glob("*.distcp"))) > 2
    assert difference(plain(by_torch(emptied(state), tmp_path / "x")), plain(state)) is None
    assert difference(plain(async_ckpt.load(tmp_path / "x")), plain(state)) is None


def test_a_part_of_a_step_becomes_a_folder(tmp_path):
    state = training()
    async_ckpt.save(state, tmp_path / "x.tar").result()
    to_dcp(tmp_path / "x.tar", tmp_path / "x", select="model")
    loaded = async_ckpt.load(tmp_path / "x")
    assert [*loaded] == ["model"]
    assert difference(plain(loaded["model"]), plain(state["model"])) is None
    with pytest.raises(KeyError, match="matches nothing"):
        to_dcp(tmp_path / "x.tar", tmp_path / "y", select="models")


def test_torchs_converter_reads_that_folder(tmp_path):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    state = training()
    async_ckpt.save(state, tmp_path / "x.tar").result()
    to_dcp(tmp_path / "x.tar", tmp_path / "x")
    dcp_to_torch_save(tmp_path / "x", tmp_path / "x.pt")
    assert difference(plain(torch.load(tmp_path / "x.pt")), plain(state)) is None


def test_a_folder_with_a_checkpoint_is_not_written_to(tmp_path):
    async_ckpt.save({"w": torch.ones(1)}, tmp_path / "x.tar").result()
    to_dcp(tmp_path / "x.tar", tmp_path / "x")
    with pytest.raises(FileExistsError, match="give another folder"):
        to_dcp(tmp_path / "x.tar", tmp_path / "x")


def test_a_conversion_that_fails_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "_BATCH_BYTES", 4)
    monkeypatch.setattr(convert, "_FILE_BYTES", 100)
    state = {"n": 1, "w": torch.ones(4), "v": torch.ones(4 << 20)}
    async_ckpt.save(state, tmp_path / "x.tar").result()
    data = bytearray((tmp_path / "x.tar").read_bytes())
    data[9 << 20] ^= 1
    (tmp_path / "x.tar").write_bytes(data)
    monkeypatch.setattr(convert, "_BATCH_BYTES", 4 << 20)
    with pytest.raises(CorruptCheckpointError):
        to_dcp(tmp_path / "x.tar", tmp_path / "x")
    assert not (tmp_path / "x").exists() or os.listdir(tmp_path / "x") == []


def test_a_conversion_may_go_to_a_store(bucket, tmp_path):
    state = training()
    async_ckpt.save(state, tmp_path / "x.tar").result()
    to_dcp(tmp_path / "x.tar", bucket.place("x"))
    (tmp_path / "x").mkdir()
    for key in list(bucket.keys()):
        (tmp_path / key).write_bytes(bucket.read(key))
    assert difference(plain(by_torch(emptied(state), tmp_path / "x")), plain(state)) is None


def test_the_pieces_are_what_torch_save_writes(tmp_path):
    async_ckpt.save({"w": torch.ones(4)}, tmp_path / "x.tar").result()
    to_dcp(tmp_path / "x.tar", tmp_path / "x")
    assert zipfile.is_zipfile(tmp_path / "x" / "__0_0.distcp")
