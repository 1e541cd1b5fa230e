"""No tar does harm: what is hostile, too large or broken is a CheckpointError and leaves nothing."""

import contextlib
import gzip
import os
import random
import shutil
import struct
import tarfile
import tempfile
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from archives import little_memory
from disks import mounted, needs_mount
from hypothesis import given, settings
from hypothesis import strategies as st
from states import MIB
from tarballs import member, plain_tar

from async_ckpt import (
    CheckpointError,
    CorruptCheckpointError,
    NotCommittedError,
    StorageFullError,
    UnsafeArchiveError,
    unpack,
)
from async_ckpt.core.format.zstd import Follower
from async_ckpt.files import extract

zstandard = pytest.importorskip("zstandard")

posix = pytest.mark.skipif(os.name != "posix", reason="links, modes and tar as POSIX has them")
pytestmark = posix


def link(name: str, target: str) -> Any:
    return member(name, kind=tarfile.SYMTYPE, link=target)


def hard(name: str, target: str) -> Any:
    return member(name, kind=tarfile.LNKTYPE, link=target)


def block(name: bytes, size: int, kind: bytes) -> bytes:
    """A header that `tarfile` would not write."""
    raw = bytearray(512)
    raw[: len(name)] = name
    raw[100:108] = b"0000644\0"
    raw[108:124] = b"0000000\0" * 2
    raw[124:136] = b"%011o\0" % size if 0 <= size < 8**11 else size.to_bytes(12, "big", signed=True)
    if size >= 8**11:
        raw[124] = 0x80
    raw[136:148] = b"00000000000\0"
    raw[156:157] = kind
    raw[257:265] = b"ustar\00000"
    return seal(raw)


def seal(raw: bytearray) -> bytes:
    raw[148:156] = b" " * 8
    raw[148:156] = b"%06o\0 " % sum(raw)
    return bytes(raw)


def record(key: str, value: str) -> bytes:
    body = f" {key}={value}\n".encode()
    length = len(body)
    while len(str(length)) + len(body) != length:
        length = len(str(length)) + len(body)
    return str(length).encode() + body


def pax(records: bytes, kind: bytes = b"x") -> bytes:
    return block(b"././@PaxHeader", len(records), kind) + records + bytes(-len(records) % 512)


def file_member(name: bytes = b"x", data: bytes = b"") -> bytes:
    return block(name, len(data), b"0") + data + bytes(-len(data) % 512)


END = bytes(1024)


def refused(
    place: Path,
    data: bytes,
    error: type[BaseException] = UnsafeArchiveError,
    why: str | None = None,
    **limits: Any,
) -> BaseException:
    """The archive is refused with this error, and nothing of it is left anywhere."""
    (place / "x.tar").write_bytes(data)
    with pytest.raises(error, match=why) as caught:
        extract(place / "x.tar", place / "out", **limits)
    assert isinstance(caught.value, CheckpointError)
    assert os.listdir(place) == ["x.tar"]
    assert sorted(os.listdir(place.parent)) == ["outside", "place"]
    assert (place.parent / "outside").read_text() == "untouched"
    return caught.value


# --- what would do harm ----------------------------------------------------------------------------------------

HOSTILE: dict[str, tuple[list[Any], str]] = {
    "absolute name": ([member("/tmp/x", b"y")], "absolute"),
    "several slashes": ([member("//x", b"y")], "absolute"),
    "parent": ([member("../outside", b"y")], "leads out"),
    "parent of a folder": ([member("a/../../outside", b"y")], "leads out"),
    "parent that stays inside": ([member("a/../b", b"y")], "leads out"),
    "folder outside": ([member("..", kind=tarfile.DIRTYPE)], "leads out"),
    "link to an absolute path": ([link("a", "/etc/passwd")], "out of the folder"),
    "link to the parent": ([link("a", "..")], "out of the folder"),
    "link out from below": ([link("a/b", "../../outside")], "out of the folder"),
    "file through a link": ([link("a", "b"), member("a/c", b"y")], "behind a link"),
    "file through a link to the folder itself": (
        [link("a", "."), member("a/outside", b"y")],
        "behind a link",
    ),
    "link through a link": ([link("a", "."), link("a/b", "..")], "behind a link"),
    "file over a link": ([link("a", "b"), member("a", b"y")], "already there"),
    "folder over a link": ([link("a", "b"), member("a", kind=tarfile.DIRTYPE)], "already there"),
    "link over a folder": ([member("a/b", b""), link("a", "b")], "already there"),
    "link over an empty folder": ([member("a", kind=tarfile.DIRTYPE), link("a", "b")], "already there"),
    "file over a file": ([member("a", b"1"), member("./a", b"2")], "already there"),
    "folder over a file": ([member("a", b"1"), member("a", kind=tarfile.DIRTYPE)], "already there"),
    "file in a file": ([member("a", b"1"), member("a/b", b"2")], "inside a file"),
    "file in the place of the folder": ([member(".", b"1")], "already there"),
    "link in the place of the folder": ([link("./", "a")], "already there"),
    "links of links": (
        [member("a/b", kind=tarfile.DIRTYPE), link("s", "a/b"), link("t", "s/../../outside")],
        "out of the folder",
    ),
    "hard link out": ([hard("a", "../outside")], "not an earlier file"),
    "hard link to an absolute path": ([hard("a", "/etc/passwd")], "not an earlier file"),
    "hard link to what comes later": ([hard("a", "b"), member("b", b"y")], "not an earlier file"),
    "hard link to a link": ([link("b", "c"), hard("a", "b")], "not an earlier file"),
    "hard link through a link": (
        [member("d/c", b"y"), link("b", "d"), hard("a", "b/c")],
        "not an earlier file",
    ),
    "hard link to a folder": ([member("b", kind=tarfile.DIRTYPE), hard("a", "b")], "not an earlier file"),
    "hard link to itself": ([hard("a", "a")], "not an earlier file"),
    "hard link to the folder": ([hard("a", ".")], "not an earlier file"),
    "hard link, then through it": ([member("b", b"y"), hard("a", "b"), member("a", b"z")], "already there"),
    "pipe": ([member("a", kind=tarfile.FIFOTYPE)], "device, a pipe"),
    "character device": ([member("a", kind=tarfile.CHRTYPE, devmajor=1, devminor=3)], "device, a pipe"),
    "block device": ([member("a", kind=tarfile.BLKTYPE)], "device, a pipe"),
    "something unknown": ([member("a", kind=b"Z")], "device, a pipe"),
    "a very long name": ([member("a/" * 3000, b"y")], "too long"),
}


@pytest.mark.parametrize("case", HOSTILE)
@pytest.mark.parametrize("after", [[], [member("first", b"harmless")]], ids=["alone", "behind a harmless one"])
def test_a_member_that_would_do_harm_is_refused_by_name(place, case, after):
    members, why = HOSTILE[case]
    error = refused(place, plain_tar([*after, *members]), UnsafeArchiveError, why)

    assert error.path == str(place / "x.tar")
    assert error.member in [info.name[:200] for info, _ in members]
    assert "people you trust" in str(error)


def test_links_of_links_whose_path_is_too_long_to_follow_do_not_lead_out(place):
    """CVE-2025-4517: where a path is longer than the system takes, realpath(3) stops looking at links."""
    room = 4096 - len(os.fsencode(place)) - 64  # for the names of the 16 folders, which are all made
    step, members, path = "d" * min(247, room // 16 - 1), [], ""
    for letter in "abcdefghijklmnop":
        members += [member(path + step, kind=tarfile.DIRTYPE), link(path + letter, step)]
        path += step + "/"
    long = "/".join("abcdefghijklmnop") + "/" + "l" * 254
    members += [
        link(long, "../" * 16),
        link("escape", long + "/../../outside"),
        hard("flag", "escape"),
        member("flag", b"overwritten"),
    ]
    refused(place, plain_tar(members), UnsafeArchiveError)


def test_a_link_may_go_up_as_far_as_the_folder_and_no_farther(place):
    inside = [member("a/b/c", b"y"), link("a/b/l", "../../a/b/c"), link("a/top", ".."), link("self", "self")]
    (place / "ok.tar").write_bytes(plain_tar(inside))
    extract(place / "ok.tar", place / "ok")
    assert (place / "ok/a/b/l").read_bytes() == b"y"
    shutil.rmtree(place / "ok")
    (place / "ok.tar").unlink()

    refused(place, plain_tar([*inside, link("a/b/m", "../../../outside")]), why="out of the folder")


@pytest.mark.parametrize(
    "target", ["", "l" * 5000, "/".join(["l"] * 2500)], ids=["nothing", "a long name", "a long path"]
)
@pytest.mark.parametrize(
    "later",
    [[member("a", kind=tarfile.FIFOTYPE)], [member("a", b"y" * 100)], [member("l" * 5000, kind=tarfile.FIFOTYPE)]],
    ids=["a pipe", "a file", "a pipe of that name"],
)
def test_nothing_is_put_in_the_place_of_a_link_that_cannot_be_made(place, target, later):
    """`tarfile` would extract a later member there, which nobody has checked."""
    members = [member("a", kind=tarfile.DIRTYPE), link("a/x", target), *later]
    refused(place, plain_tar(members), CorruptCheckpointError, "cannot be created")


def test_headers_behind_a_link_that_cannot_be_made_take_no_memory(place):
    with little_memory(64 * MIB):
        refused(
            place,
            plain_tar([link("x", "")])[:512] + block(b"y", 2**62, b"x"),
            CorruptCheckpointError,
            "cannot be created",
        )


def test_a_name_with_a_nul_in_it_is_no_name(place):
    refused(place, pax(record("path", "a\0b")) + file_member() + END, CorruptCheckpointError)


# --- too much of it --------------------------------------------------------------------------------------------

PACKED = {"plain": bytes, "gzip": gzip.compress, "zstd": zstandard.compress}


@pytest.mark.parametrize("packed", PACKED.values(), ids=PACKED)
def test_limits_are_of_what_comes_out(place, packed):
    data = packed(plain_tar([member("a", bytes(3 * MIB)), member("b", bytes(2 * MIB))]))
    refused(place, data, why=r"'b' exceeds max_bytes=5,000,000; raise the limit", max_bytes=5_000_000)
    refused(place, data, why="'a' exceeds max_file_bytes", max_file_bytes=3 * MIB - 1)
    refused(place, data, why="'b' exceeds max_members=1", max_members=1)
    extract(place / "x.tar", place / "out", max_bytes=5 * MIB, max_file_bytes=3 * MIB, max_members=2)


def test_folders_that_come_along_with_a_member_count_as_members(place):
    refused(place, plain_tar([member("a/" * 20 + "b", b"")]), why="max_members=20", max_members=20)
    refused(place, plain_tar([member(f"a{i}/b", b"") for i in range(6)]), why="max_members", max_members=11)
    extract(place / "x.tar", place / "out", max_members=12)


def zeros(num_bytes: int) -> Iterator[bytes]:
    for at in range(0, num_bytes, MIB):
        yield bytes(min(MIB, num_bytes - at))


def packed_stream(pieces: Iterator[bytes], how: str) -> bytes:
    if how == "gzip":
        compressor = zlib.compressobj(9, wbits=31)
        return b"".join(map(compressor.compress, pieces)) + compressor.flush()
    out = zstandard.ZstdCompressor(write_checksum=True).compressobj()
    return b"".join(map(out.compress, pieces)) + out.flush()


@pytest.mark.parametrize("how", ["gzip", "zstd"])
def test_what_is_packed_into_very_little_takes_neither_memory_nor_more_of_the_disk_than_allowed(place, how):
    size = 256 * MIB

    def bomb() -> Iterator[bytes]:
        yield block(b"weights", size, b"0")
        yield from zeros(size)
        yield END

    data = packed_stream(bomb(), how)
    assert len(data) < size // 500
    refused(place, data, why="max_bytes", max_bytes=size - 1)
    refused(place, data, why="max_file_bytes", max_file_bytes=size - 1)
    tracemalloc.start()
    try:
        extract(place / "x.tar", place / "out")
        assert tracemalloc.get_traced_memory()[1] < 32 * MIB
    finally:
        tracemalloc.stop()
    assert (place / "out/weights").stat().st_size == size


def test_more_than_the_disk_has_is_refused_before_a_byte_is_written(place):
    error = refused(place, block(b"weights", 1 << 50, b"0"), StorageFullError)

    assert error.needed_bytes == 1 << 50
    assert 0 < error.free_bytes < 1 << 50
    refused(place, block(b"weights", 1 << 80, b"0"), StorageFullError)


@needs_mount
@pytest.mark.parametrize("packed", PACKED.values(), ids=PACKED)
def test_a_disk_that_runs_full_leaves_nothing(tmp_path, packed):
    members = [member(f"{number:02}", os.urandom(MIB)) for number in range(12)]
    (tmp_path / "x.tar").write_bytes(packed(plain_tar(members)))
    with mounted(tmp_path / "small", "size=8m") as small:
        with pytest.raises(StorageFullError) as caught:
            extract(tmp_path / "x.tar", small / "out")
        assert caught.value.needed_bytes == MIB
        with pytest.raises(StorageFullError), unpack(tmp_path / "x.tar", scratch=small):
            pytest.fail("it was entered")
        assert os.listdir(small) == []


def test_a_file_of_holes_takes_no_room_but_counts_whole(place):
    runs = record("GNU.sparse.major", "1") + record("GNU.sparse.minor", "0")
    head = pax(runs + record("GNU.sparse.name", "holes") + record("GNU.sparse.realsize", str(1 << 40)))
    data = head + file_member(b"x", b"0\n".ljust(512, b"\0")) + END
    refused(place, data, why="max_bytes", max_bytes=1 << 39)
    extract(place / "x.tar", place / "out")
    assert (place / "out/holes").stat().st_size == 1 << 40
    assert (place / "out/holes").stat().st_blocks == 0


@pytest.mark.parametrize(
    ("runs", "size"),
    [
        ("1\n0\n4096\n", 10),  # more data than the file has
        ("1\n1000000\n512\n", 10),  # data behind its end
        ("2\n0\n512\n0\n512\n", 4096),  # the same place twice
        ("2\n1024\n512\n0\n512\n", 4096),  # backwards
        ("1\n-512\n512\n", 4096),
        ("1\n0\n-512\n", 4096),
        ("1000000000000\n", 4096),
        ("-1\n", 4096),
        ("x\n", 4096),
        ("", 4096),
    ],
)
def test_a_map_of_holes_that_lies_is_damage(place, runs, size):
    stored = runs.encode().ljust(512, b"\0") + bytes(8192)
    told = record("GNU.sparse.major", "1") + record("GNU.sparse.minor", "0")
    head = pax(told + record("GNU.sparse.name", "holes") + record("GNU.sparse.realsize", str(size)))
    data = head + file_member(b"x", stored) + END
    (place / "x.tar").write_bytes(data)
    if runs == "-1\n":  # as if there were none
        extract(place / "x.tar", place / "out")
        assert (place / "out/holes").read_bytes() == bytes(size)
    else:
        refused(place, data, CorruptCheckpointError)


def header_bomb(kind: str) -> Iterator[bytes]:
    """Headers that want a GiB of memory, or hours."""
    if kind in ("x", "g", "L", "K"):
        yield block(b"././@LongLink", 1 << 30, kind.encode())
        yield from zeros(1 << 30)
    elif kind == "folders in a name":
        yield pax(record("path", "a/" * 400_000))
    elif kind == "folders in a name of GNU tar":
        yield block(b"././@LongLink", 800_000, b"L") + b"a/" * 400_000 + bytes(-800_000 % 512)
    elif kind == "one behind the other":
        yield pax(record("comment", "x" * 1000)) * 200_000
    elif kind == "global ones":
        for number in range(300):
            yield pax(b"".join(record(f"key{number}.{i}", "v" * 9000) for i in range(100)), b"g")
            yield file_member(b"file%d" % number)
    elif kind == "map of holes":
        told = record("GNU.sparse.major", "1") + record("GNU.sparse.minor", "0")
        yield pax(told + record("GNU.sparse.name", "holes") + record("GNU.sparse.realsize", str(1 << 40)))
        yield block(b"x", 1 << 30, b"0") + b"500000000\n"
        for _ in range(1 << 10):
            yield b"0\n" * (MIB // 2)
    elif kind == "old map of holes":
        raw = bytearray(block(b"holes", 0, b"S"))
        raw[257:265] = b"ustar  \0"
        raw[482] = 1
        raw[483:495] = b"00000000000\0"
        yield seal(raw)
        run = b"00000000001\0" * 2
        for _ in range(1 << 11):
            yield (run * 21 + b"\1".ljust(8, b"\0")) * 1024
    elif kind == "digits":
        yield pax(record("comment", "1" * 500_000))
    elif kind == "digits in a list":
        yield pax(record("comment", ("1" * 300 + " ") * 1000))
    yield file_member() + END


@pytest.mark.parametrize(
    "kind",
    [
        "x",
        "g",
        "L",
        "K",
        "folders in a name",
        "folders in a name of GNU tar",
        "one behind the other",
        "global ones",
        "map of holes",
        "old map of holes",
        "digits",
        "digits in a list",
    ],
)
def test_headers_are_never_larger_than_any_name_and_any_list_of_attributes(place, kind):
    data = packed_stream(header_bomb(kind), "zstd")
    with little_memory():
        refused(place, data, CheckpointError)


@pytest.mark.parametrize("key", ["size", "GNU.sparse.realsize"])
@pytest.mark.parametrize("value", ["-1", "-512", "-1024", "-100000", str(1 << 70), "1e9", "nan", ""])
def test_a_size_that_makes_no_sense_is_refused_or_let_be(place, key, value):
    told = record(key, value)
    if key != "size":
        told += record("GNU.sparse.major", "1") + record("GNU.sparse.minor", "0")
    data = pax(told) + file_member(b"x", b"0\n".ljust(512, b"\0")) + file_member(b"y", b"z" * 700) + END
    (place / "x.tar").write_bytes(data)
    try:
        extract(place / "x.tar", place / "out")
    except CheckpointError:
        assert os.listdir(place) == ["x.tar"]
    else:
        assert value in ("1e9", "nan", "")  # no number: the header's own size counts
        assert (place / "out/y").read_bytes() == b"z" * 700


@pytest.mark.parametrize("size", [-1, -512, -(1 << 40)])
@pytest.mark.parametrize("kind", [b"0", b"x", b"L", b"5", b"S"])
def test_a_header_of_less_than_no_bytes_is_damage(place, size, kind):
    refused(place, block(b"x", size, kind) + bytes(2048), CorruptCheckpointError)


@pytest.mark.parametrize("mtime", ["1e300", "nan", "inf", "-1e30", "x"])
def test_times_that_make_no_sense_do_no_harm(place, mtime):
    (place / "x.tar").write_bytes(pax(record("mtime", mtime)) + file_member(b"a", b"b") + END)
    try:
        extract(place / "x.tar", place / "out")
    except CheckpointError:
        assert os.listdir(place) == ["x.tar"]
    else:
        assert (place / "out/a").read_bytes() == b"b"


# --- what is broken --------------------------------------------------------------------------------------------


def sample() -> bytes:
    """A small archive with every kind of header."""
    return plain_tar(
        [
            member(".", kind=tarfile.DIRTYPE),
            member("größe", b"abc" * 300),
            member("x" * 150, b"y" * 512),
            link("l" * 120, "m" * 120),
            member("empty"),
            member("last", random.Random(1).randbytes(1000)),
        ],
        format=tarfile.PAX_FORMAT,
    )


def end_of_members(data: bytes) -> int:
    """Where the zero blocks at the end begin."""
    at = len(data)
    while not any(data[at - 512 : at]):
        at -= 512
    return at


def test_a_tar_that_is_cut_off_is_damage_wherever_the_cut_is(place):
    data = sample()
    end = end_of_members(data)
    for cut in sorted({*range(0, end + 512, 128), *range(0, end + 512, 511), end + 511}):
        refused(place, data[:cut], CorruptCheckpointError)
    (place / "x.tar").write_bytes(data[: end + 512])  # of the end itself, one block says enough
    extract(place / "x.tar", place / "out")


@pytest.mark.parametrize("records", [b"0 path=x\n", b"30 path=x\n"])
def test_a_wrong_header_of_a_later_member_is_damage_and_not_the_end(place, records):
    """`tarfile` takes it for the end, with records that differ from one Python to the next."""
    refused(place, file_member(b"a", b"b") + pax(records), CorruptCheckpointError)


@pytest.mark.parametrize("packed", [gzip.compress, zstandard.ZstdCompressor(write_checksum=True).compress])
def test_what_is_compressed_and_cut_off_is_damage_wherever_the_cut_is(place, packed):
    data = packed(sample())
    for cut in [*range(8), *range(8, len(data), 17), *range(len(data) - 12, len(data))]:
        refused(place, data[:cut], CorruptCheckpointError)
    (place / "x.tar").write_bytes(data)
    extract(place / "x.tar", place / "out")


@pytest.mark.parametrize("packed", [gzip.compress, zstandard.ZstdCompressor(write_checksum=True).compress])
def test_a_byte_that_is_wrong_in_what_is_compressed_is_damage(place, packed):
    data = packed(plain_tar([member("a", random.Random(2).randbytes(2 * MIB))]))
    for at in (len(data) // 2, len(data) - 2):
        refused(place, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], CorruptCheckpointError)


def test_a_checksum_that_is_wrong_in_the_middle_of_a_member_is_damage(place):
    data = plain_tar([member("a", random.Random(2).randbytes(2 * MIB))])
    first, rest = bytearray(gzip.compress(data[:MIB])), gzip.compress(data[MIB:])
    first[-8] ^= 1
    refused(place, bytes(first) + rest, CorruptCheckpointError)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), min_size=1, max_size=6), st.data())
def test_an_archive_with_any_bytes_wrong_is_extracted_or_a_checkpoint_error(changes, data):
    raw = bytearray(sample())
    for at, value in changes:
        raw[at % len(raw)] = value
    cut = data.draw(st.integers(0, len(raw)) | st.just(len(raw)))
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder)
        (top / "place").mkdir()
        (top / "place/x.tar").write_bytes(raw[:cut])
        with contextlib.suppress(CheckpointError):
            extract(top / "place/x.tar", top / "place/out", max_file_bytes=MIB)
        assert os.listdir(top) == ["place"]
        assert set(os.listdir(top / "place")) <= {"x.tar", "out"}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0",
        bytes(511),
        bytes(512),
        bytes(10240),
        b"x" * 512,
        b"PK\x03\x04" + bytes(600),
        b"BZh9" + bytes(600),
    ],
    ids=["empty", "one zero", "few zeros", "a block of zeros", "zeros", "text", "zip", "bzip2"],
)
@pytest.mark.parametrize("packed", PACKED.values(), ids=PACKED)
def test_what_is_no_archive_is_damage(place, data, packed):
    refused(place, packed(data), CorruptCheckpointError)


def test_archives_one_behind_the_other_are_refused(place):
    one, two = plain_tar([member("a", b"1")]), plain_tar([member("b", b"2")])
    for data in (
        one + two,
        gzip.compress(one) + gzip.compress(two),
        zstandard.compress(one) + zstandard.compress(two),
        one + b"x",
    ):
        refused(place, data, CorruptCheckpointError, "follows the end of the archive")


def test_something_behind_what_is_compressed_is_damage(place):
    data = plain_tar([member("a", b"1")])
    refused(place, gzip.compress(data) + b"x", CorruptCheckpointError)
    refused(place, zstandard.compress(data) + b"xxxx", CorruptCheckpointError)


def test_zeros_behind_the_end_are_no_harm(place):
    data = plain_tar([member("a", b"1")]) + bytes(3 * MIB + 5)
    (place / "x.tar").write_bytes(data)
    assert (extract(place / "x.tar", place / "out") / "a").read_bytes() == b"1"


# --- mere markers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("members", [["MARKER"], ["./MARKER"], [".", "./MARKER"]])
def test_a_mere_marker_is_refused_with_that_reason(place, members):
    sentence = b"Saved with persist=False: this archive holds no weights."
    made = [member(name, kind=tarfile.DIRTYPE) if name == "." else member(name, sentence) for name in members]
    error = refused(place, plain_tar(made), NotCommittedError, "only a marker.*persist=True")

    assert "holds no weights" in str(error)
    assert error.path == str(place / "x.tar")


def test_a_marker_beside_something_is_a_file_like_any_other(tmp_path):
    for number, members in enumerate(([member("MARKER", b"x"), member("weights", b"y")], [member("a/MARKER", b"x")])):
        (tmp_path / "x.tar").write_bytes(plain_tar(members))
        extract(tmp_path / "x.tar", tmp_path / str(number))


# --- where frames end ------------------------------------------------------------------------------------------


def frames() -> list[bytes]:
    unsized = zstandard.ZstdCompressor(write_content_size=False, level=1)
    return [
        zstandard.ZstdCompressor(write_checksum=True).compress(random.Random(4).randbytes(400) + bytes(300_000)),
        unsized.compress(b"abc" * 1000),
        zstandard.compress(b""),
        struct.pack("<II", 0x184D2A50, 0),
        struct.pack("<II", 0x184D2A5F, 20) + bytes(20),
        packed_stream(zeros(2 * MIB), "zstd"),
    ]


@settings(max_examples=60, deadline=None)
@given(st.permutations(range(6)), st.integers(1, 700), st.data())
def test_a_stream_may_end_between_frames_and_nowhere_else(order, step, data):
    chosen = [frames()[number] for number in order]
    stream = b"".join(chosen)
    ends = {sum(map(len, chosen[:number])) for number in range(len(chosen) + 1)}
    cut = data.draw(st.integers(0, len(stream)) | st.sampled_from(sorted(ends)))
    follower = Follower()
    for at in range(0, cut, step):
        follower.feed(stream[at : min(cut, at + step)])

    assert follower.is_whole == (cut in ends)


def test_where_no_frame_begins_none_is_followed():
    with pytest.raises(ValueError, match="that are not a frame"):
        Follower().feed(b"abcd")
