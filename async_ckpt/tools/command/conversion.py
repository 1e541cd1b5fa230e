"""The conversion of a checkpoint to another format.

In: a place with a checkpoint of any format, and a destination. Out: the same tensors and values there, as far as the
format can hold them. Knows nothing of: command-line arguments.

Safetensors files are written piece by piece. For the other formats, the state consists of views of files, which the
kernel reads on demand. The destination appears only when it is complete and durable.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.utils._pytree import tree_map

from ... import AsyncCheckpointer, Naming, Place
from ...errors import CheckpointError
from ...plumbing import (
    Appender,
    compressed,
    disk,
    fields,
    hf_shards,
    hf_weights,
    leaf_names,
    reports,
    runs,
    safetensors,
    save_within,
    scratches,
    spec,
    states,
    urls,
    write_by_torch,
)
from . import hf_model
from .output import USAGE, Answer, print_json, print_note, print_text, progress
from .place_arguments import place_like
from .selection import usual_tracker
from .trainer_folders import state_files_of

FORMATS: Final = ("archive", "step", "safetensors", "hf", "torch", "dcp")
_BY_SUFFIX: Final = {
    ".tar": "archive",
    ".tar.zst": "archive",
    ".safetensors": "safetensors",
    ".pt": "torch",
    ".pth": "torch",
    ".bin": "torch",
    ".ckpt": "torch",
}
# The namings that imply a step without --as. Other names, such as "llama-3", may be any folder.
_STEP_FORMATS: Final = {runs.STEP_FORMAT, *(naming.step_format for naming in runs.NAMINGS.values())}
# An entry of every Megatron-Core checkpoint, its file of metadata, and an entry that only this library writes.
_OF_MEGATRON: Final = "common_state/shard_0_1"
_MEGATRON_CONFIG: Final = '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
_RANKS: Final = "ranks"
_OF_OBJECT: Final = "/shard_"
_SHOWN_NAMES: Final = 5
# The host memory of a save. The save waits for memory rather than use more.
_HOST_BYTES: Final = 128 << 20


@dataclass(frozen=True, slots=True)
class ConversionRequest:
    """The options of a conversion: the names to select, the prefix to strip, and permissions."""

    source: Place
    target: Place
    select: Sequence[str]
    from_ranks: Sequence[str]
    strip: str
    trust: bool
    overwrite: bool
    config: str = ""  # the folder of a model, or its id on the hub

    @property
    def options(self) -> dict[str, Any]:
        """The options of a reader. `from_ranks` maps names to the ranks whose values are used."""
        pairs = [text.rpartition("=") for text in self.from_ranks]
        if not all(name and rank.isdecimal() for name, _, rank in pairs):
            raise Answer("--from-rank takes a name and a rank, such as rng=0", USAGE)
        from_ranks = {name: int(rank) for name, _, rank in pairs}
        return {"select": [*self.select] or None, "trust": self.trust, "from_ranks": from_ranks or None}


def show(
    src: Place,
    dst: Place | None = None,
    *,
    to: str = "",
    as_: str | None,
    select: Sequence[str] | None,
    from_rank: Sequence[str] | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Convert a checkpoint, and print what was written. After an error, nothing is left at the destination."""
    if dst is None and not to:
        raise Answer("--to is missing: name the file or folder to write, such as F.safetensors, F.pt or F.tar", USAGE)
    request = ConversionRequest(src, dst or place_like(src, to), select or (), from_rank or (), **options)
    name = as_ or _format_of(request.target)
    if request.config and name != "hf":
        raise Answer(f"--config is only for a folder of Hugging Face, but this is {name}; pass --to hf", USAGE)
    if name not in FORMATS:
        raise Answer(f"--as takes {', '.join(FORMATS)}, not {name!r}", USAGE)
    if name not in ("archive", "step", "safetensors") and not request.target.is_local:
        raise Answer(
            f"{request.target.shown}: {name} is written to a local path; convert to a folder, and upload that", USAGE
        )
    if name != "archive":
        compressed.refuse_archive_name(request.target.shown)
    if name == "step":  # its folder belongs to a run
        _step_of(request.target)
    else:
        storage, inside = request.target.object()
        if not request.overwrite and (storage.exists(inside) or storage.names(inside)):
            raise Answer(f"{request.target.shown} already exists; pass --overwrite to replace it, or give another name")
    if name in _OF_STATE:
        num_bytes = _write_state(request, name)
    else:
        num_bytes = states.with_items(request.source, partial(_OF_ITEMS[name], request), **request.options)
    if others := state_files_of(request.source):
        print_note(f"these files were not converted: {spec.some_of(others, _SHOWN_NAMES)}")
    if as_json:
        places = {"source": src.shown, "target": request.target.shown}
        print_json("conversion", {**places, "format": name, "num_bytes": num_bytes})
    else:
        print_text(f"{request.target.shown}: {name}, {reports.sized(num_bytes)}")


def _format_of(target: Place) -> str:
    name = target.text.rstrip("/").rpartition("/")[2]
    suffix = next((suffix for suffix in _BY_SUFFIX if name.lower().endswith(suffix)), None)
    if suffix is not None:
        return _BY_SUFFIX[suffix]
    step_name = runs.parse_step_name(name)
    if step_name is not None and step_name.step_format in _STEP_FORMATS:
        return "step"
    if "." not in name:
        return "hf"
    raise Answer(
        f"{target.shown}: the name does not show the format; pass --as {', '.join(FORMATS)}, or a name that "
        f"ends in {', '.join(_BY_SUFFIX)}; a name without a suffix is a folder of safetensors files, as hf",
        USAGE,
    )


# --- safetensors --------------------------------------------------------------------------------------------------


def _write_safetensors(request: ConversionRequest, items: states.Items) -> int:
    by_name, (storage, name) = _by_name(request, items), request.target.object()
    (shard,) = _shards(request, items, by_name, max_bytes=1 << 62)
    with progress("convert", shard.num_bytes) as advance:
        out = Appender(storage, name, limit_bytes=shard.num_bytes)
        try:
            for piece in _pieces(shard, by_name, advance):
                out.append(piece)
            out.finish()
        except BaseException:
            out.abort()
            raise
    out.sink.close()
    return out.num_bytes


def _write_hf(request: ConversionRequest, items: states.Items) -> int:
    by_name, model, settings = _by_name(request, items), None, None
    missing: list[str] = []
    if of_adapter := hf_model.is_adapter(by_name):
        by_name = {hf_model.name_in_adapter(name): item for name, item in by_name.items()}
        settings = hf_model.adapter_config_of(request.source, request.config)
    elif request.config:
        model = hf_model.folder_of(request.config)
        missing = hf_model.missing_of(model, by_name)
    shards = _shards(request, items, by_name, max_bytes=1 << 62 if of_adapter else hf_shards.MAX_SHARD_BYTES)
    with _local_target(request) as written, progress("convert", sum(s.num_bytes for s in shards)) as advance:
        written.mkdir()
        for shard in shards:
            with (written / (hf_model.ADAPTER if of_adapter else shard.name)).open("wb") as file:
                file.writelines(_pieces(shard, by_name, advance))
        if len(shards) > 1:
            (written / hf_shards.INDEX).write_bytes(hf_shards.index_of(shards))
        if model is not None:
            hf_model.copy_beside(model, written)
        if settings is not None:
            (written / hf_model.ADAPTER_CONFIG).write_bytes(settings)
        if missing:
            print_note(f"{len(missing):,} weights of the model are missing, and will be new, such as {missing[0]}")
        return sum(path.stat().st_size for path in written.iterdir())


def _pieces(
    shard: hf_shards.Shard, by_name: Mapping[str, states.NamedItem], advance: Callable[[int], None]
) -> Iterator[memoryview]:
    """The bytes of a file, from front to back. A piece is valid until the next one is requested."""
    yield memoryview(shard.head)
    for name in shard.tensors:
        chunks = by_name[name].chunks
        assert chunks is not None
        for chunk in chunks():
            yield hf_shards.view_of(chunk.view(torch.uint8))
            advance(chunk.nbytes)


def _by_name(request: ConversionRequest, items: states.Items) -> dict[str, states.NamedItem]:
    """The items by their names in a flat file. Empty containers are left out."""
    by_name: dict[str, states.NamedItem] = {}
    for item in items.leaves:
        name = item.name.removeprefix(request.strip)
        if item.kind != "empty" and by_name.setdefault(name, item) is not item:
            without = f" without {request.strip!r}" if request.strip else ""
            raise Answer(
                f"safetensors has flat names, and two are {leaf_names.printable(name)!r}{without}; nothing was "
                "written. Choose one of them with --select, or convert to an archive"
            )
    return by_name


def _shards(
    request: ConversionRequest, items: states.Items, by_name: Mapping[str, states.NamedItem], *, max_bytes: int
) -> list[hf_shards.Shard]:
    """Plan the files. Refuses items that safetensors cannot hold."""
    refused = [
        f"{leaf_names.shown(item.path)} ({why})"
        for item in items.leaves
        if (why := _why_not(item, request.strip)) is not None
    ]
    if refused:
        raise Answer(
            f"safetensors cannot hold {spec.some_of(refused, _SHOWN_NAMES)}; nothing was written. Choose the weights "
            "with --select, such as 'model.*', or convert to an archive"
        )
    tensors = {name: torch.empty(item.shape, dtype=item.dtype, device="meta") for name, item in by_name.items()}
    return hf_shards.shards_of(hf_weights.Weights("model", tensors, {}, {}, lambda copy: copy), max_bytes)


def _why_not(item: states.NamedItem, strip: str) -> str | None:
    """The reason why safetensors cannot hold an item, or None."""
    name = item.name.removeprefix(strip)
    if item.kind == "empty":
        return None
    if item.kind == "code":
        return "code of TorchScript, which would be lost"
    if item.kind == "bytes":
        return "bytes"
    if item.dtype is None or (item.kind == "array" and item.facts is not None):
        return "an array" if item.kind == "array" else states.shown_value(item.value)[:40]
    if item.chunks is None:
        return f"a {states.kind_of_tensor(item.value)} tensor"
    if safetensors.held_as(leaf_names.dtype_name(item.dtype), item.shape) is None:
        return f"dtype {leaf_names.dtype_name(item.dtype)}"
    return "a name that is not allowed" if name == safetensors.RESERVED_NAME or not fields.is_unicode(name) else None


# --- states -------------------------------------------------------------------------------------------------------


def _write_archive(request: ConversionRequest, state: Any) -> int:
    return save_within(_HOST_BYTES, state, request.target).result().num_bytes


def _write_step(request: ConversionRequest, state: Any) -> int:
    root, naming, step = _step_of(request.target)
    with AsyncCheckpointer(root, naming=naming, host_bytes=_HOST_BYTES) as ckpt:
        report = ckpt.save(state, step, overwrite=request.overwrite).result()
    return report.num_bytes


def _step_of(target: Place) -> tuple[Place, Naming, int]:
    """The root and the naming of the run that the step is written to, and the number of the step."""
    parent, name = urls.parent_and_name(target.url, fs=target.fs)
    step_name = runs.parse_step_name(name)
    if step_name is None:
        raise Answer(f"{target.shown}: a step has a number in its name, such as step_00000100", USAGE)
    naming = Naming(step_name.step_format, usual_tracker(step_name.step_format))
    return replace(target, url=parent), naming, step_name.step


def _write_torch(request: ConversionRequest, state: Any) -> int:
    with _local_target(request) as written, _refused_by("torch.save"):
        write_by_torch(_plain(state), written)
        if unsafe := torch.serialization.get_unsafe_globals_in_checkpoint(written):
            print_note(f"plain torch.load refuses the file, which contains objects of {', '.join(sorted(unsafe)[:3])}")
        return written.stat().st_size


def _plain(state: Any) -> Any:
    """Convert NumPy arrays and scalars, as in random states, since plain torch.load refuses NumPy objects."""
    return tree_map(_plain_leaf, state, is_leaf=lambda value: isinstance(value, OrderedDict))


def _plain_leaf(leaf: Any) -> Any:
    if isinstance(leaf, OrderedDict):  # `tree_map` would lose an attribute: the versions of modules
        plain = copy.copy(leaf)
        plain.update((key, _plain(value)) for key, value in leaf.items())
        return plain
    if type(leaf).__module__ != "numpy" or not hasattr(leaf, "dtype"):
        return leaf
    if leaf.dtype.kind not in "biufc" or not leaf.dtype.isnative:
        return leaf
    return torch.from_numpy(leaf) if leaf.ndim or type(leaf).__name__ == "ndarray" else leaf.item()


def _write_dcp(request: ConversionRequest, state: Any) -> int:
    import torch.distributed.checkpoint as torch_dcp
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    if not isinstance(state, dict):
        raise Answer("torch.distributed.checkpoint saves a dict; this checkpoint is not a dict")
    with _local_target(request) as written, _refused_by("torch.distributed.checkpoint"):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            writer = torch_dcp.FileSystemWriter(written)  # type: ignore[attr-defined]
            # Torch 2.6 lacks this argument; there, a process without a group saves alone anyway.
            arguments = inspect.signature(torch_dcp.save).parameters  # type: ignore[attr-defined]
            alone: dict[str, Any] = {"no_dist": True} if "no_dist" in arguments else {}
            if _OF_MEGATRON in state:  # each of its objects is one entry
                state = {name: _entry(name, value, request) for name, value in state.items() if name != _RANKS}
                alone["planner"] = DefaultSavePlanner(flatten_state_dict=False)
            torch_dcp.save(state, storage_writer=writer, **alone)  # type: ignore[attr-defined]
            if "planner" in alone:
                (written / "metadata.json").write_text(_MEGATRON_CONFIG)
        return sum(path.stat().st_size for path in written.iterdir())


def _entry(name: str, value: Any, request: ConversionRequest) -> Any:
    """The value of a Megatron entry. An archive has an object as bytes, which are unpickled."""
    if _OF_OBJECT not in name or not isinstance(value, torch.Tensor):
        return value
    return torch.load(io.BytesIO(value.numpy().tobytes()), weights_only=not request.trust)  # nosec B614


@contextlib.contextmanager
def _refused_by(writer: str) -> Iterator[None]:
    """Refuse a state that a writer of torch cannot hold. Such a writer may raise any exception."""
    try:
        yield
    except (CheckpointError, OSError):
        raise
    except (Exception, CheckpointException) as error:
        failures = getattr(error, "failures", None)  # the error of each rank, with its stack
        why = next(iter(failures.values()))[0] if failures else error
        if isinstance(why, OSError):
            raise why from error
        raise Answer(
            f"{writer} cannot hold it: {type(why).__name__}: {f'{why!s:.200}'.partition(chr(10))[0]}; nothing was "
            "written"
        ) from error


def _write_state(request: ConversionRequest, name: str) -> int:
    scratch = urls.local_path(request.target.text).parent if request.target.is_local else Path.cwd()
    disk.make_folder(scratch)

    def converted(state: Any) -> int:
        for key in filter(None, request.strip.rstrip(".").split(".")):
            if not isinstance(state, dict) or key not in state or len(state) > 1:
                why = "not all names have this prefix; choose some with --select"
                raise Answer(f"--strip {request.strip!r}: {why}", USAGE)
            state = state[key]
        return _OF_STATE[name](request, state)

    # Only the library's own format stores the names of classes.
    types = None if name in ("archive", "step") else ()
    return states.with_state(request.source, converted, scratch=scratch, types=types, **request.options)


# --- destinations -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _local_target(request: ConversionRequest) -> Iterator[Path]:
    """A local path beside the target. At the end of the `with` block, it becomes the target."""
    target = urls.local_path(request.target.text)
    with scratches.Scratch(target.parent, target.name) as scratch:
        written = scratch.folder / target.name
        yield written
        scratches.sync_all(written)
        scratches.publish(written, target)


# Writers that read items piece by piece, and writers of a whole state.
_OF_ITEMS: Final = {"safetensors": _write_safetensors, "hf": _write_hf}
_OF_STATE: Final = {"archive": _write_archive, "step": _write_step, "torch": _write_torch, "dcp": _write_dcp}
