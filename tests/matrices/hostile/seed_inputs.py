"""Sound inputs of every target, written by the library itself, by torch and by tarfile: what the corpus begins with.

In: nothing. Out: bytes. Knows nothing of: how they are changed.
"""

import io
import json
import pickle
import tarfile
import tempfile
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from damage import STATE, objects_swapped, torch_saved
from tarballs import member, plain_tar

import async_ckpt
from async_ckpt.core.format import index, tar
from async_ckpt.core.runs import layouts as step_layouts
from async_ckpt.core.runs import manifest, receipts
from async_ckpt.core.slicing.locator import StepLayout
from async_ckpt.core.slicing.slices import Mesh
from async_ckpt.weights import delta, lent

from .hostile_corpus import BESIDE, kept
from .hostile_target import Scratch

_PICKLED: dict[str, Any] = {"e": RuntimeError, "t": torch.arange(6.0).view(2, 3), "o": {1: (2, [3]), "b": b"xyz"}}


@cache
def folder() -> Path:
    """A folder with one of each thing that the library writes."""
    place = Path(tempfile.mkdtemp(prefix="hostile-seeds-"))
    async_ckpt.save(STATE, place / "x.tar")
    with async_ckpt.AsyncCheckpointer(place / "run") as ckpt:
        state = {"model": {"w": torch.arange(4.0)}, "frozen": {"v": torch.ones(3)}}
        ckpt.save(state, 1, record={"loss": 0.5, "name": "a"}).result()
        state["model"]["w"] += 1
        ckpt.save(state, 2, unchanged=["frozen"]).result()
    tensors = {"a.weight": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}
    with async_ckpt.Publisher(place / "weights") as publisher:
        for version in (1, 2):
            publisher.publish(tensors, version).result()
            tensors["b"] += 1
    async_ckpt.Subscriber(place / "weights").pull(place / "local")
    dcp.save(
        {"w": torch.arange(6.0), "n": 3, "deep": {"x": [torch.ones(2), "text"]}},
        checkpoint_id=place / "dcp",
        no_dist=True,
    )
    return place


def beside() -> dict[str, bytes]:
    """Files that lie beside inputs."""
    data = {path.name: path.read_bytes() for path in (folder() / "dcp").glob("*.distcp")}
    data["model.safetensors"] = next((folder() / "local").glob("*.safetensors")).read_bytes()
    data["x.tar"] = (folder() / "x.tar").read_bytes()
    return data


def _laid_out() -> Path:
    """The files beside inputs, in the scratch folder of this target."""
    place = Scratch.folder / BESIDE
    if not place.exists():
        place.mkdir()
        for name, data in kept(BESIDE).items():
            (place / name).write_bytes(data)
    return place


def dcp_folder() -> Path:
    return _laid_out()


def small_safetensors() -> Path:
    return _laid_out() / "model.safetensors"


def archive_with_objects(pickled: bytes) -> bytes:
    path = Scratch.file((_laid_out() / "x.tar").read_bytes(), "swapped.tar")
    objects_swapped(path, pickled if pickled.startswith(b"PK") else packed(pickled))
    return path.read_bytes()


def packed(program: bytes) -> bytes:
    """What torch.save writes around a pickle, with two storages."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in (
            ("data.pkl", program),
            ("byteorder", b"little"),
            ("data/0", bytes(24)),
            ("data/1", bytes(8)),
            ("version", b"3\n"),
        ):
            archive.writestr(f"archive/{name}", content)
    return out.getvalue()


def _index_text() -> tuple[bytes, bytes]:
    data = (folder() / "x.tar").read_bytes()
    _, length = tar.parse_header(data[: tar.BLOCK])
    text = data[tar.BLOCK : tar.BLOCK + length]
    honest = index.parse(text, path="x")
    return text.rstrip(), data[tar.BLOCK + length : honest.digests.data.offset - tar.BLOCK]


_OF_RANKS = (
    b'{"format":"async_ckpt","version":1,"step":3,"ranks":[1,4,[[0,[2,2],[2,1],[]]]],"members":[["model.safetensors",4180]],"tensors":['
    b'{"path":["model","w"],"dtype":"float32","shape":[8,2],"slices":[{"member":0,"name":"w","extent":[4096,32],"offsets":[4,0],"sizes":[4,2]}],'
    b'"spread":[[[0,0,1]],0,[0,1]]},{"path":["tied"],"alias":0}],"skeleton":{"model":1}}'
)


def indices() -> list[bytes]:
    return [_index_text()[0], _OF_RANKS, index.dump(step=None, members=[], rows="", skeleton="{}")]


def archives() -> list[bytes]:
    text, between = _index_text()
    return [text + b"\0\n" + between]


def tar_headers() -> list[bytes]:
    return [tar.header("index.json", 1234, mtime=5), tar.header("x" * 100, 2**40, mtime=5)]


def _header() -> bytes:
    data = next((folder() / "local").glob("*.safetensors")).read_bytes()
    return data[8 : 8 + int.from_bytes(data[:8], "little")].rstrip()


def safetensors_headers() -> list[bytes]:
    pieces = {"__metadata__": {"DCP_SHARDING_INFO": json.dumps({"a": {"saved_offsets": [0, 2]}}), "t": "a"}}
    row = {"a": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}}
    packed = {
        "a": {"dtype": "F4", "shape": [8, 8], "data_offsets": [0, 32]},
        "b": {"dtype": "F8_E8M0", "shape": [32], "data_offsets": [32, 64]},
    }
    return [_header(), *(json.dumps(one).encode() for one in (pieces | row, row, packed))]


def safetensors_files() -> list[bytes]:
    data = next((folder() / "local").glob("*.safetensors")).read_bytes()
    return [_header() + b"\0\n" + data[8 + int.from_bytes(data[:8], "little") :]]


def weight_maps() -> list[bytes]:
    file = "model-00001-of-00002.safetensors"
    names = ["a.weight", "b"]
    return [json.dumps({"metadata": {"total_size": 28}, "weight_map": dict.fromkeys(names, file)}).encode()]


def seek_tables() -> list[bytes]:
    return [b"\x10\0\0\0\x20\0\0\0" * 3, b"\x01\0\0\0\0\0\0\0"]


def frames() -> list[bytes]:
    return [
        bytes([0x20, 4, 9, 0, 0, 1]),
        bytes([0x64, 4, 0, 3, 0, 0, 9, 1, 2, 3, 4, 0x50, 0x2A, 0x4D, 0x18, 2, 0, 0, 0, 7, 7]),
    ]


def block_digests() -> list[bytes]:
    return [b"\x64\0\0" + bytes(16), b"\0\0\x80" + bytes(128)]


def _unsealed(path: Path) -> bytes:
    return b"{\n" + path.read_bytes().partition(b"\n")[2]


def manifests() -> list[bytes]:
    written = sorted((folder() / "run").rglob("manifest.json"))
    archive = manifest.Archive("archives.00000000.bin", 48, "0" * 32)
    of_ranks = manifest.Manifest(
        7, "0123abcd", 2, 1.5, (), ("89abcdef",), {"loss": 1},
        (manifest.GroupLocation("model", 1, "step_00000001", archive),), (manifest.Retired(9, "0123abcd"), manifest.Retired(8, "")),
        manifest.RankFiles(archive, manifest.Archive("layout.0123abcd.json", 9, "1" * 32), "0" * 16, 96, ("rng",)),
        "00000003.0123abcd", manifest.SaveTimes(1.0, 0.25),
    )  # fmt: skip
    return [*map(_unsealed, written), b"{\n" + of_ranks.dump().partition(b"\n")[2]]


_TABLE = receipts.Table({"0" * 16: [0, 1, 2, 3], "1" * 16: [4]}, ("lr",), {"0" * 16: ("stage.a",)})


def layouts() -> list[bytes]:
    line = json.dumps(["model.w", "float32", [8, 2], [[[0, 0, 1]], [2, 2], [2, 1], None, True]])
    held = json.dumps(["x", "float32", [4], {"held": [[[0], [2]]]}])
    plain = json.dumps(["y", "int64", [1], None, "x"])
    structures = {"0" * 16: f"{line}\n{held}\n{plain}", "1" * 16: json.dumps(["v", None, [], None])}
    mesh = Mesh(0, (2, 2), (2, 1), ())
    step = StepLayout(_TABLE.classes, structures, {"0" * 16: [0, 1, 2, 3]}, mesh)
    return [b"{\n" + step_layouts.dump(step, _TABLE).partition(b"\n")[2]]


def names() -> list[bytes]:
    listed = [
        "start-00000008.5f3a9c01.500.json", "start-00000009.6f3a9c01.6.json", "weight_v000120", "files.0123abcd", "step_00000012",
        "rollback-12.0123abcd.json", "manifest.retired-0123abcd.json", "rank_00001.0123abcd.tar", "global_step_500", "global_step{}",
        "latest_checkpointed_iteration.txt", "layout.0123abcd.rebuilt.json", "archives.0123abcd.bin", "replaced.0123456789abcdef.json",
        "shard-00000-model-00001-of-00002.safetensors", "receipts.0123abcd", "12", "model-1.2.3", ".metadata", "checkpoint-100",
    ]  # fmt: skip
    return ["\n".join(listed).encode(), *(name.encode() for name in listed)]


def namings() -> list[bytes]:
    return [
        b"step_{:08d}\0latest\0step_{}",
        b"{}\0latest_ckpt_global_step.txt\0{}",
        b"global_step{:d}\0x\0global_step{}",
    ]


def journals() -> list[bytes]:
    return [(folder() / "run/checkpoints.jsonl").read_bytes()]


def histories() -> list[bytes]:
    own = (folder() / "run/history.jsonl").read_bytes()
    kinds = [
        {"kind": "failed", "time": 1.0, "step": 3, "error": "OSError", "message": "no", "total_seconds": 1.0},
        {"kind": "skipped", "time": 1, "step": 4, "first_step": 4, "count": 2}, {"kind": "restore", "time": 2, "step": 1, "behind": True},
        {"kind": "rollback", "time": 3, "step": 1, "retired": [2, 3]}, {"kind": "retention", "time": 3, "step": 1, "deleted": [0]},
        {"kind": "save", "time": 3, "step": 5, "groups": {"a": 1}, "record": {"a": [1]}, "destinations": [{"path": "x", "retries": 1}], "total_seconds": 2, "num_bytes": 9},
    ]  # fmt: skip
    return [own, b"\n".join(json.dumps(one).encode() for one in kinds)]


def _blank(data: bytes) -> bytes:
    told = json.loads(data)
    told["metadata"]["async_ckpt"]["digest"] = "0" * 32
    return json.dumps(told, indent=2).encode()


def delta_indices() -> list[bytes]:
    own = [path.read_bytes() for path in sorted((folder() / "weights").rglob(delta.INDEX))]
    told = json.loads(own[1])
    del told["metadata"]["async_ckpt"]
    told["metadata"]["checksum_format"] = "adler32"
    anchor = json.loads(_blank(own[0]))
    anchor["metadata"]["version"] = 2
    anchor["metadata"]["async_ckpt"]["slices"] = {"a": ["a", "float32", [4], [0], [2]]}
    anchor["metadata"]["async_ckpt"] |= {"start": "s", "adapter": {"r": "8"}}
    return [_blank(own[1]), json.dumps(told).encode(), json.dumps(anchor).encode()]


def lent_tables() -> list[bytes]:
    tensors = {
        "a": lent.LentTensor("float32", (2, 3), 1, 64, "0" * 32),
        "b": lent.LentTensor("bfloat16", (2,), 0, 0, "1" * 32),
    }
    slices = delta.RankSlices(
        "s",
        {
            "a": delta.SliceOf("w", "float32", (4, 3), (0, 0), (2, 3)),
            "b": delta.SliceOf("b", "bfloat16", (2,), (0,), (2,)),
        },
    )
    tables = [
        lent.LentVersion(3, "0" * 32, "1" * 32, tensors, {"config.json": b"{}" * 20}, {"r": "8"}),
        lent.LentVersion(3, "0" * 32, "1" * 32, tensors, {}, {}, slices),
    ]
    found = []
    for one in tables:
        data = lent.dump_lent(one)
        found.append(data[16 : 16 + int.from_bytes(data[:8], "little")])
    return found


def dcp_metadata() -> list[bytes]:
    return [(folder() / "dcp/.metadata").read_bytes()]


def _program(value: Any) -> bytes:
    with zipfile.ZipFile(io.BytesIO(torch_saved(value))) as archive:
        name = next(one for one in archive.namelist() if one.endswith("data.pkl"))
        return archive.read(name)


def dcp_tensors() -> list[bytes]:
    return [_program(torch.zeros(6)), _program(torch.zeros(2, 3).t()), _program(torch.nn.Parameter(torch.zeros(6)))]


def pickles() -> list[bytes]:
    values = [
        [{1: (2, [3]), "b": b"xyz", 2.5: {1, 2}}, 1j, torch.Size([2])], [torch.zeros(6), torch.zeros(2, 3)],
        [bytearray(b"ab"), torch.float32, torch.device("cpu")], [RuntimeError],
    ]  # fmt: skip
    return [*map(_program, values), pickle.dumps(_PICKLED["o"], 2)]


def replies() -> list[bytes]:
    return [b'{"success": true, "weight_version": "3", "data": [{"id": "m"}]}']


def tars() -> list[bytes]:
    kinds = [
        member("a/", kind=tarfile.DIRTYPE, mode=0o755), member("a/b.txt", b"hello"), member("link", kind=tarfile.SYMTYPE, link="a/b.txt"),
        member("hard", kind=tarfile.LNKTYPE, link="a/b.txt"), member("a/run.sh", b"#!/bin/sh", mode=0o755),
    ]  # fmt: skip
    long = [member("x" * 150 + "/y", b"1"), member("ü" * 90, b"2")]
    return [
        plain_tar(kinds, format=tarfile.USTAR_FORMAT),
        plain_tar(long, format=tarfile.PAX_FORMAT),
        plain_tar(long, format=tarfile.GNU_FORMAT),
    ]


def claims() -> list[bytes]:
    return [b'{"rank": 0, "world_size": 2, "nonce": "0123456789abcdef"}', b'{"rank": 1, "world_size": 2, "nonce": ""}']


def loan_notices() -> list[bytes]:
    return [b"3 %s %s 0 " % (b"0" * 32, b"1" * 32), b"4 %s %s 2 start" % (b"0" * 32, b"1" * 32)]


def notes() -> list[bytes]:
    local = folder() / "local/.weight_sync"
    follow = {"told": [3, "0" * 32], "loading": [4, ""], "at": 1e9, "seconds": 30.0, "boot": "b", "address": None}
    return [
        (local / "state.json").read_bytes(),
        (local / "files.json").read_bytes(),
        *weight_maps(),
        json.dumps(follow).encode(),
    ]


def starts() -> list[bytes]:
    return [b'{\n "host": "node-1",\n "pid": 12,\n "since": 1700000000.5\n}\n']


def places() -> list[bytes]:
    texts = [
        "runs/a", "/tmp/x.tar", "s3://bucket/a/b", "gs://b", "az://c/d?sig=1", "https://u:p4ssword@h:8080/x?y#z", "memory://x/y", "file:///tmp/a%20b",
        "~/x", "s3:/bucket/x", "simplecache::s3://b/k", "C:\\x", "s3://u:p4ssword@b/k",
    ]  # fmt: skip
    return [text.encode() for text in texts]


def commands() -> list[bytes]:
    lines = [
        "ls runs/a --all --json", "page runs/a -o x.html --best loss", "inspect runs/a model.* --stats", "verify runs/a", "diff a b", "cp a s3://b/c --endpoint http://h",
        "convert a b --as dcp --from-rank rng=0", "prune a --keep 3", "watch runs/a --once", "doctor runs/a", "--version", "bench /tmp", "follow w l --engine sglang", "ls --deadline 3 s3://b",
    ]  # fmt: skip
    return [line.replace(" ", "\0").encode() for line in lines]
