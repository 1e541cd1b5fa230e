"""The archive as bytes: every byte has one owner, everything is aligned, and what is written reads back the same."""

import io
import json
import tarfile
import tracemalloc
from math import prod
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from slices import examples

from async_ckpt.core.format import digests, index, safetensors, tar
from async_ckpt.core.format.layout import MAX_TENSORS_PER_MEMBER, Layout, TensorPlan, _split, lay_out
from async_ckpt.core.spec import BLOCK_BYTES, DTYPES, GIB, MIB, PAGE_BYTES, TensorSpec, align_up

# --- the plan ----------------------------------------------------------------------------------------------------

path_keys = st.one_of(
    st.text(st.characters(codec=None), max_size=6), st.integers(-3, 3), st.sampled_from(["a", "b", "a.b"])
)
# Up to 100 MiB each: nothing is allocated for them.
shapes = st.one_of(
    st.lists(st.integers(0, 9), max_size=4).map(tuple),
    st.tuples(st.integers(0, 3 * MIB)),
)  # fmt: skip


@st.composite
def specs(draw: Any) -> list[TensorSpec]:
    """Tensors of a state; some are tied to an earlier one."""
    paths = draw(
        st.lists(st.lists(path_keys, max_size=3).map(tuple), max_size=12, unique_by=lambda p: tuple(map(repr, p)))
    )
    made: list[TensorSpec] = []
    for path in paths:
        firsts = [i for i, spec in enumerate(made) if spec.alias_of is None and spec.num_bytes]
        if firsts and draw(st.integers(0, 4)) == 0:
            of = draw(st.sampled_from(firsts))
            made.append(TensorSpec(path, made[of].dtype, made[of].shape, of))
        else:
            made.append(TensorSpec(path, draw(st.sampled_from(list(DTYPES))), draw(shapes)))
    return made


segment_sizes = st.integers(1, 10).map(lambda n: n * BLOCK_BYTES)
skeletons = st.text('abc {}"', max_size=10).map(json.dumps)
objects = st.one_of(st.none(), st.binary(max_size=2000), st.just(bytes(5 * MIB)))


def laid_out(tensors: list[TensorSpec], **how: Any) -> Layout:
    return lay_out(TensorPlan(tensors), **{"skeleton": "null", "objects": None, "step": 3, "mtime": 0} | how)


def index_of(layout: Layout) -> index.Index:
    (_, first), *_ = layout.literals
    assert tar.parse_header(first[: tar.BLOCK]) == (index.MEMBER, len(first) - tar.BLOCK)
    return index.parse(first[tar.BLOCK :], path="x.tar")


@settings(max_examples=examples(200), deadline=None)
@given(specs(), segment_sizes, skeletons, objects)
@example([], BLOCK_BYTES, "null", None)
@example([TensorSpec((), "float32", (100 * MIB,))], 8 * BLOCK_BYTES, "null", b"x")
def test_pieces_and_literals_cover_every_byte_exactly_once(tensors, segment_bytes, skeleton, pickled):
    layout = laid_out(tensors, skeleton=skeleton, objects=pickled)
    segments = layout.segments(segment_bytes)
    read = [0] * len(tensors)
    end = 0
    for number, segment in enumerate(segments):
        assert (segment.number, segment.offset) == (number, end)
        at = 0
        owners = [(p.target, p.length) for p in segment.pieces] + [(b, len(view)) for b, view in segment.literals]
        for begin, length in sorted(owners):
            assert begin == at or length == 0
            at += length
        assert at == segment.num_bytes
        for piece in segment.pieces:
            assert piece.length > 0
            assert piece.source == read[piece.tensor]
            read[piece.tensor] += piece.length
        end += segment.num_bytes
    assert end == layout.file_bytes
    assert all(s.num_bytes == segment_bytes for s in segments[:-1])
    assert read == [spec.num_bytes if spec.alias_of is None else 0 for spec in tensors]


@settings(max_examples=examples(200), deadline=None)
@given(specs(), objects)
def test_the_index_says_where_the_layout_puts_everything(tensors, pickled):
    layout = laid_out(tensors, objects=pickled)
    told = index_of(layout)
    assert told.step == 3
    assert told.file_bytes == layout.file_bytes
    assert told.digests == layout.digests
    assert len(told.tensors) == len(tensors)
    placed: dict[int, int] = {}
    for segment in layout.segments(BLOCK_BYTES):
        for piece in segment.pieces:
            placed.setdefault(piece.tensor, segment.offset + piece.target)
    for number, (spec, row) in enumerate(zip(tensors, told.tensors, strict=True)):
        assert (row.dtype, row.shape, row.alias_of) == (spec.dtype, spec.shape, spec.alias_of)
        (piece,) = row.slices
        assert piece.extent.length == spec.num_bytes
        assert piece.extent.offset == placed.get(number, piece.extent.offset) or spec.alias_of is not None


@settings(max_examples=examples(200), deadline=None)
@given(specs())
def test_every_tensor_is_aligned_and_data_begins_on_a_page(tensors):
    layout = laid_out(tensors)
    told = index_of(layout)
    assert layout.file_bytes % PAGE_BYTES == 0
    literals = dict(layout.literals)
    for member in told.members:
        head = literals[member.data.offset - tar.BLOCK]
        assert tar.parse_header(head[: tar.BLOCK]) == (member.name, member.data.length)
        length = int.from_bytes(head[tar.BLOCK : tar.BLOCK + 8], "little")
        assert (member.data.offset + 8 + length) % PAGE_BYTES == 0
    for row in told.tensors:
        assert row.slices[0].extent.offset % DTYPES[row.dtype][0] == 0


@settings(max_examples=examples(200), deadline=None)
@given(specs())
def test_every_member_has_a_header_that_safetensors_readers_take(tensors):
    """No holes, no overlaps, data from 0 to the end, unique names, known codes, a header under the limit."""
    layout = laid_out(tensors)
    told = index_of(layout)
    literals = dict(layout.literals)
    for number, member in enumerate(told.members):
        head = literals[member.data.offset - tar.BLOCK][tar.BLOCK :]
        length = int.from_bytes(head[:8], "little")
        assert len(head) == 8 + length <= safetensors.MAX_HEADER_BYTES
        table = json.loads(head[8:], object_pairs_hook=_no_duplicates)
        metadata = table.pop("__metadata__")
        assert metadata.pop("format") == "pt"
        at = 0
        for begin, end in sorted(row["data_offsets"] for row in table.values()):
            assert begin == at
            at = end
        assert 8 + length + at == member.data.length
        assert all(row["dtype"] in _SAFETENSORS_CODES for row in table.values())
        assert all(len(name.encode()) <= 1024 for name in table)
        assert set(metadata.values()) <= table.keys()
        assert not metadata.keys() & table.keys()
        index.check_member_header(told, number, head, path="x.tar")


_SAFETENSORS_CODES = {
    "BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "F64", "I64", "U64",
}  # fmt: skip


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len({name for name, _ in pairs}) == len(pairs)
    return dict(pairs)


def test_the_cut_follows_when_a_longer_skeleton_moves_the_base():
    plan = TensorPlan([TensorSpec(("m", "w"), "float32", (3 * MIB,)), TensorSpec(("m", "b"), "int8", (7,))])
    for size in (1, 50_000, 1, 5_000_000):
        layout = lay_out(plan, skeleton=json.dumps("x" * size), objects=None, step=None, mtime=0)
        row = index_of(layout).tensors[0]
        first = next(s for s in layout.segments(BLOCK_BYTES) if s.pieces)
        assert first.offset + first.pieces[0].target == row.slices[0].extent.offset
        assert sum(s.num_bytes for s in layout.segments(BLOCK_BYTES)) == layout.file_bytes


def test_a_layout_of_hundreds_of_gigabytes_is_planned_without_them():
    layout = laid_out([TensorSpec(("m", f"w{i}"), "bfloat16", (20 * GIB,)) for i in range(8)])
    told = index_of(layout)
    (member,) = told.members
    assert member.data.length > 320 * GIB
    segments = layout.segments(32 * MIB * 32)
    assert sum(s.num_bytes for s in segments) == layout.file_bytes


# --- names -------------------------------------------------------------------------------------------------------

HOSTILE = [
    "../x", "..", ".", "/etc/passwd", "a/b", "a\\b", "", " ", "-rf", "--help", "con", "NUL", "aux.txt", "C:", "a\nb", "\x00",
    "ü", "😀", "\ud800", "x" * 500, "x" * 501, "x" * 81, "Model", "model", "MODEL", "model~2", "model-00002", "~", "*", "$HOME",
    "index.json", "index", "digests", "objects", ".hidden", "a b", "trailing.", "_", "__", 0, "0", 1.0, None, True, (1, 2),
]  # fmt: skip
# https://learn.microsoft.com/windows/win32/fileio/naming-a-file: whatever follows the first dot.
_RESERVED = {"con", "prn", "aux", "nul", *(f"com{i}" for i in range(10)), *(f"lpt{i}" for i in range(10))}


def test_hostile_group_names_become_safe_unique_member_names():
    told = index_of(laid_out([TensorSpec((key, "w"), "int8", (i,)) for i, key in enumerate(HOSTILE)]))
    names = [member.name for member in told.members]
    assert len(names) == len(HOSTILE)
    assert len({name.lower() for name in names}) == len(HOSTILE)
    for name in names:
        assert name.endswith(".safetensors")
        assert len(name) <= 100
        assert name.isascii()
        assert name.isprintable()
        assert not set(name) & set('/\\:*?"<>|$ ')
        assert name[0] not in ".-~"
        assert name.split(".")[0].lower() not in _RESERVED


def test_hundreds_of_long_names_that_are_cut_alike_stay_apart():
    told = index_of(laid_out([TensorSpec((f"{'x' * 200}{i}", "w"), "int8", (1,)) for i in range(1200)]))
    assert len({m.name for m in told.members}) == 1200
    assert max(len(m.name) for m in told.members) <= 100


def test_tensors_at_the_top_share_one_member_that_no_group_has():
    flat = [TensorSpec(("w",), "int8", (1,)), TensorSpec(("b",), "int8", (1,))]
    assert [m.name for m in index_of(laid_out(flat)).members] == ["model.safetensors"]
    mixed = [*flat, TensorSpec(("model", "w"), "int8", (1,)), TensorSpec(("state", "w"), "int8", (1,))]
    assert sorted(m.name for m in index_of(laid_out(mixed)).members) == [
        "model.safetensors", "state.safetensors", "state~2.safetensors"
    ]  # fmt: skip


def test_more_tensors_than_a_reader_takes_go_into_a_second_member():
    spec = TensorSpec(("x", "w"), "int8", ())
    parts = list(_split(list(range(MAX_TENSORS_PER_MEMBER + 1)), [spec] * (MAX_TENSORS_PER_MEMBER + 1)))
    assert list(map(len, parts)) == [500_000, 1]


def test_names_too_long_for_one_header_go_into_a_second_member():
    tensors = [TensorSpec(("x", f"{i}" * (21 * MIB)), "int8", (i + 1,)) for i in range(2)]
    told = index_of(laid_out(tensors))
    assert [m.name for m in told.members] == ["x.safetensors", "x-00002.safetensors"]
    assert [(t.slices[0].member, t.shape) for t in told.tensors] == [(0, (1,)), (1, (2,))]


# --- tar ---------------------------------------------------------------------------------------------------------

names = st.text("abcXYZ019._-~", min_size=1, max_size=100)


@given(
    names,
    st.one_of(st.integers(0, 2**63), st.sampled_from([8 * GIB - 1, 8 * GIB, 8 * GIB + 1])),
    st.integers(0, 8**11 - 1),
)
@example("x", 8**11 - 1, 0)
@example("x", 8**11, 0)
@example("x" * 100, 2**63, 8**11 - 1)
def test_a_tar_header_reads_back_here_and_in_pythons_own_parser(name, size, mtime):
    block = tar.header(name, size, mtime=mtime)
    assert len(block) == tar.BLOCK
    assert tar.parse_header(block) == (name, size)
    theirs = tarfile.TarInfo.frombuf(block, "ascii", "strict")
    assert (theirs.name, theirs.size, theirs.mtime, theirs.mode) == (name, size, mtime, 0o644)
    assert theirs.isreg()
    assert (theirs.uid, theirs.gid, theirs.uname, theirs.gname) == (0, 0, "root", "root")


@given(names, st.integers(0, 2**40))
def test_a_tar_header_that_python_wrote_reads_back(name, size):
    info = tarfile.TarInfo(name)
    info.size = size
    assert tar.parse_header(info.tobuf(tarfile.GNU_FORMAT)[: tar.BLOCK]) == (name, size)


@given(st.integers(0, tar.BLOCK - 1), st.integers(1, 255))
def test_a_damaged_tar_header_is_never_read_as_another(offset, mask):
    block = bytearray(tar.header("model.safetensors", 123456, mtime=1))
    block[offset] ^= mask
    try:
        parsed = tar.parse_header(bytes(block))
    except ValueError:
        return
    assert parsed == ("model.safetensors", 123456)


@pytest.mark.parametrize(
    "block", [b"", bytes(512), b"x" * 511, b"\xff" * 512, b"x" * 513], ids=lambda b: f"{b[:4]}{len(b)}"
)
def test_what_is_no_tar_header_is_refused(block):
    with pytest.raises(ValueError, match="tar header"):
        tar.parse_header(block)


def test_a_name_that_ustar_cannot_hold_is_refused():
    with pytest.raises(ValueError, match="too long"):
        tar.header("x" * 101, 0, mtime=0)


def test_folders_and_links_are_no_regular_files():
    for kind in (tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE):
        info = tarfile.TarInfo("x")
        info.type = kind
        with pytest.raises(ValueError, match="regular"):
            tar.parse_header(info.tobuf(tarfile.USTAR_FORMAT)[: tar.BLOCK])


# --- safetensors header ------------------------------------------------------------------------------------------


@given(
    st.integers(0, 10_000),
    st.sampled_from([8, 512, 4096]),
    st.text(max_size=50).filter(lambda name: name != safetensors.RESERVED_NAME),  # which no layout gives a tensor
)
def test_a_safetensors_header_ends_where_it_is_asked_to(at, modulo, name):
    entry = safetensors.Entry(name or "w", "float32", (2, 3), 0, 24)
    head = safetensors.header([entry], {"format": "pt"}, header_bytes_modulo=modulo, at=at)
    assert (at + len(head)) % modulo == 0
    assert int.from_bytes(head[:8], "little") == len(head) - 8
    assert safetensors.parse_header(head + b"data") == ({entry.name: ("F32", [2, 3], 0, 24)}, {"format": "pt"})


def test_a_dtype_that_safetensors_lacks_is_stored_as_bytes():
    assert safetensors.stored_as("complex64", (2, 3)) == ("U8", [2, 3, 8])
    assert safetensors.stored_as("float32", ()) == ("F32", [])
    for name, (item_bytes, code) in DTYPES.items():
        told, shape = safetensors.stored_as(name, (5,))
        assert told in _SAFETENSORS_CODES
        assert prod(shape) == (5 if code else 5 * item_bytes)


BAD_HEADERS = [
    b"", b"\x00" * 8, b"\xff" * 8, b"\x02\x00\x00\x00\x00\x00\x00\x00{", b"\x02" + bytes(7) + b"[]", b"\x04" + bytes(7) + b"null",
    b"\x01" + bytes(7) + b"\xff",
]  # fmt: skip


@pytest.mark.parametrize("data", BAD_HEADERS, ids=repr)
def test_a_safetensors_header_that_does_not_hold_together_is_refused(data):
    with pytest.raises(ValueError):  # noqa: PT011 - json's own message is as good
        safetensors.parse_header(data)


BAD_TABLES = [
    "1", "[]", '{"__metadata__":{},"w":1}', '{"__metadata__":{},"w":{}}', '{"w":{}}', "[" * 100_000,
    '{"__metadata__":{},"w":{"dtype":"F32","shape":1,"data_offsets":[0,4]}}',
    '{"__metadata__":{},"w":{"dtype":"F32","shape":[],"data_offsets":[0]}}',
    '{"__metadata__":{},"w":{"dtype":"F32","shape":[],"data_offsets":[0,Infinity]}}',
    '{"__metadata__":{},"w":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}}',
    '{"__metadata__":{},"w":{"dtype":"F32","shape":[1e999],"data_offsets":[0,4]}}',
    '{"__metadata__":{},"w":{"dtype":"F32","shape":[1],"data_offsets":[-4,0]}}',
]  # fmt: skip


@pytest.mark.parametrize("table", BAD_TABLES, ids=lambda t: t[:60])
def test_a_safetensors_table_that_makes_no_sense_is_refused(table):
    with pytest.raises(ValueError):  # noqa: PT011 - any reason will do
        safetensors.parse_header(len(table).to_bytes(8, "little") + table.encode())


# --- digests -----------------------------------------------------------------------------------------------------


@given(st.integers(0, 40 * BLOCK_BYTES), st.randoms(use_true_random=False))
def test_digests_read_back_and_have_the_size_that_was_planned(covered, random):
    blocks = random.randbytes(digests.num_blocks(covered) * digests.DIGEST_BYTES)
    data = digests.dump(covered, blocks)
    assert len(data) == digests.num_bytes(covered)
    assert digests.parse(data, covered_bytes=covered) == blocks
    assert json.loads(data)["self"] == digests.self_digest(data)
    with pytest.raises(ValueError, match="digest"):
        digests.parse(data, covered_bytes=covered + BLOCK_BYTES)


def test_no_flipped_bit_of_the_digests_survives():
    data = digests.dump(BLOCK_BYTES + 1, bytes(range(32)))
    for offset in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[offset] ^= 1 << bit
            with pytest.raises(ValueError):  # noqa: PT011 - any reason will do
                digests.parse(bytes(damaged), covered_bytes=BLOCK_BYTES + 1)


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"[]", b"1", b'{"blocks":1}', b'{"blocks":"zz"}', b"[" * 100_000, b"\xff"],
    ids=lambda d: repr(d[:16]),
)
def test_digests_that_are_no_digests_are_refused(data):
    with pytest.raises(ValueError):  # noqa: PT011 - any reason will do
        digests.parse(data, covered_bytes=1)


# --- index -------------------------------------------------------------------------------------------------------


@given(specs(), st.one_of(st.none(), st.integers(0, 2**63 - 1)))
def test_an_index_is_padded_to_a_page_and_reads_back(tensors, step):
    plan = TensorPlan(tensors)
    layout = lay_out(plan, skeleton='{"list":[1]}', objects=None, step=step, mtime=0)
    assert layout.base % PAGE_BYTES == 0
    text = layout.literals[0][1][tar.BLOCK :]
    told = index.parse(text, path="x")
    assert told.step == step
    assert told.skeleton == {"list": [1]}
    assert [(m.name, m.data.length) for m in told.members] == [(m.name, m.num_bytes) for m in plan.members]
    raw = json.loads(text)
    assert raw["format"] == "async_ckpt"
    assert raw["version"] == 1
    for spec, row in zip(tensors, told.tensors, strict=True):
        assert row.path == tuple(k if isinstance(k, int | str) else str(k) for k in spec.path)


@given(specs())
def test_an_index_that_is_laid_out_in_another_way_says_the_same(tensors):
    text = laid_out(tensors).literals[0][1][tar.BLOCK :].rstrip(b" ")
    raw = json.loads(text)
    for indent, separators in ((None, (",", ":")), (1, (",", ":")), (0, (", ", ": "))):
        other = json.dumps(raw, indent=indent, separators=separators).encode()
        padded = other.ljust(len(text) + tar.BLOCK)
        assert index.parse(padded, path="x").tensors == index.parse(text.ljust(len(padded)), path="x").tensors


def test_an_index_is_parsed_in_little_more_memory_than_its_text_and_result_take():
    tensors = [TensorSpec(("model", f"layers.{number}"), "int8", (3,)) for number in range(20_000)]
    text = laid_out(tensors).literals[0][1][tar.BLOCK :]
    tracemalloc.start()
    try:
        told = index.parse(text, path="x")
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [tensor.path for tensor in told.tensors] == [tensor.path for tensor in tensors]
    assert peak < kept + 2 * len(text)


@given(specs())
def test_the_index_lists_what_each_member_stores(tensors):
    told = index_of(laid_out(tensors))
    assert len(told.stored) == len(told.members)
    for number, stored in enumerate(told.stored):
        assert list(stored) == [t for t in told.tensors if t.slices[0].member == number and t.alias_of is None]


def test_the_index_finds_members_by_name():
    told = index_of(laid_out([TensorSpec(("a", "w"), "int8", (3,))], objects=b"pickle"))
    objects_member = told.member(index.OBJECTS)
    assert objects_member is not None
    assert objects_member.data.length == 6
    assert told.member("other") is None


@given(st.integers(0, 2**34))
@example(0)
@example(2 * BLOCK_BYTES // 512)
def test_the_size_of_a_file_tells_where_its_digests_may_lie(num_blocks):
    member, file_bytes = index.digests_member(num_blocks * tar.BLOCK)
    places = index.places_of_digests(file_bytes)
    assert member in places
    assert len(places) <= 8
    assert all(index.digests_member(p.data.offset - tar.BLOCK) == (p, file_bytes) for p in places)


@given(st.integers(0, 2**50))
def test_a_file_of_any_size_has_few_places_for_digests(file_bytes):
    assert len(index.places_of_digests(file_bytes)) <= 8


@given(st.integers(0, 2**50), st.integers(1, 2**20))
def test_aligning_up_reaches_the_next_multiple(value, to):
    assert align_up(value, to) % to == 0
    assert 0 <= align_up(value, to) - value < to


def test_the_image_of_a_layout_is_a_tar_that_python_lists():
    """Literals alone, with zeros for the tensors, make a whole archive."""
    layout = laid_out(
        [TensorSpec(("a", "w"), "int8", (700,)), TensorSpec(("b", "w"), "float64", (9, 9))],
        objects=b"x" * 513,
    )
    image = bytearray(layout.file_bytes)
    for begin, data in layout.literals:
        image[begin : begin + len(data)] = data
    with tarfile.open(fileobj=io.BytesIO(image)) as archive:
        assert archive.getnames() == [
            "index.json",
            "a.safetensors",
            "b.safetensors",
            "objects.pt",
            "digests.json",
        ]
        sizes = {m.name: (m.offset_data, m.size) for m in archive.getmembers()}
    for member in (*index_of(layout).members, layout.digests):
        assert sizes[member.name] == (member.data.offset, member.data.length)
