"""Plumbing: the names, besides the public ones, that the wings of this package and other packages may use.

    from async_ckpt.plumbing import Storage, register_storage

A lower-case name that is not a function is a module or a room of the package; its docstring describes its content.
Names are imported on first access. They may change in each minor version; public names do not.

- Places: `Storage` is the interface of a storage, `Reader` and `Sink` are open objects in it, and `MemoryLoan` is
  memory that a store holds; `register_storage` adds a user's storage. `places` makes a Place of any path, `urls` parses
  paths and URLs, `bulk` handles many objects at once, and `store_facts` has facts about all object stores.
- Local disk: `LocalStorage`; `disk` for files and folders, `locks` for locks of writers, `scratches` for folders whose
  files appear as a whole or not at all.
- Single files: `Appender` writes from front to back, `compressed` compresses, `save_within` saves with little memory,
  `write_by_torch` calls torch.save, `pack` makes a tar of a folder.
- The host: `threads`, `waits`, `process` for state that a forked child must not keep, `limits` for processors and free
  memory, `memory` and `shared_memory`, `loops` for the background loop, `operations` for listeners.
- Basics: `timing` is the clock, `spec` has units and checks of arguments, `fields` checks JSON, `reports` shows sizes.
- Runs: `runs` has manifests, names of steps, starts and retention, `events` the history; `copy_step` copies a step.
- Stored data: `find` opens the checkpoint at a path, `contents` is an opened checkpoint, `fill` reads it into memory,
  `verification` compares it with its digests, `states` splits any checkpoint into named items.
- States: `capture` splits a state into its leaves, `captured` is a state at one instant, `leaf_names` are the names of
  its leaves and dtypes, `wrappers` and `optimizer_parts` look inside wrapped models and optimizers, `another_kind`
  compares a saved state with an optimizer, and `loaders` two data loaders. `guards` delay optimizer steps; `sharded`
  and `boxes` are the geometry of shards; `backends` and `device` handle tensors on devices.
- Ranks: `worlds` are the ranks that save together; a `rendezvous` is one call that all of them make.
- Saves: `ledger` waits for saves in progress and reports their progress, `kept_memory` is the memory that one-off saves
  share, a `WeightsSave` writes a model's weights; `run_movers` runs the movers, which copy steps to further places.
- Files of other programs: `safetensors`, `hf_shards` and `hf_weights` write models for Hugging Face; `file_digests`
  records and compares the digests of a framework's files.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = [
    "Appender", "LocalStorage", "MemoryLoan", "Reader", "Sink", "Storage", "WeightsSave", "another_kind", "backends",
    "boxes", "bulk", "capture", "captured", "compressed", "contents", "copy_step", "device", "disk", "events", "fields",
    "file_digests", "fill", "find", "guards", "hf_shards", "hf_weights", "kept_memory", "leaf_names", "ledger",
    "limits", "loaders", "locks", "loops", "memory", "operations", "optimizer_parts", "pack", "places", "process",
    "register_storage", "rendezvous", "reports", "run_movers", "runs", "safetensors", "save_within", "scratches",
    "sharded", "shared_memory", "spec", "states", "store_facts", "threads", "timing", "urls", "verification", "waits",
    "worlds", "wrappers", "write_by_torch",
]  # fmt: skip

if TYPE_CHECKING:
    from .core import backends, events, fields, runs, spec, timing
    from .core import report as reports
    from .core.format import safetensors
    from .core.host import limits, memory, operations, process, shared_memory, threads, waits
    from .core.host import loop as loops
    from .core.loading import fill
    from .core.loading import verify as verification
    from .core.loading.archives import contents, find
    from .core.loading.catch_up import copy_step
    from .core.loading.live.optimizer_forms import another_kind
    from .core.ranks import rendezvous
    from .core.ranks import world as worlds
    from .core.saving import kept_memory, ledger
    from .core.slicing import boxes, sharded
    from .core.staging import device
    from .core.staging import guard as guards
    from .core.state import capture, captured, loaders, wrappers
    from .core.state import names as leaf_names
    from .core.state import optimizers as optimizer_parts
    from .core.storage import bulk, compressed, disk, locks, store_facts
    from .core.storage import place as places
    from .core.storage import url as urls
    from .core.storage.interface import MemoryLoan, Reader, Sink, Storage
    from .core.storage.local import LocalStorage
    from .core.storage.place import register_storage
    from .core.storage.sequential import Appender
    from .face import run_movers, states
    from .face.around import file_digests, hf_weights, pack
    from .face.around import scratch as scratches
    from .face.around import shards as hf_shards
    from .face.around.copy_save import WeightsSave
    from .face.around.torch_file import write_by_torch
    from .face.oneoff import save_within
else:
    # The names from each package or module; "new=old" for a name that differs in plumbing.
    _NAMES = {
        ".core": "backends events fields reports=report runs spec timing",
        ".core.format": "safetensors",
        ".core.host": "limits loops=loop memory operations process shared_memory threads waits",
        ".core.loading": "fill verification=verify",
        ".core.loading.archives": "contents find",
        ".core.loading.catch_up": "copy_step",
        ".core.loading.live.optimizer_forms": "another_kind",
        ".core.ranks": "rendezvous worlds=world",
        ".core.saving": "kept_memory ledger",
        ".face.around.copy_save": "WeightsSave",
        ".core.slicing": "boxes sharded",
        ".core.staging": "device guards=guard",
        ".core.state": "capture captured leaf_names=names loaders optimizer_parts=optimizers wrappers",
        ".core.storage": "bulk compressed disk locks places=place store_facts urls=url",
        ".core.storage.interface": "MemoryLoan Reader Sink Storage",
        ".core.storage.local": "LocalStorage",
        ".core.storage.place": "register_storage",
        ".core.storage.sequential": "Appender",
        ".face": "run_movers states",
        ".face.around": "file_digests hf_shards=shards hf_weights pack scratches=scratch",
        ".face.around.torch_file": "write_by_torch",
        ".face.oneoff": "save_within",
    }
    _HOMES = {name.partition("=")[0]: (home, name) for home, names in _NAMES.items() for name in names.split()}

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        home, own = _HOMES[name]
        own = own.rpartition("=")[2]
        module = import_module(home, __package__)
        found = globals()[name] = getattr(module, own, None) or import_module(f"{home}.{own}", __package__)
        return found

    def __dir__() -> list[str]:
        return __all__
