"""The walls of the house: who may import whom, and who may start threads or look at the clock."""

import ast
import functools
import importlib
import re
import runpy
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import FunctionType, ModuleType

import async_ckpt

HOUSE = Path(async_ckpt.__file__).parent

# From top to bottom; a module imports only from its own room and from the floors below it.
FLOORS: list[tuple[str, ...]] = [
    ("integrations", "tools", "__main__"),  # outermost wings
    ("following",),  # the path by which users import its engines
    ("weights", "stores"),  # versions of weights; the wing that places ask for by its name
    ("plumbing",),  # what wings may use of the core
    ("__init__", "face", "files"),  # what users call
    ("core.saving", "core.loading"),  # saves and loads
    ("core.ranks",),  # the ranks that save together
    ("core.runs",),  # commits
    ("core.events",),  # the history of a run
    ("core.storage",),  # places
    ("core.staging",),  # snapshots
    ("core.host",),  # host
    ("core.format",),  # bytes
    ("core.state",),  # states
    ("core.slicing",),  # slices
    ("core.pickles",),  # pickles
    ("core.backends",),  # devices
    (
        "core.spec", "core.fields", "core.report", "errors", "core.timing", "core.trace", "core.garbage",
    ),  # values
]  # fmt: skip
# What imports from another room on its own floor, or, on first use, from one above.
NEIGHBOURS = {
    "__init__": {"face", "files", "weights"},
    "__main__": {"tools"},
    "core.trace": {"core.timing"},
    "files": {"face"},
}
# What stands at the top: the names that users import, plumbing, the core, and the wings.
TOP = {
    "__init__", "errors", "files", "following", "face", "plumbing", "core", "stores", "integrations", "weights", "tools", "testing",
}  # fmt: skip
WORDS = FLOORS[-1]


@functools.cache
def modules() -> dict[str, ast.Module]:
    """Every module of the package by its dotted name within it; the package itself is `__init__`."""
    found = {}
    for path in sorted(HOUSE.rglob("*.py")):
        name = ".".join(path.relative_to(HOUSE).with_suffix("").parts)
        found[name] = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return found


def imports(name: str, *, at_load_only: bool = False) -> set[str]:
    """What a module imports: `async_ckpt.x.y` for its own house, the dotted name for others."""
    package = ["async_ckpt", *name.split(".")[:-1]]
    nodes = ast.walk(modules()[name]) if not at_load_only else _at_load(modules()[name])
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            target = ".".join(filter(None, [base, node.module]))
            # `from . import x` and `from ..format import x` may name modules.
            for alias in node.names:
                inner = f"{target}.{alias.name}"
                is_module = inner.removeprefix("async_ckpt.") in modules()
                found.add(inner if is_module else target)
    return found


def _at_load(tree: ast.AST) -> list[ast.AST]:
    nodes: list[ast.AST] = []
    for node in ast.iter_child_nodes(tree):
        for_types_only = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not for_types_only:
            nodes += [node, *_at_load(node)]
    return nodes


@functools.cache
def own(name: str) -> set[str]:
    """The modules of the house that a module imports, by their names within it."""
    return {
        target.removeprefix("async_ckpt").lstrip(".") or "__init__"
        for target in imports(name)
        if target.split(".")[0] == "async_ckpt"
    }


@functools.cache
def foreign(name: str) -> set[str]:
    return {target.split(".")[0] for target in imports(name)} - {"async_ckpt"}


def room_of(name: str) -> str:
    """The room of a module: a folder or module at the top, or within the core."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "core" else parts[0]


def floor_of(name: str) -> int:
    top = room_of(name)
    if top == "core":
        return len(FLOORS)
    floors = [number for number, floor in enumerate(FLOORS) if top in floor]
    assert floors, f"{name} stands on no floor: name its floor here"
    return floors[0]


def starts_threads(name: str) -> bool:
    """Whether a module makes threads, directly or by way of a pool."""
    makers = {
        "Thread", "Timer", "ThreadPoolExecutor", "ProcessPoolExecutor", "start_new_thread", "LibraryThread",
        "to_thread", "run_in_executor",
    }  # fmt: skip
    for node in ast.walk(modules()[name]):
        if isinstance(node, ast.Call):
            called = node.func
            word = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if word in makers:
                return True
    return False


def named(*tops: str) -> list[str]:
    return [name for name in modules() if room_of(name) in tops]


def test_there_is_a_house():
    assert {"saving.attempt", "loading.load", "runs.run", "format.layout", "host.pool", "storage.local"} <= {
        name.removeprefix("core.") for name in modules()
    }


def test_a_module_imports_only_from_its_own_room_and_from_floors_below():
    for name in [name for name in modules() if name.split(".")[0] != "testing"]:
        room = room_of(name)
        allowed = {room, *NEIGHBOURS.get(room, ())}
        wrong = {
            target for target in own(name) if room_of(target) not in allowed and floor_of(target) <= floor_of(name)
        }

        assert not wrong, name


def test_few_things_stand_at_the_top():
    """Beside the module that runs the command, and the mark of a typed package."""
    assert {name.split(".")[0] for name in modules()} - {"__main__"} == TOP


# The path by which users import the face's room for torch.distributed.checkpoint. It has nothing of its own.
DOORS = {"integrations.dcp"}
# The wings that a wing imports.
WINGS_OF = {
    "integrations": {"weights"},
    "weights": set(),
    "tools": {"stores", "weights"},
    "stores": set(),
    "testing": set(),
}


def test_wings_use_of_the_core_and_the_face_only_what_plumbing_and_the_public_names_have():
    for name in named(*WINGS_OF):
        if name not in DOORS:
            assert not [one for one in imported_names(name) if one.split(".")[0] in ("core", "face")], name


def test_a_door_has_nothing_of_its_own():
    for name in DOORS:
        kinds = {type(node) for node in modules()[name].body}
        assert kinds <= {ast.Expr, ast.ImportFrom, ast.Assign}, name


# What wings take out of the modules that plumbing names. The number may only fall; fourteen were added for goodput,
# the order of loaders, FSDP1 and the digests of frameworks' files.
MOST_TAKEN = 303


def test_wings_take_few_names_out_of_the_modules_of_plumbing():
    from async_ckpt import plumbing

    taken = set()
    for name in named(*WINGS_OF):
        drawers = {}
        for node in ast.walk(modules()[name]):
            if isinstance(node, ast.ImportFrom) and node.level and node.module == "plumbing":
                drawers |= {one.asname or one.name: one.name for one in node.names}
        for node in ast.walk(modules()[name]):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in drawers:
                drawer = drawers[node.value.id]
                if isinstance(getattr(plumbing, drawer), ModuleType):
                    taken.add((drawer, node.attr))

    assert len(taken) <= MOST_TAKEN
    assert all(hasattr(getattr(plumbing, drawer), name) for drawer, name in taken)


# Lines of the core, and of the whole package. The numbers may only fall; they were raised for intervals and goodput,
# the order of loaders, FSDP1 and DeepSpeed below the Trainer, digests that are compared before a resume, what the
# command says of broken steps, second names and other trainings, marks, room on disks, a mean of the weights, trackers,
# tensors that are taken over, restores for which all ranks meet, and errors in words for some ninety unusual inputs.
MOST_LINES = {"core": 40_629, "": 81_674}


def test_the_house_does_not_grow():
    for room, most in MOST_LINES.items():
        lines = sum(path.read_text(encoding="utf-8").count("\n") for path in (HOUSE / room).rglob("*.py"))
        assert lines <= most, f"{room or 'the package'} has {lines} lines: take something out before something is added"


def test_wings_use_few_other_wings():
    found = {
        wing: {room_of(target) for name in named(wing) for target in own(name)} & (WINGS_OF.keys() - {wing})
        for wing in WINGS_OF
    }

    assert found == WINGS_OF


def test_plumbing_is_small_and_each_of_its_names_is_explained():
    from async_ckpt import plumbing

    assert len(plumbing.__all__) <= 60
    for name in plumbing.__all__:
        assert f"`{name}`" in (plumbing.__doc__ or ""), name
        value = getattr(plumbing, name)
        assert value.__doc__ or not isinstance(value, type | FunctionType), name


def imported_names(name: str) -> list[str]:
    """Each name that a module imports from its own house, with its module."""
    package = name.split(".")[:-1]
    found = []
    for node in ast.walk(modules()[name]):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*package[: len(package) - node.level + 1], *filter(None, [node.module])]
            found += [".".join([*base, alias.name]) for alias in node.names]
    return found


def test_nothing_imports_testing():
    for name in modules():
        if name.split(".")[0] != "testing":
            assert not [target for target in own(name) if target.split(".")[0] == "testing"], name


def test_the_bytes_know_only_the_words():
    forbidden = {"os", "time", "pathlib", "threading", "asyncio", "socket", "mmap", "tempfile"}
    for name in named("core.format"):
        assert all(room_of(target) in (*WORDS, "core.format") for target in own(name)), name
        assert foreign(name) <= set(sys.stdlib_module_names) | {"xxhash", "zstandard"}, name
        assert not foreign(name) & forbidden, name


def test_the_words_know_nothing_but_each_other():
    for name in named(*WORDS):
        assert foreign(name) <= set(sys.stdlib_module_names), name
        assert all(room_of(target) in WORDS for target in own(name)), name


def test_torch_is_only_where_tensors_are():
    for name in modules():
        if room_of(name) in ("core.format", "core.storage", "core.runs", "stores", *WORDS):
            assert "torch" not in foreign(name), name


_OF_DEVICES = [f"torch.{module}" for module in ("cuda", "npu", "xpu", "mps", "accelerator", "Stream", "Event")]


def test_only_the_backends_know_where_a_tensor_is():
    """`testing` apart: nobody else asks a tensor for its device's type, or a device's module for anything."""
    for name in modules():
        if room_of(name) in ("core.backends", "testing"):
            continue
        asked = [
            ast.unparse(node)
            for node in ast.walk(modules()[name])
            if isinstance(node, ast.Attribute)
            and (
                node.attr in ("is_cuda", "is_cpu", "is_xpu", "is_mps", "is_privateuseone", "get_device_module")
                or ast.unparse(node).endswith("device.type")
                or ast.unparse(node) in _OF_DEVICES
            )
        ]

        assert not asked, name


def test_the_clock_is_only_in_spans():
    for name in modules():
        if name != "core.timing":
            allowed = {"datetime"} if name == "core.state.plain" else set()  # a state may hold dates
            assert not foreign(name) & ({"time", "datetime"} - allowed), name
    asked = {node.attr for node in ast.walk(modules()["core.state.plain"]) if isinstance(node, ast.Attribute)}
    assert not {"now", "utcnow", "today"} & asked


def test_threads_are_started_only_by_the_host():
    for name in modules():
        if room_of(name) not in ("core.host", "testing"):
            assert not starts_threads(name), name


def test_the_clients_of_stores_are_only_in_their_modules():
    for name in modules():
        if not name.startswith("stores.s3."):
            assert "obstore" not in foreign(name), name
        # Lightning reads by fsspec, and its listings are to forget what was there before a save.
        if not name.startswith("stores.fsspec.") and name != "integrations.lightning.checkpoint_paths":
            assert not foreign(name) & {"fsspec", "s3fs"}, name
        if name != "stores.retry":
            assert "tenacity" not in foreign(name), name


def test_optional_packages_are_imported_on_use():
    for name in modules():
        if name.split(".")[0] in ("integrations", "tools", "testing"):
            continue
        at_load = {target.split(".")[0] for target in imports(name, at_load_only=True)} - {"async_ckpt"}

        assert at_load <= set(sys.stdlib_module_names) | {"torch", "xxhash"}, name


def test_the_story_neither_logs_nor_starts_threads():
    for name in ["core.saving.attempt", "core.loading.load", "core.loading.live.match", "core.loading.restore"]:
        assert "logging" not in foreign(name), name
        assert not starts_threads(name), name


def test_every_module_opens_with_its_contract():
    for name in modules():
        text = " ".join((ast.get_docstring(modules()[name]) or "").split())

        assert text, f"{name} has no docstring"
        if not name.endswith("__init__") and name not in ("files", "plumbing"):  # which `help` shows to users
            assert "In: " in text, name
            assert "Out: " in text, name
            assert "Knows nothing of: " in text or "Nothing to agree" in text, name


def test_no_function_is_long():
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                if ast.get_docstring(node) is not None:
                    length -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
                assert length <= 70, f"{name}.{node.name}: {length} lines"


def test_no_room_has_a_circle_under_type_checking_either():
    for room in {room_of(name) for name in modules() if "." in name}:
        members = {name for name in named(room) if not name.endswith("__init__")}
        left = {name: own(name) & members for name in members}
        while free := {name for name, targets in left.items() if not targets & left.keys()}:
            for name in free:
                del left[name]

        assert not left, f"these modules of {room}/ import each other in a circle"


# Modules that have one name because they are the same thing for two clients, or for two packages to run.
NAMED_ALIKE = {"store", "__main__"}


def test_no_two_modules_have_one_name():
    packages = {path.parent.name for path in HOUSE.glob("*/**/__init__.py")} - {"following"}  # also a module at the top
    names = Counter(name.rpartition(".")[2] for name in modules() if not name.endswith("__init__"))
    names.update(packages - {"dcp"})  # integrations.dcp is what users import
    assert {name for name, times in names.items() if times > 1} == NAMED_ALIKE


def test_the_picture_of_the_house_shows_its_floors_and_is_drawn_from_its_text():
    root = HOUSE.parent
    picture = runpy.run_path(str(root / ".ci/picture.py"))
    text = (root / "docs/house.txt").read_text(encoding="utf-8")

    rows = picture["floors"](text)

    assert [tuple(rooms) for rooms, _, _ in rows] == [tuple(floor) for floor in FLOORS]
    for column in (1, 2):
        numbers = {number for row in rows for number, _ in row[column]}
        assert numbers == set(range(1, max(numbers) + 1))
    assert (root / "docs/house.svg").read_text(encoding="utf-8") == picture["drawn"](text)


def test_there_is_no_circle_of_imports():
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path, name])
        if name in done:
            return
        tree = modules()[name]
        wanted = {
            target.removeprefix("async_ckpt").lstrip(".") or "__init__"
            for target in imports(name, at_load_only=True)
            if target.split(".")[0] == "async_ckpt"
        }
        assert tree is not None
        for target in wanted:
            inner = target if target in modules() else f"{target}.__init__"
            if inner in modules() and inner != name and not inner.endswith("__init__"):
                visit(inner, (*path, name))
        done.add(name)

    for name in modules():
        visit(name, ())


def test_importing_the_library_brings_no_optional_package_along():
    script = """
import sys
import torch
before = set(sys.modules)
import async_ckpt
heavy = {"obstore", "s3fs", "fsspec", "zstandard", "tenacity", "rich", "tqdm", "matplotlib", "numpy.testing", "tarfile"}
print(*sorted((set(sys.modules) - before) & heavy))
print(*[t.name for t in __import__("threading").enumerate()])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert done.stdout == "\nMainThread\n"
    assert done.stderr == ""


# Modules of the library that the checkpointer of a training brings along, each about half a millisecond of its start.
# The number may only fall.
MOST_MODULES = 132
# Parts that a training on one rank, at one place, does without.
BY_NEED = {
    "core.ranks.agreement", "core.ranks.shared_values", "core.state.division", "core.saving.file_target",
    "core.saving.ema", "core.staging.file_segments", "core.storage.compressed",
}  # fmt: skip


def test_the_checkpointer_brings_few_modules_along_and_a_plain_save_few_more(tmp_path):
    script = f"""
import sys
from async_ckpt import AsyncCheckpointer
brought = {{name for name in sys.modules if name.startswith("async_ckpt")}}
with AsyncCheckpointer({str(tmp_path / "run")!r}) as ckpt:
    ckpt.save({{"step": 1}}, step=1).result()
print(len(brought))
print(*sorted(name.removeprefix("async_ckpt.") for name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    num_brought, loaded = done.stdout.splitlines()
    assert int(num_brought) <= MOST_MODULES
    assert modules().keys() >= BY_NEED
    assert not BY_NEED & {*loaded.split()}


def test_the_way_of_a_plain_save_is_told_with_fifteen_modules():
    text = (HOUSE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    way = text.partition("## The way of `state`")[2].partition("Beside the way")[0]
    named_there = set(re.findall(r"`([a-z_]+(?:\.[a-z_]+)?)(?:\.[A-Za-z_.]+)?`", way))

    told = {name.removeprefix("core.").removeprefix("face.") for name in modules()} & named_there

    assert "saving.attempt" in told
    assert len(told) <= 15, sorted(told)


def test_a_save_and_a_load_on_a_local_disk_import_no_wing(tmp_path):
    script = f"""
import sys
import async_ckpt
async_ckpt.save({{"step": 1}}, {str(tmp_path / "x.tar")!r}).result()
async_ckpt.load({str(tmp_path / "x.tar")!r})
with async_ckpt.AsyncCheckpointer({str(tmp_path / "run")!r}) as ckpt:
    ckpt.save({{"step": 1}}, step=1).result()
    ckpt.restore({{"step": 0}})
print(*sorted(name for name in sys.modules if name.startswith({tuple(f"async_ckpt.{wing}" for wing in WINGS_OF)!r})))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert done.stdout == "\n"


def test_what_the_page_of_the_architecture_names_is_there():
    """Its walks from top to bottom are read beside the code."""
    text = (HOUSE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    names = {name for name in re.findall(r"`([a-z_]+(?:\.[A-Za-z_]+)+)`", text) if not name.endswith((".py", ".json"))}
    assert len(names) > 50

    def is_there(name: str) -> bool:
        parts = name.split(".")
        for wing in ("core", "face", "stores", "weights", "tools", ""):
            for num in range(len(parts), -1, -1):
                with suppress(ModuleNotFoundError):
                    place = importlib.import_module(".".join(filter(None, ["async_ckpt", wing, *parts[:num]])))
                    break
            with suppress(AttributeError):
                functools.reduce(getattr, parts[num:], place)
                return True
        return False

    assert [name for name in sorted(names) if not is_there(name)] == []
