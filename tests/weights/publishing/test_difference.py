"""Frames: what a tensor's bytes become by them, and by those that lie; and what an index may say."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
import xxhash
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from states import MIB

from async_ckpt.weights import delta
from async_ckpt.weights.delta import DeltaFields, VersionIndex, folder_of, identity_of, parse, structure_of, version_of
from async_ckpt.weights.publishing import difference
from async_ckpt.weights.publishing.difference import WrongBaseError, apply, checksum_of, encode

ENCODINGS: list[Any] = ["xor", "overwrite"]


def region(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def packed(data: bytes) -> memoryview:
    return memoryview(zstandard.ZstdCompressor().compress(data))


@given(
    old=st.binary(min_size=1, max_size=300),
    changes=st.lists(st.tuples(st.integers(0, 299), st.integers(0, 255))),
    encoding=st.sampled_from(ENCODINGS),
)
def test_what_is_encoded_is_applied_and_undone_to_the_bit(old, changes, encoding):
    new = bytearray(old)
    for at, value in changes:
        new[at % len(new)] = value
    made = encode(region(bytes(new)), region(old), encoding)
    if new == old:
        assert made is None
        return
    assert made is not None
    frame, wanted = made
    assert wanted == xxhash.xxh3_128_hexdigest(bytes(new))
    target = region(old)
    undo = apply(memoryview(frame), target, encoding, wanted)
    assert bytes(target.tolist()) == bytes(new)
    undo()
    assert bytes(target.tolist()) == old


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("size", [MIB - 1, MIB, 4 * MIB + 3, 9 * MIB])
def test_large_tensors_go_by_pieces(encoding, size):
    old = torch.randint(0, 256, (size,), dtype=torch.uint8)
    new = old.clone()
    new[::997] ^= 1
    new[-1] ^= 1
    made = encode(new, old, encoding)
    assert made is not None
    target = old.clone()
    undo = apply(memoryview(made[0]), target, encoding, made[1])
    assert torch.equal(target, new)
    undo()
    assert torch.equal(target, old)
    assert made[1] == checksum_of(new)
    assert len(made[0]) < size / 50


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_frame_whose_every_byte_is_damaged_in_turn_changes_nothing(encoding):
    old = torch.randint(0, 256, (500,), dtype=torch.uint8)
    new = old.clone()
    new[::50] ^= 7
    made = encode(new, old, encoding)
    assert made is not None
    for at in range(len(made[0])):
        frame = bytearray(made[0])
        frame[at] ^= 0x11
        target = old.clone()
        try:
            apply(memoryview(frame), target, encoding, made[1])
        except WrongBaseError:
            assert torch.equal(target, old)
        else:
            assert torch.equal(target, new)  # a bit of the frame that means nothing


@pytest.mark.parametrize(
    ("encoding", "plain", "told"),
    [
        ("xor", bytes(9), "longer than the tensor"),
        ("xor", bytes(7), "shorter than the tensor"),
        ("xor", bytes(8), "do not have the checksum"),
        ("xor", b"", "shorter than the tensor"),
        ("overwrite", b"", "as many positions"),
        ("overwrite", b"\x01\0\0\0" + b"\0\0\0\0", "as many positions"),
        ("overwrite", b"\x01\0\0\0" + b"\x08\0\0\0" + b"x", "outside of the tensor"),
        ("overwrite", b"\x01\0\0\0" + b"\xff\xff\xff\xff" + b"x", "outside of the tensor"),
        ("overwrite", b"\xff\xff\xff\xff", "as many positions"),
        ("overwrite", bytes(1000), "longer than the tensor"),
        ("overwrite", b"\x01\0\0\0" + b"\x07\0\0\0" + b"x", "do not have the checksum"),
    ],
)
def test_a_frame_that_lies_is_told_of_and_changes_nothing(encoding, plain, told):
    old = torch.arange(8, dtype=torch.uint8)
    target = old.clone()
    with pytest.raises(WrongBaseError, match=told):
        apply(packed(plain), target, encoding, "0" * 32)
    assert torch.equal(target, old)


def test_a_frame_that_unpacks_to_gigabytes_is_given_up_early():
    frame = packed(bytes(2**26))
    for encoding in ENCODINGS:
        with pytest.raises(WrongBaseError, match="longer than the tensor"):
            apply(frame, torch.zeros(8, dtype=torch.uint8), encoding, "0" * 32)


def test_what_is_no_frame_is_told_of():
    for encoding in ENCODINGS:
        with pytest.raises(WrongBaseError, match="the frame is damaged"):
            apply(memoryview(b"no frame at all"), torch.zeros(8, dtype=torch.uint8), encoding, "0" * 32)


def test_positions_have_four_bytes_and_a_larger_tensor_is_refused(monkeypatch):
    monkeypatch.setattr(difference, "MAX_OVERWRITTEN_BYTES", 16)
    old, new = torch.zeros(17, dtype=torch.uint8), torch.ones(17, dtype=torch.uint8)
    with pytest.raises(ValueError, match='use "xor"'):
        encode(new, old, "overwrite")
    assert encode(new, old, "xor") is not None
    assert encode(new[:16], old[:16], "overwrite") is not None


# --- the index ----------------------------------------------------------------------------------------------------


def test_folders_are_named_by_versions_and_nothing_else_is_one():
    for version in (0, 7, 999_999, 1_000_000, 10**12):
        assert version_of(folder_of(version)) == version
    for name in (
        "weight_v7",
        "weight_v0000007",
        "weight_v00000x",
        "weight_v000001.tmp",
        ".weight_v000001",
        "latest",
    ):
        assert version_of(name) is None


def told_of(number: int) -> str:
    """What could be a checksum."""
    return f"{number:032x}"


ANCHOR = VersionIndex(
    5,
    {"a": "x.safetensors"},
    identity=told_of(1),
    structure=told_of(2),
    checksums={"a": told_of(3)},
    digests={"config.json": told_of(4)},
)
CHANGE = VersionIndex(
    6, {"a": "x.safetensors"}, DeltaFields(5, "xor", base_identity=told_of(1)), identity=told_of(5), structure=told_of(2),
    digests={"x.safetensors": told_of(6)},
)  # fmt: skip


def dumped(index: VersionIndex) -> bytes:
    """As a publisher dumps it; with more in its metadata, as anchors have."""
    told = {"metadata": {"total_size": 3, **index.metadata()}, "weight_map": dict(index.files)}
    return delta.seal(json.dumps(told).encode())


def test_an_index_is_what_was_written():
    assert parse(dumped(ANCHOR), 5) == replace(ANCHOR, is_sealed=True)
    assert parse(delta.dump_delta(CHANGE), 6) == replace(CHANGE, is_sealed=True)
    assert (ANCHOR.is_anchor, CHANGE.is_anchor) == (True, False)


@pytest.mark.parametrize("index", [ANCHOR, CHANGE], ids=["anchor", "delta"])
def test_an_index_of_which_a_bit_is_flipped_is_refused_or_says_the_same_or_is_nobodys(index):
    """Where the flip hides that it is ours, nothing of what only a publisher writes is believed, and a delta stays a delta."""
    data = dumped(index)
    for at in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[at // 8] ^= 1 << at % 8
        try:
            found = parse(bytes(flipped), index.version)
        except ValueError:
            continue
        assert not found.is_sealed
        assert not found.identity
        assert found.is_anchor == index.is_anchor or b'"metadata"' not in flipped


def test_an_index_of_a_release_before_is_read_if_it_holds_together():
    for index in (ANCHOR, CHANGE):
        told = json.loads(dumped(index))
        ours = told["metadata"]["async_ckpt"]
        for key in ("digest", "heads"):
            ours.pop(key, None)
        assert parse(json.dumps(told).encode(), index.version) == index
        for key in ("identity", "structure", "checksums", "base_identity", "digests"):
            less = json.loads(json.dumps(told))
            if less["metadata"]["async_ckpt"].pop(key, None) and not (key == "digests" and index.is_anchor):
                with pytest.raises(ValueError, match=r"."):
                    parse(json.dumps(less).encode(), index.version)
        ours["digesu"] = "0" * 32
        with pytest.raises(ValueError, match="no digest of itself"):
            parse(json.dumps(told).encode(), index.version)


@pytest.mark.parametrize(
    "told",
    [
        "", "[]", "{}", "null", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": "/etc/passwd"}}',
        '{"weight_map": {"a": "x/../../y"}}', '{"weight_map": {}, "metadata": 3}', '{"weight_map": {}, "metadata": {"version": "x"}}',
        '{"weight_map": {}, "metadata": {"delta_encoding": "xor"}}', "[" * 100_000,
        '{"weight_map": {}, "metadata": {"async_ckpt": {"digests": {"../x": "1"}}}}',
        '{"weight_map": {}, "metadata": {"async_ckpt": 3}}', '{"weight_map": {"a": "\\ud800.safetensors"}}',
        '{"weight_map": {"\\ud800": "x.safetensors"}}', '{"weight_map": {"a": ".Weight_Sync/x"}}', '{"weight_map": {"a": null}}',
        '{"weight_map": {}, "metadata": {"compression_format": "zstd"}}', '{"weight_map": {}, "metadata": {"version": 5.0}}',
        '{"weight_map": {}, "metadata": {"async_ckpt": {"digest": "x"}}}', '{"weight_map": {}, "metadata": {"async_ckpt": null}}',
        ('{"weight_map": {}, "metadata": {"delta_encoding": "xor", "base_version": "-1", "compression_format": "zstd", '
        '"checksum_format": "xxh3-128"}}'),
    ],
)  # fmt: skip
def test_an_index_that_lies_is_a_value_error(told):
    with pytest.raises(ValueError, match=r"."):
        parse(told.encode(), 5)


def test_one_digest_is_of_all_weights_and_one_of_their_names_dtypes_and_shapes():
    assert identity_of({"a": "1", "b": "2"}) == identity_of({"b": "2", "a": "1"})
    assert len({identity_of(c) for c in ({"a": "1"}, {"a": "2"}, {"b": "1"}, {}, {"a": "1", "b": ""})}) == 5
    rows: list[Any] = [("a", "float32", (2, 3)), ("b", "float32", ())]
    assert structure_of(rows) == structure_of(rows[::-1])
    others: list[Any] = [("a", "float32", (3, 2)), ("a", "int32", (2, 3)), ("c", "float32", (2, 3))]
    assert len({structure_of([row, rows[1]]) for row in [rows[0], *others]}) == 4
