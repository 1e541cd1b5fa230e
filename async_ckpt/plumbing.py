"""Plumbing: what the wings of this package, and others' code beside it, may use besides the public names.

    from async_ckpt.plumbing import Storage, register_storage

- Places: `Storage` is what a storage promises, and `Reader` an open object in it; `register_storage` plugs in a user's
  own. `Anywhere` is a path, a URL or a `Place`, into which `place_of`, `written_at` and `local_place` turn it.
- This disk: `LocalStorage`, `Scratch`, `publish_file`, `sync_folder`, `free_bytes_at`, `translated`, `close_quietly`;
  names of temp files end in `TEMP_SUFFIX`.
- The host: `Crew`, `run_together`, `start_thread` and `running_future` for threads; `get_loop`; `Wait`, `wait_for` and
  `growing_pauses` for waits, `ENDS_THE_WAIT` for what ends one; `in_forked_child`; `held_memory`; `num_cpus`.
- The clock: `TIMEKEEPER`, a `Timekeeper`; `monotonic` and `wall_time` are of it, in seconds; `Clock` is the type of
  both, and `shown_time` the text of a time.
- Runs: `Run`, `Manifest`, `MANIFEST_NAME`, `parse_manifest`, `parse_step_name`; `OF_DCP` is the name of the file by
  which a folder of torch.distributed.checkpoint is known.
- What is stored: `from_path` opens the `Contents` at a path, whose `Part` is one archive; `StoredLeaf`, `Wanted`;
  `ON_CPU` maps all devices to the host; `NamePath` is the way to a leaf, and `shown_name` its text.
- States: `SnapshotView` is a state of one instant; `Slicer` and `is_sharded`; `dtype_name`, `dtype_named`; `why_not`.
- Files of others: `Weights`, `shards_of`, `view_of`, `write_by_torch`.
- Messages: `sized` and `bandwidth_of` for people; `MIB` is 2**20.

`help` of a name says all about it. Names are loaded when they are first asked for. They may change with each minor
version; public names do not.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = [
    "ENDS_THE_WAIT",
    "MANIFEST_NAME",
    "MIB",
    "OF_DCP",
    "ON_CPU",
    "TEMP_SUFFIX",
    "TIMEKEEPER",
    "Anywhere",
    "Clock",
    "Contents",
    "Crew",
    "LocalStorage",
    "Manifest",
    "NamePath",
    "Part",
    "Reader",
    "Run",
    "Scratch",
    "Slicer",
    "SnapshotView",
    "Storage",
    "StoredLeaf",
    "Timekeeper",
    "Wait",
    "Wanted",
    "Weights",
    "bandwidth_of",
    "close_quietly",
    "dtype_name",
    "dtype_named",
    "free_bytes_at",
    "from_path",
    "get_loop",
    "growing_pauses",
    "held_memory",
    "in_forked_child",
    "is_sharded",
    "local_place",
    "monotonic",
    "num_cpus",
    "parse_manifest",
    "parse_step_name",
    "place_of",
    "publish_file",
    "register_storage",
    "run_together",
    "running_future",
    "shards_of",
    "shown_name",
    "shown_time",
    "sized",
    "start_thread",
    "sync_folder",
    "translated",
    "view_of",
    "wait_for",
    "wall_time",
    "why_not",
    "write_by_torch",
    "written_at",
]

if TYPE_CHECKING:
    from .core.events.shapes import bandwidth_of
    from .core.host.limits import num_cpus
    from .core.host.loop import get_loop
    from .core.host.process import in_forked_child
    from .core.host.threads import Crew, run_together, running_future, start_thread
    from .core.host.waits import ENDS_THE_WAIT, Wait, growing_pauses, wait_for
    from .core.loading.archives.contents import CPU as ON_CPU
    from .core.loading.archives.contents import Contents, Part
    from .core.loading.archives.find import from_path
    from .core.loading.fill import Wanted
    from .core.report import sized
    from .core.runs.foreign_entries import OF_DCP
    from .core.runs.manifest import NAME as MANIFEST_NAME
    from .core.runs.manifest import Manifest
    from .core.runs.manifest import parse as parse_manifest
    from .core.runs.naming import parse_step_name
    from .core.runs.run import Run
    from .core.saving.default import held_memory
    from .core.slicing.sharded import Slicer, is_sharded
    from .core.spans import TIMEKEEPER, Clock, Timekeeper, monotonic, wall_time
    from .core.spans import shown_time as shown_time
    from .core.spec import MIB
    from .core.state.capture import why_not
    from .core.state.captured import SnapshotView
    from .core.state.names import Path as NamePath
    from .core.state.names import dtype_name, dtype_named
    from .core.state.names import shown as shown_name
    from .core.state.tree import StoredLeaf
    from .core.storage.disk import close_quietly, free_bytes_at, sync_folder, translated
    from .core.storage.interface import Reader, Storage
    from .core.storage.local import LocalStorage
    from .core.storage.locks import TEMP_SUFFIX
    from .core.storage.place import Anywhere, local_place, place_of, written_at
    from .core.storage.registry import register_storage
    from .core.storage.scratch import Scratch
    from .core.storage.scratch import publish as publish_file
    from .face.around.hf_weights import Weights
    from .face.around.shards import shards_of, view_of
    from .face.around.torch_file import write_by_torch
else:
    # Where each name is: a module, and its name there if that is another.
    _HOMES = {
        "start_thread": ".core.host.threads",
        "ENDS_THE_WAIT": ".core.host.waits",
        "Clock": ".core.spans",
        "shown_time": ".core.spans",
        "NamePath": ".core.state.names:Path",
        "close_quietly": ".core.storage.disk",
        "bandwidth_of": ".core.events.shapes",
        "num_cpus": ".core.host.limits",
        "get_loop": ".core.host.loop",
        "in_forked_child": ".core.host.process",
        "Crew": ".core.host.threads",
        "run_together": ".core.host.threads",
        "running_future": ".core.host.threads",
        "Wait": ".core.host.waits",
        "growing_pauses": ".core.host.waits",
        "wait_for": ".core.host.waits",
        "ON_CPU": ".core.loading.archives.contents:CPU",
        "Contents": ".core.loading.archives.contents",
        "Part": ".core.loading.archives.contents",
        "from_path": ".core.loading.archives.find",
        "Wanted": ".core.loading.fill",
        "sized": ".core.report",
        "OF_DCP": ".core.runs.foreign_entries",
        "Manifest": ".core.runs.manifest",
        "MANIFEST_NAME": ".core.runs.manifest:NAME",
        "parse_manifest": ".core.runs.manifest:parse",
        "parse_step_name": ".core.runs.naming",
        "Run": ".core.runs.run",
        "held_memory": ".core.saving.default",
        "Slicer": ".core.slicing.sharded",
        "is_sharded": ".core.slicing.sharded",
        "TIMEKEEPER": ".core.spans",
        "Timekeeper": ".core.spans",
        "monotonic": ".core.spans",
        "wall_time": ".core.spans",
        "MIB": ".core.spec",
        "why_not": ".core.state.capture",
        "SnapshotView": ".core.state.captured",
        "dtype_name": ".core.state.names",
        "dtype_named": ".core.state.names",
        "shown_name": ".core.state.names:shown",
        "StoredLeaf": ".core.state.tree",
        "free_bytes_at": ".core.storage.disk",
        "sync_folder": ".core.storage.disk",
        "translated": ".core.storage.disk",
        "Reader": ".core.storage.interface",
        "Storage": ".core.storage.interface",
        "LocalStorage": ".core.storage.local",
        "TEMP_SUFFIX": ".core.storage.locks",
        "Anywhere": ".core.storage.place",
        "local_place": ".core.storage.place",
        "place_of": ".core.storage.place",
        "written_at": ".core.storage.place",
        "register_storage": ".core.storage.registry",
        "Scratch": ".core.storage.scratch",
        "publish_file": ".core.storage.scratch:publish",
        "Weights": ".face.around.hf_weights",
        "shards_of": ".face.around.shards",
        "view_of": ".face.around.shards",
        "write_by_torch": ".face.around.torch_file",
    }

    def __getattr__(name: str) -> Any:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module, _, own = home.partition(":")
        found = globals()[name] = getattr(import_module(module, __package__), own or name)
        return found

    def __dir__() -> list[str]:
        return __all__
