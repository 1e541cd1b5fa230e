"""Plumbing: what the wings of this package, and others' code beside it, may use besides the public names.

    from async_ckpt.plumbing import Storage, register_storage

A name in small letters that is no function is a module or a room of the package: its own text says what it has. Names
are loaded when they are first asked for. They may change with each minor version; public names do not.

- Places: `Storage` is what a storage promises, `Reader` and `Sink` are open objects in it, and `MemoryLoan` is memory
  that a store holds; `register_storage` plugs in a user's own. `places` makes a Place of any path, `urls` takes paths
  and URLs apart, `bulk` handles many objects at once, and `store_facts` has the words and rules of stores.
- This disk: `LocalStorage`; `disk` for files and folders, `locks` for who writes there, `scratches` for folders that
  appear as a whole or not at all.
- One file: `Appender` writes from front to back, `compressed` packs, `save_within` saves with little memory,
  `write_by_torch` calls torch.save, `pack` makes a tar of a folder.
- The host: `threads`, `waits`, `process` for what a fork must not keep, `limits` for how much of the machine there is,
  `memory` and `shared_memory`, `get_loop` and `OffLoop` for the loop in the background, `operations` for what listens.
- Words: `spans` is the clock, `spec` has units and checks of arguments, `fields` reads JSON, `reports` says sizes.
- Runs: `runs` has manifests, names of steps, starts and retention, `events` the history; `copy_step` and
  `rebuild_layout` mend a run.
- What is stored: `find` opens what is at a path, `contents` is what was opened, `fill` reads it into memory,
  `verification` compares it with its digests, `states` takes any checkpoint apart into named items.
- States: `capture` takes a state apart, `captured` is a state of one instant, `leaf_names` are the names of its leaves
  and dtypes, `wrappers` and `optimizer_parts` see through what is around a model or an optimizer, `another_kind`
  compares two of those. `guards` hold steps back; `sharded` and `cover` are the geometry of shards; `backends` and
  `device` know tensors of devices.
- Ranks: `worlds` are the ranks that save together, and a `RankZeroWord` is one that rank 0 chooses for all.
- Saves: `ledger` waits for those that are under way, `progress_of` says how far they are, `kept_memory` is what they
  share, a `CopySave` is one that writes no archive.
- Files of others: `safetensors`, `hf_shards` and `hf_weights` write models for Hugging Face.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = [
    "Appender",
    "CopySave",
    "LocalStorage",
    "MemoryLoan",
    "OffLoop",
    "RankZeroWord",
    "Reader",
    "Sink",
    "Storage",
    "another_kind",
    "backends",
    "bulk",
    "capture",
    "captured",
    "compressed",
    "contents",
    "copy_step",
    "cover",
    "device",
    "disk",
    "events",
    "fields",
    "fill",
    "find",
    "get_loop",
    "guards",
    "hf_shards",
    "hf_weights",
    "kept_memory",
    "leaf_names",
    "ledger",
    "limits",
    "locks",
    "memory",
    "operations",
    "optimizer_parts",
    "pack",
    "places",
    "process",
    "progress_of",
    "rebuild_layout",
    "register_storage",
    "reports",
    "runs",
    "safetensors",
    "save_within",
    "scratches",
    "sharded",
    "shared_memory",
    "spans",
    "spec",
    "states",
    "store_facts",
    "threads",
    "urls",
    "verification",
    "waits",
    "worlds",
    "wrappers",
    "write_by_torch",
]

if TYPE_CHECKING:
    from .core import backends as backends
    from .core import events as events
    from .core import fields as fields
    from .core import report as reports
    from .core import runs as runs
    from .core import spans as spans
    from .core import spec as spec
    from .core.format import safetensors as safetensors
    from .core.host import limits as limits
    from .core.host import memory as memory
    from .core.host import operations as operations
    from .core.host import process as process
    from .core.host import shared_memory as shared_memory
    from .core.host import threads as threads
    from .core.host import waits as waits
    from .core.host.loop import OffLoop as OffLoop
    from .core.host.loop import get_loop as get_loop
    from .core.loading import fill as fill
    from .core.loading import verify as verification
    from .core.loading.archives import contents as contents
    from .core.loading.archives import find as find
    from .core.loading.catch_up import copy_step as copy_step
    from .core.loading.live.optimizer_forms import another_kind as another_kind
    from .core.loading.rebuild import rebuild_layout as rebuild_layout
    from .core.ranks import world as worlds
    from .core.ranks.meeting import RankZeroWord as RankZeroWord
    from .core.saving import default as kept_memory
    from .core.saving import ledger as ledger
    from .core.saving.copy_save import CopySave as CopySave
    from .core.saving.handle import progress_of as progress_of
    from .core.slicing import cover as cover
    from .core.slicing import sharded as sharded
    from .core.staging import device as device
    from .core.staging import guard as guards
    from .core.state import capture as capture
    from .core.state import captured as captured
    from .core.state import names as leaf_names
    from .core.state import optimizers as optimizer_parts
    from .core.state import wrappers as wrappers
    from .core.storage import bulk as bulk
    from .core.storage import compressed as compressed
    from .core.storage import disk as disk
    from .core.storage import locks as locks
    from .core.storage import place as places
    from .core.storage import scratch as scratches
    from .core.storage import store_facts as store_facts
    from .core.storage import url as urls
    from .core.storage.interface import MemoryLoan as MemoryLoan
    from .core.storage.interface import Reader as Reader
    from .core.storage.interface import Sink as Sink
    from .core.storage.interface import Storage as Storage
    from .core.storage.local import LocalStorage as LocalStorage
    from .core.storage.registry import register_storage as register_storage
    from .core.storage.sequential import Appender as Appender
    from .face import states as states
    from .face.around import hf_weights as hf_weights
    from .face.around import pack as pack
    from .face.around import shards as hf_shards
    from .face.around.torch_file import write_by_torch as write_by_torch
    from .face.oneoff import save_within as save_within
else:
    # Where each name is: a module, or a name in one.
    _HOMES = {
        "Appender": ".core.storage.sequential:Appender",
        "CopySave": ".core.saving.copy_save:CopySave",
        "LocalStorage": ".core.storage.local:LocalStorage",
        "MemoryLoan": ".core.storage.interface:MemoryLoan",
        "OffLoop": ".core.host.loop:OffLoop",
        "RankZeroWord": ".core.ranks.meeting:RankZeroWord",
        "Reader": ".core.storage.interface:Reader",
        "Sink": ".core.storage.interface:Sink",
        "Storage": ".core.storage.interface:Storage",
        "another_kind": ".core.loading.live.optimizer_forms:another_kind",
        "backends": ".core.backends",
        "bulk": ".core.storage.bulk",
        "capture": ".core.state.capture",
        "captured": ".core.state.captured",
        "compressed": ".core.storage.compressed",
        "contents": ".core.loading.archives.contents",
        "copy_step": ".core.loading.catch_up:copy_step",
        "cover": ".core.slicing.cover",
        "device": ".core.staging.device",
        "disk": ".core.storage.disk",
        "events": ".core.events",
        "fields": ".core.fields",
        "fill": ".core.loading.fill",
        "find": ".core.loading.archives.find",
        "get_loop": ".core.host.loop:get_loop",
        "guards": ".core.staging.guard",
        "hf_shards": ".face.around.shards",
        "hf_weights": ".face.around.hf_weights",
        "kept_memory": ".core.saving.default",
        "leaf_names": ".core.state.names",
        "ledger": ".core.saving.ledger",
        "limits": ".core.host.limits",
        "locks": ".core.storage.locks",
        "memory": ".core.host.memory",
        "operations": ".core.host.operations",
        "optimizer_parts": ".core.state.optimizers",
        "pack": ".face.around.pack",
        "places": ".core.storage.place",
        "process": ".core.host.process",
        "progress_of": ".core.saving.handle:progress_of",
        "rebuild_layout": ".core.loading.rebuild:rebuild_layout",
        "register_storage": ".core.storage.registry:register_storage",
        "reports": ".core.report",
        "runs": ".core.runs",
        "safetensors": ".core.format.safetensors",
        "save_within": ".face.oneoff:save_within",
        "scratches": ".core.storage.scratch",
        "sharded": ".core.slicing.sharded",
        "shared_memory": ".core.host.shared_memory",
        "spans": ".core.spans",
        "spec": ".core.spec",
        "states": ".face.states",
        "store_facts": ".core.storage.store_facts",
        "threads": ".core.host.threads",
        "urls": ".core.storage.url",
        "verification": ".core.loading.verify",
        "waits": ".core.host.waits",
        "worlds": ".core.ranks.world",
        "wrappers": ".core.state.wrappers",
        "write_by_torch": ".face.around.torch_file:write_by_torch",
    }

    def __getattr__(name: str) -> Any:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module, _, own = home.partition(":")
        found = import_module(module, __package__)
        found = globals()[name] = getattr(found, own) if own else found
        return found

    def __dir__() -> list[str]:
        return __all__
