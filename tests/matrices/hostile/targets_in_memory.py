"""Parsers that take bytes and touch no file: headers, tables, manifests, layouts, journals, indices, pickles.

In: bytes. Out: nothing, or a documented error. Knows nothing of: files.
"""

import pickle
from functools import partial

from async_ckpt.core.events import kinds
from async_ckpt.core.format import digests, index, safetensors, tar, zstd
from async_ckpt.core.format.digests import block_digest
from async_ckpt.core.pickles import saved_objects
from async_ckpt.core.runs import foreign_entries, journal, layouts, manifest, naming, receipts, starts
from async_ckpt.core.slicing.boxes import Box
from async_ckpt.core.slicing.locator import ShardLocator
from async_ckpt.errors import CorruptCheckpointError, ForeignFileError, FormatVersionError
from async_ckpt.face.foreign import dcp_metadata
from async_ckpt.weights import delta, lent
from async_ckpt.weights.following.web import Reply
from async_ckpt.weights.publishing.in_memory import borrow
from async_ckpt.weights.publishing.versions import marks_in

from . import seed_inputs as seeds
from .hostile_target import Target, unwrapped

_STRICT = (CorruptCheckpointError, FormatVersionError)


def sealed(data: bytes) -> bytes:
    """A text that begins with a digest of itself, around this content. Or the bytes as they are."""
    raw = unwrapped(data)
    if raw is not None:
        return raw
    rest = data[1:] if data.startswith(b"{") else data
    return b'{"digest": "' + block_digest(rest).hex().encode() + b'",\n' + rest


def _lengthened(data: bytes) -> bytes:
    """A header of safetensors: its length, and its JSON."""
    raw = unwrapped(data)
    return len(data).to_bytes(8, "little") + data if raw is None else raw


def parse_index(data: bytes) -> None:
    found = index.parse(unwrapped(data) or data, path="x")
    index.places_of_digests(len(data))
    [tensor.dotted for tensor in found.tensors]


def parse_tar_header(data: bytes) -> None:
    raw = unwrapped(data)
    block = bytearray(data[:512].ljust(512, b"\0")) if raw is None else bytearray(raw)
    if raw is None:
        block[148:156] = b" " * 8
        block[148:156] = b"%06o\0 " % sum(block)
    tar.parse_header(bytes(block))


def parse_safetensors(data: bytes) -> None:
    head = _lengthened(data)
    for parse in (
        safetensors.parse_header,
        partial(safetensors.parse_file_header, file_bytes=len(head) + 64),
    ):
        try:
            parse(head)
        except ValueError:
            pass
    for name in ("x.safetensors", "shard-00000-model-00001-of-00002.safetensors"):
        index.of_safetensors(head, name=name, file_bytes=len(head) + 64, skeleton=list, path=name)


def parse_seek_table(data: bytes) -> None:
    raw = unwrapped(data)
    if raw is None:  # the entries of a table, from which its ends follow
        entries = data[: len(data) // 8 * 8]
        sizes = [int.from_bytes(entries[at : at + 4], "little") for at in range(0, len(entries), 8)]
        raw = (0x184D2A5E).to_bytes(4, "little") + (len(entries) + 9).to_bytes(4, "little") + entries
        raw += (len(entries) // 8).to_bytes(4, "little") + b"\0" + (0x8F92EAB1).to_bytes(4, "little")
        zstd.parse(raw, data_bytes=sum(sizes))
    else:
        zstd.table_bytes(raw[-9:])
        zstd.parse(raw, data_bytes=0)


def follow_frames(data: bytes) -> None:
    follower = zstd.Follower()
    body = unwrapped(data) or b"\x28\xb5\x2f\xfd" + data
    for at in range(0, len(body), 7):
        follower.feed(body[at : at + 7])
    _ = follower.is_whole


def parse_digests(data: bytes) -> None:
    raw = unwrapped(data)
    if raw is None:
        covered = int.from_bytes(data[:3], "little")
        hashes = data[3 : 3 + digests.num_blocks(covered) * 16]
        digests.parse(digests.dump(covered, hashes), covered_bytes=covered)
    else:
        digests.parse(raw, covered_bytes=100)


def parse_manifest(data: bytes) -> None:
    found = manifest.parse(sealed(data), path="x")
    _ = (
        found.own_names,
        found.lenders,
        found.beside,
        found.num_bytes,
        found.lent("model"),
        found.path_in("step_00000001"),
    )
    journal.parse(journal.dump([("x", found)]))
    found.dump()


def parse_names(data: bytes) -> None:
    """Names in folders: of starts, steps, versions, intents, marks, and what a tracker has."""
    names = data.decode(errors="surrogateescape").split("\n")
    for name in names:
        receipts.is_beside(name), receipts.is_receipt_folder(name), receipts.attempt_of_all(name)
        delta.version_of(name), delta.stays_inside(name), delta.is_attempt(name)
        manifest.parse_intent(name), manifest.is_retired_name(name), manifest.attempt_of(name)
        found = naming.parse_step_name(name)
        assert found is None or isinstance(found.step_format, str)
        for word, how in naming.NAMINGS.items():
            tracker = naming.tracker_of(how.tracker, how.step_format)
            assert tracker is not None, word
            tracker.parse(name.encode(errors="surrogateescape"))
        safetensors.is_of_rank(name)
    marks_in(names)
    foreign_entries.foreign_kind(names)
    foreign_entries.formats_of(foreign_entries.possible_steps(names))
    _, found_starts = starts.split_starts(sorted(names))
    steps = list(range(0, 40, 3))
    commits = [manifest.Manifest(0, "0" * 8, 1, 0.0, (), start=start.label) for start in found_starts] or [None]
    starts.Line(steps, found_starts, lambda step: commits[step % len(commits)]).out(steps)


def parse_naming(data: bytes) -> None:
    """What a user may give as `naming`: formats of steps, and the text of a tracker."""
    words = [*data.decode(errors="replace").split("\0"), "", ""][:3]
    how = naming.Naming(words[0], (words[1], words[2]))
    found = naming.folder_pattern(how.step_format).fullmatch(how.step_format.format(17))
    assert found is not None
    assert int(found[1]) == 17


def parse_layout(data: bytes) -> None:
    found = layouts.parse(sealed(data))
    ranks = sorted(rank for mates in found.classes.values() for rank in mates)
    if ranks and len(ranks) < 100 and ranks == list(range(len(ranks))):  # as a step's reader demands
        locator = ShardLocator(found)
        locator.representatives(0.5)
        locator.naming(["model.w", "x"])
        boxes = {"model.w": [Box((0, 0), (8, 2))], "x": [Box((0,), (4,))], "y": [Box((0,), (1,))]}
        locator.having(boxes, [0])
        for name in boxes:
            locator.writers(name)
        locator.boxes_of(0)


def parse_journal(data: bytes) -> None:
    journal.parse(data)


def parse_history(data: bytes) -> None:
    for one in kinds.parse(data):
        if one["kind"] == "save":
            kinds.bandwidth_of(one)
            kinds.brief(one["record"])
            kinds.largest(one["groups"])
        kinds.dump([one])


def parse_delta_index(data: bytes) -> None:
    raw = unwrapped(data)
    text = data if raw is None else raw
    if raw is None:
        try:
            text = delta.seal(text)
        except ValueError:
            pass
    try:
        delta.weight_map_in(text)
    except ValueError:
        pass
    found = delta.parse(text, 2)
    _ = found.weight_map, found.tensor_files, found.metadata()


def parse_lent_table(data: bytes) -> None:
    raw = unwrapped(data)
    if raw is None:
        raw = len(data).to_bytes(8, "little") + (len(data) + 80).to_bytes(8, "little") + data + bytes(64)
    lent.table_bytes(memoryview(raw))
    _ = lent.parse_lent(memoryview(raw), [64, 4096]).slices_of_tensors


def parse_dcp_metadata(data: bytes) -> None:
    dcp_metadata.parse(unwrapped(data) or data)


def locate_dcp_tensor(data: bytes) -> None:
    raw = unwrapped(data)
    file = seeds.packed(data) if raw is None else raw
    place = dcp_metadata.locate_tensor(lambda at, length: file[at : at + length], dcp_metadata.Blob("x", 0, len(file)))
    _ = place.is_dense
    assert 0 <= place.begin <= place.begin + place.num_bytes <= len(file)


class Refused(Exception):
    """The pickle was refused, as the caller of `saved_objects.load` tells its user for whatever error it gets."""


def load_objects(data: bytes) -> None:
    raw = unwrapped(data)
    try:
        saved_objects.load(seeds.packed(data) if raw is None else raw, trust=False)
    except pickle.UnpicklingError:
        raise
    except (MemoryError, RecursionError):
        raise
    except Exception as error:
        raise Refused(type(error).__name__) from error


def read_reply(data: bytes) -> None:
    """What a rollout engine answers."""
    Reply(200, data.decode(errors="replace")).fields()


TARGETS = [
    Target("index", parse_index, _STRICT, "json", seeds.indices, 10),
    Target("tar header", parse_tar_header, (ValueError,), "tar", seeds.tar_headers, 2, 1024),
    Target("safetensors header", parse_safetensors, (*_STRICT, ForeignFileError), "json", seeds.safetensors_headers, 8),
    Target("zstd table", parse_seek_table, (ValueError,), "bytes", seeds.seek_tables, 3, 512),
    Target("zstd frames", follow_frames, (ValueError,), "bytes", seeds.frames, 3, 512),
    Target("digests", parse_digests, (ValueError,), "bytes", seeds.block_digests, 2, 512),
    Target("manifest", parse_manifest, _STRICT, "json", seeds.manifests, 8),
    Target("layout", parse_layout, (ValueError, KeyError, TypeError, AttributeError), "json", seeds.layouts, 5),
    Target("names", parse_names, (), "lines", seeds.names, 4, 1024),
    Target("naming", parse_naming, (ValueError,), "words", seeds.namings, 2, 256),
    Target("journal", parse_journal, (), "lines", seeds.journals, 3),
    Target("history lines", parse_history, (), "lines", seeds.histories, 5),
    Target("delta index", parse_delta_index, (ValueError,), "json", seeds.delta_indices, 8),
    Target("loan notice", partial(borrow._parsed, fds=[]), (), "words", seeds.loan_notices, 1, 1024),
    Target("lent table", parse_lent_table, (ValueError,), "json", seeds.lent_tables, 6),
    Target("DCP metadata", parse_dcp_metadata, (ValueError,), "pickle", seeds.dcp_metadata, 6),
    Target("DCP tensor", locate_dcp_tensor, (ValueError,), "pickle", seeds.dcp_tensors, 4),
    Target("pickle", load_objects, (pickle.UnpicklingError, Refused), "pickle", seeds.pickles, 6),
    Target("engine reply", read_reply, (), "json", seeds.replies, 1, 1024),
]
