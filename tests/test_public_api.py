"""The contract with users: names, signatures, and a docstring for each."""

import ast
import contextlib
import inspect
import pydoc

import pytest

import async_ckpt
from async_ckpt import AsyncCheckpointer, CheckpointError, RngState, SaveHandle, SaveReport
from async_ckpt.core.report import Progress, VerifyReport
from async_ckpt.core.staging.held_snapshot import HeldSnapshot

NAMES = [
    "AsyncCheckpointer",
    "CheckpointError",
    "CorruptCheckpointError",
    "Due",
    "Ema",
    "HeldSnapshot",
    "Keep",
    "Naming",
    "NonFinite",
    "NotCommittedError",
    "PerRank",
    "Place",
    "Publisher",
    "PullReport",
    "RngState",
    "SaveHandle",
    "SaveReport",
    "StepExistsError",
    "StorageFullError",
    "StorageUnavailableError",
    "Subscriber",
    "TornSnapshotError",
    "VerifyReport",
    "Zstd",
    "errors",
    "export_hf",
    "files",
    "follow",
    "history",
    "inspect",
    "load",
    "merge",
    "pack",
    "release",
    "save",
    "sharded",
    "snapshot",
    "unpack",
    "verify",
    "wrap",
]

# name -> its parameters: `*` divides off what must be given by name, `=` shows a default.
SIGNATURES = {
    async_ckpt.save: "(obj, path, *, guard=None, select=None, compression=None)",
    async_ckpt.sharded: "(tensor, mesh, placements)",
    async_ckpt.pack: "(destination, *, compression=None, scratch=None)",
    async_ckpt.files.pack_folder: "(folder, destination, *, compression=None)",
    async_ckpt.unpack: "(source, *, scratch=None, max_bytes=None, max_file_bytes=None, max_members=1000000)",
    async_ckpt.files.extract: "(source, folder, *, max_bytes=None, max_file_bytes=None, max_members=1000000)",
    async_ckpt.load: "(path, map_location=None, select=None, trust=False, verify=True, mmap=False, types=(), from_ranks=None)",
    async_ckpt.release: "()",
    async_ckpt.verify: "(path, *, base=None)",
    async_ckpt.snapshot: "(state, *, guard=None, host_bytes=None)",
    async_ckpt.files.local_read_dir: "(path)",
    async_ckpt.files.local_read_files: "(path, names, *, missing='skip')",
    async_ckpt.files.local_work_dir: "(output)",
    async_ckpt.history: "(run)",
    async_ckpt.inspect: "(path)",
    async_ckpt.files.upload_directory: "(local, cloud)",
    async_ckpt.files.download_directory: "(cloud, local)",
    async_ckpt.files.exists: "(path)",
    async_ckpt.files.isdir: "(path)",
    async_ckpt.files.list_dir: "(path)",
    async_ckpt.files.remove: "(path)",
    async_ckpt.follow: (
        "(root, into, engine=None, *, once=False, status=None, poll_seconds=1.0, patience_seconds=1800.0, stop=None)"
    ),
    async_ckpt.merge: "(run, step, destination, *, from_ranks=None, trust=False, verify=True)",
    async_ckpt.files.open_file: "(path, mode='rb')",
    AsyncCheckpointer: (
        "(root, *, keep=None, due=None, guard=None, ema=None, host_bytes=None, "
        "segment_bytes=None, on_overlap='wait', max_in_flight=1, on_rollback=None, naming=None, strict=False, "
        "exit_timeout=None, progress=False, commit=None, max_bandwidth=None, trace=None, "
        "ranks=None, store=None, differing='keep', check_replicas=False, mesh=None, check=None)"
    ),
    AsyncCheckpointer.save: (
        "(self, state, step, *, overwrite=False, guard=that of the checkpointer, record=None, rolling=False, ttl_seconds=None, "
        "select=None, unchanged='auto', per_rank=(), driver=None)"
    ),
    AsyncCheckpointer.should_save: "(self, step)",
    AsyncCheckpointer.mark: "(self, step, kind, *, note='')",
    AsyncCheckpointer.marks: "(self)",
    async_ckpt.NonFinite: "(every=1, ignore=None)",
    AsyncCheckpointer.load: (
        "(self, step=None, *, map_location=None, select=None, trust=False, verify=True, mmap=False, types=(), from_ranks=None)"
    ),
    AsyncCheckpointer.restore: (
        "(self, state, step=None, *, select=None, strict=None, trust=False, verify=True, types=(), from_ranks=None, "
        "fallback=False, broadcast=None, marked=None)"
    ),
    AsyncCheckpointer.steps: "(self)",
    AsyncCheckpointer.catch_up: "(self)",
    AsyncCheckpointer.latest: "(self)",
    AsyncCheckpointer.wait: "(self, timeout=None)",
    AsyncCheckpointer.records: "(self)",
    AsyncCheckpointer.history: "(self)",
    AsyncCheckpointer.best: "(self, metric, *, mode)",
    AsyncCheckpointer.track: "(self, tracker, *, best=None, timeout=10.0)",
    AsyncCheckpointer.metrics: "(self, prefix='')",
    AsyncCheckpointer.prewarm: "(self, state, *, per_rank=())",
    AsyncCheckpointer.close: "(self)",
    SaveHandle.result: "(self, timeout=None)",
    SaveHandle.exception: "(self, timeout=None)",
    SaveHandle.wait_staged: "(self, timeout=None)",
    SaveHandle.add_done_callback: "(self, fn)",
    SaveReport.as_dict: "(self, prefix='')",
    AsyncCheckpointer.interval: "(self)",
    async_ckpt.Due: (
        "(every=None, seconds=None, deadline=None, margin_seconds=30.0, signals=False, overhead=None, mtbf=None, "
        "at_least=None, at_most=None)"
    ),
    async_ckpt.Naming: "(step_format='step_{:08d}', tracker='latest')",
    async_ckpt.Keep: "(last=None, every=None, best=None, seconds=None, whole_folder=False, good=None, bytes=None, free=None)",
    async_ckpt.Ema: "(decay, groups=('model',))",
    async_ckpt.Place: "(url, *, options=None, engine=None, fs=None, keep=None, every=None, volatile=None, compression=None)",
    async_ckpt.Publisher: "(root, *, anchor_every=20, encoding='xor', keep=None, acknowledged=None, on_rollback=None, host_bytes=None, local=False)",
    async_ckpt.Publisher.publish: "(self, state_or_snapshot, version, config_folder=None, *, guard=None)",
    async_ckpt.Publisher.wait_readable: "(self, version, timeout=None)",
    async_ckpt.Publisher.versions: "(self)",
    async_ckpt.Publisher.close: "(self)",
    async_ckpt.Subscriber: "(root, *, base=None)",
    async_ckpt.Subscriber.pull: "(self, into, version=None)",
    async_ckpt.Subscriber.watch: "(self, *, poll_seconds=1.0)",
    async_ckpt.Subscriber.versions: "(self)",
    async_ckpt.Subscriber.latest: "(self)",
    async_ckpt.Subscriber.newest: "(self)",
    async_ckpt.Subscriber.close: "(self)",
    RngState: "(keys=None)",
    RngState.state_dict: "(self)",
    RngState.load_state_dict: "(self, state_dict)",
}


def shown(function: object) -> str:
    """A signature without its annotations."""
    parts = []
    star = False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            parts.append("*")
            star = True
        if parameter.default is parameter.empty:
            parts.append(parameter.name)
        else:
            parts.append(f"{parameter.name}={parameter.default!r}")
    return f"({', '.join(parts)})"


def members(owner: type) -> list[tuple[str, object]]:
    return [
        (name, value)
        for name, value in vars(owner).items()
        if not name.startswith("_") and (callable(value) or isinstance(value, property))
    ]


def test_the_public_names_are_these_and_no_others():
    assert async_ckpt.__all__ == NAMES
    assert all(hasattr(async_ckpt, name) for name in NAMES)


def test_the_public_names_are_sorted_and_each_stands_once():
    assert sorted(set(async_ckpt.__all__)) == async_ckpt.__all__


@pytest.mark.parametrize("function", list(SIGNATURES), ids=lambda function: function.__qualname__)
def test_the_signature_is_the_contract(function):
    assert shown(function) == SIGNATURES[function]


@pytest.mark.parametrize("function", list(SIGNATURES), ids=lambda function: function.__qualname__)
def test_every_parameter_and_result_has_its_type(function):
    signature = inspect.signature(function)
    for name, parameter in signature.parameters.items():
        assert name == "self" or parameter.annotation is not parameter.empty, name
    if not inspect.isclass(function):
        assert signature.return_annotation is not signature.empty


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_says_what_it_is(name):
    value = getattr(async_ckpt, name)
    assert value.__doc__, name
    assert value.__doc__ != Exception.__doc__
    if inspect.isclass(value) and not issubclass(value, Exception):
        inherited = {member for base in value.__mro__[1:] for member in vars(base)}
        for member, found in members(value):
            assert inspect.getdoc(found) or member in inherited or member == "bandwidth", f"{name}.{member}"


def has_example(text: str) -> bool:
    """Whether a line of a docstring is a call, or what it gives, in Python."""
    for line in text.splitlines()[1:]:
        with contextlib.suppress(SyntaxError):
            tree = ast.parse(line.strip() + (" pass" if line.rstrip().endswith(":") else ""))
            if any(isinstance(node, ast.Call | ast.Await | ast.Subscript) for node in ast.walk(tree)):
                return True
    return False


def callables() -> dict[str, object]:
    """What users call, by its name: functions, classes, and their methods and properties."""
    named = {name: getattr(async_ckpt, name) for name in NAMES}
    found = {
        name: value
        for name, value in named.items()
        if not inspect.ismodule(value) and not (inspect.isclass(value) and issubclass(value, Exception))
    }
    found |= {f"files.{name}": getattr(async_ckpt.files, name) for name in async_ckpt.files.__all__}
    classes = [AsyncCheckpointer, SaveHandle, SaveReport, RngState, VerifyReport]
    classes += [async_ckpt.Publisher, async_ckpt.Subscriber, async_ckpt.PullReport]
    for owner in classes:
        found |= {f"{owner.__name__}.{name}": value for name, value in members(owner) if name != "bandwidth"}
    for name in ("completion", "state_dict", "keys", "items", "get", "stall_seconds", "close"):
        found[f"HeldSnapshot.{name}"] = getattr(HeldSnapshot, name)
    return found | {"HeldSnapshot": HeldSnapshot, "VerifyReport": VerifyReport}


def test_everything_that_is_called_shows_an_example():
    lacking = [name for name, value in callables().items() if not has_example(inspect.getdoc(value) or "")]
    assert lacking == []


def test_what_is_no_example_is_not_taken_for_one():
    assert not has_example("Wait.\n\nIdempotent. Raises KeyError.\nReturns (at once) what is there.")
    assert has_example("Wait.\n\n    with ckpt.wait() as x:")


def test_every_option_is_explained():
    text = AsyncCheckpointer.__doc__
    for option in inspect.signature(AsyncCheckpointer).parameters:
        assert f"{option}:" in text, option
    for option in inspect.signature(async_ckpt.load).parameters:
        assert f"{option}:" in async_ckpt.load.__doc__, option


def test_the_library_says_its_version():
    assert async_ckpt.__version__.count(".") == 2


def test_the_errors_are_what_callers_already_catch():
    assert issubclass(async_ckpt.NotCommittedError, FileNotFoundError)
    assert issubclass(async_ckpt.UnsupportedStateError, TypeError)
    assert issubclass(async_ckpt.ClosedError, RuntimeError)
    assert issubclass(async_ckpt.StorageFullError, async_ckpt.StorageUnavailableError)
    errors = [name for name in vars(async_ckpt.errors) if name.endswith("Error")]
    assert len(errors) >= 19
    assert all(issubclass(getattr(async_ckpt.errors, name), CheckpointError) for name in errors)


def test_every_error_is_found_at_the_top_too_and_nothing_else_is_made_up():
    for name in [name for name in vars(async_ckpt.errors) if name.endswith("Error")]:
        assert getattr(async_ckpt, name) is getattr(async_ckpt.errors, name)
    for name in ("NoSuchError", "ValueError", "Progress", "extract"):
        with pytest.raises(AttributeError, match=f"no attribute '{name}'"):
            getattr(async_ckpt, name)


def test_the_helpers_for_files_are_imported_like_any_module():
    from async_ckpt.files import open_file

    shown = pydoc.render_doc(async_ckpt.files, renderer=pydoc.plaintext)

    assert open_file is async_ckpt.files.open_file
    assert "async_ckpt.files - Use" in shown
    assert "Knows nothing of" not in shown


def test_dir_lists_what_users_use():
    listed = dir(async_ckpt)

    assert set(NAMES) <= set(listed)
    assert "ClosedError" in listed
    assert not {"Any", "TYPE_CHECKING", "annotations"} & set(listed)


def test_help_of_values_shows_only_what_users_use():
    public = {name for name in dir(HeldSnapshot) if not name.startswith("_")}

    assert public == {"completion", "state_dict", "keys", "items", "get", "stall_seconds", "close"}
    assert not hasattr(async_ckpt.Due, "is_never")
    assert "A future that is done" in inspect.getdoc(SaveHandle.staging_completion)


def test_help_shows_no_address_of_an_object():
    for value in [getattr(async_ckpt, name) for name in NAMES]:
        assert " object at 0x" not in pydoc.render_doc(value, renderer=pydoc.plaintext)


def test_errors_survive_being_sent_to_another_process():
    import pickle

    error = async_ckpt.StorageFullError("full", path="/x", needed_bytes=2, free_bytes=1)
    again = pickle.loads(pickle.dumps(error))

    assert type(again) is type(error)
    assert (str(again), again.path, again.needed_bytes, again.free_bytes) == ("full", "/x", 2, 1)


def test_reports_and_progress_are_frozen_values():
    report = SaveReport("committed", 1, "x")

    assert report == SaveReport("committed", 1, "x")
    assert hash(report) == hash(SaveReport("committed", 1, "x"))
    assert report.bandwidth == 0.0
    assert Progress(0, 0, 0).fraction == 0.0
    with pytest.raises(AttributeError):
        Progress(1, 1, 1).total_bytes = 2


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_999, "1.0 MB"),
        (11_500_000, "11.5 MB"),
        (1_490_000_000, "1.49 GB"),
        (2 * 10**12, "2000.00 GB"),
    ],
)
def test_sizes_are_shown_in_a_unit_that_fits_them(num_bytes, shown):
    report = SaveReport("committed", 1, "x", num_bytes=num_bytes, total_seconds=1.0)

    assert str(report) == f"step 1: {shown}, stall 0.0 ms, durable after 1.00 s at {shown}/s"


def test_the_package_is_typed():
    from pathlib import Path

    assert Path(async_ckpt.__file__).with_name("py.typed").exists()
