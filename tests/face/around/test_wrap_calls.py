"""Calls of wrapped functions: which argument is the destination, what is refused, what fails, and what the handle tells."""

from __future__ import annotations

import asyncio
import functools
import gc
import io
import json
import os
import pickle
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint
from budgets import with_budget
from racing import Call, Thrown
from states import MIB
from wrapped import loaded, names, records, save_text

import async_ckpt
from async_ckpt import NothingWrittenError, SaveHandle, SaveReport, UnsupportedStateError, wrap
from async_ckpt.core.host.threads import LibraryThread
from async_ckpt.core.saving import kept_memory
from async_ckpt.core.spec import with_article

# --- which argument is the destination ---------------------------------------------------------------------------


def test_the_destination_is_found_by_its_name_by_being_the_only_path_or_is_said(tmp_path):
    def by_name(a: str, save_directory: str) -> None:
        Path(save_directory).write_text(a)

    def only_path(where: Path, a: int) -> None:
        where.write_text(str(a))

    def said(a: str, b: str, /, *rest: str, **more: str) -> None:
        Path(more.get("c") or (*rest, b)[0]).write_text(a)

    wrap(by_name)("1", str(tmp_path / "1")).result()
    wrap(by_name)(save_directory=str(tmp_path / "2"), a="2").result()
    wrap(only_path)(tmp_path / "3", 3).result()
    wrap(said, destination=1)("4", str(tmp_path / "4")).result()
    wrap(said, destination="b")("5", str(tmp_path / "5")).result()
    wrap(said, destination=2)("6", "x", str(tmp_path / "6")).result()
    wrap(said, destination="c")("7", "x", c=str(tmp_path / "7")).result()
    wrap(by_name, destination=1)("8", save_directory=str(tmp_path / "8")).result()

    assert [(tmp_path / name).read_text() for name in "12345678"] == [*"12345678"]


def test_the_destination_may_be_the_default_of_its_argument(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def by_name(number: int, path: str = "a") -> None:
        Path(path).write_text(str(number))

    def said(number: int, *, where: Path = Path("b")) -> None:
        where.write_text(str(number))

    wrap(by_name)(1).result()
    wrap(said, destination="where")(2).result()

    assert ((tmp_path / "a").read_text(), (tmp_path / "b").read_text()) == ("1", "2")


@pytest.mark.parametrize(
    ("fn", "arguments", "message"),
    [
        (lambda a, b: None, ("x", "y"), "several of the arguments of <lambda> may be the path"),
        (lambda folder, filename: None, ("x", "y"), "several of the arguments of <lambda> may be the path"),
        (
            lambda a, b: None,
            (1, 2),
            "<lambda> was given no path to write to; write a function that takes one, such as def save\\(state, path\\)",
        ),
        (lambda path: None, (), "missing a required argument: 'path'"),
        (lambda path: None, ("a", "b"), "too many positional arguments"),
        (
            torch.save,
            (1, io.BytesIO()),
            "given a BytesIO to write to; a wrapped function needs a path, a URL or a Place",
        ),
        (torch.save, ("text", io.BytesIO()), "given a BytesIO to write to"),
        (lambda path: None, (b"bytes",), "<lambda> was given no path to write to"),
    ],
)
def test_a_destination_that_cannot_be_told_is_an_error_of_the_call(fn, arguments, message):
    with pytest.raises(TypeError, match=message):
        wrap(fn)(*arguments)


def test_a_destination_that_the_function_does_not_have_is_refused_when_it_is_wrapped():
    with pytest.raises(TypeError, match="has no argument 'where'; it has obj, f, "):
        wrap(torch.save, destination="where")
    with pytest.raises(TypeError, match="has no argument 7; it has obj, f, "):
        wrap(torch.save, destination=7)
    with pytest.raises(TypeError, match="was called without its destination 1"):
        wrap(lambda *parts: None, destination=1)("x")
    with pytest.raises(TypeError, match="given an int to write to"):
        wrap(lambda a, b: None, destination="b")("x", 1)


def test_a_builtin_function_without_a_signature_can_be_wrapped(tmp_path):
    handle = wrap(dict.__setitem__, destination=1)({}, str(tmp_path / "x"), 2)

    assert isinstance(handle.exception(), NothingWrittenError)


@pytest.mark.parametrize(
    ("kind", "given"),
    [(str, "x.txt"), (Path, Path("x.txt")), (str, os.DirEntry)],
    ids=["str", "Path", "other"],
)
def test_the_function_gets_the_kind_of_path_that_it_was_given(tmp_path, kind, given):
    seen = []

    def save(path: Any) -> None:
        seen.append(path)
        Path(path).write_text("x")

    if given is os.DirEntry:
        (tmp_path / "x.txt").touch()
        (given,) = os.scandir(tmp_path)
        wrap(save)(given).result()
    else:
        wrap(save)(kind(tmp_path / given)).result()

    assert isinstance(seen[0], kind)
    assert os.path.basename(seen[0]) == "x.txt"
    assert (tmp_path / "x.txt").read_text() == "x"


@pytest.mark.parametrize("wrong", [True, -1, 1.0, b"path", ["path"]])
def test_a_destination_that_is_neither_a_name_nor_a_position_is_refused(wrong):
    with pytest.raises(TypeError, match="destination must be the name or the position of an argument, got"):
        wrap(torch.save, destination=wrong)


# --- what cannot be wrapped --------------------------------------------------------------------------------------


async def coroutine(path: str) -> None:
    """Writes when it is awaited."""


def generator(path: str) -> Any:
    yield path


async def async_generator(path: str) -> Any:
    yield path


class AwaitedCall:
    async def __call__(self, path: str) -> None:
        """Writes when it is awaited."""


@pytest.mark.parametrize(
    "fn",
    [coroutine, generator, async_generator, functools.partial(coroutine), AwaitedCall()],
    ids=lambda fn: str(fn)[:20],
)
def test_what_does_not_write_when_it_is_called_cannot_be_wrapped(fn):
    with pytest.raises(TypeError, match="when it is awaited or iterated; wrap a plain function"):
        wrap(fn)


@pytest.mark.parametrize(
    "fn",
    [
        torch.load, torch.jit.load, torch.distributed.checkpoint.load, np.load, json.load, pickle.load,
        safetensors.torch.load_file, async_ckpt.load, functools.partial(functools.partial(torch.load), weights_only=True),
    ],
)  # fmt: skip
def test_a_function_that_reads_cannot_be_wrapped(fn):
    with pytest.raises(TypeError, match=r"load\w* reads, and wrap is for functions that write"):
        wrap(fn)


def test_the_methods_that_read_a_run_cannot_be_wrapped(tmp_path):
    with async_ckpt.AsyncCheckpointer(tmp_path) as ckpt:
        for fn in (ckpt.load, ckpt.restore):
            with pytest.raises(TypeError, match=r"AsyncCheckpointer\.\w+ reads, and wrap is for functions"):
                wrap(fn)


def test_arguments_that_are_swapped_are_told_apart_at_once(tmp_path):
    path = str(tmp_path / "x.pt")
    with pytest.raises(TypeError, match=r"swapped: f must be a path, but is a dict; call save\(obj, f\)"):
        wrap(torch.save)(path, {"w": torch.ones(1)})
    with pytest.raises(TypeError, match="file must be a path, but is an ndarray"):
        wrap(np.save)(np.ones(1), path)
    for save in (safetensors.torch.save_file, lambda state, path: torch.save(state, path)):
        for state in ({"w": torch.ones(1)}, torch.nn.Linear(1, 1)):
            with pytest.raises(TypeError, match=r"swapped: (filename|path) must be a path, but is a (dict|Linear)"):
                wrap(save)(path, state)
    assert list(tmp_path.iterdir()) == []

    wrap(lambda name, *, target: Path(name).write_text("x"), destination="name")(path, target={}).result()
    wrap(lambda path, target: Path(path).write_text("x"))(path, {}).result()
    save_to = wrap(lambda target, where: torch.save(target, where))
    save_to(torch.ones(1), path).result()  # a target is no place
    wrap(torch.save)(path, path).result()  # a text may be what is saved
    assert torch.load(path) == path


@pytest.mark.parametrize(
    ("fn", "told"),
    [
        (json.dump, "dump writes to an open text file, not to a path; wrap a function that opens the path"),
        (pickle.dump, "dump writes to an open file, .* or pass file_object=True"),
        (async_ckpt.unpack, "unpack reads, and wrap is for functions that write"),
        (open, "open opens a file; wrap the function that writes to it"),
    ],
)
def test_what_does_not_write_to_a_path_cannot_be_wrapped(fn, told):
    with pytest.raises(TypeError, match=told):
        wrap(fn)


@pytest.mark.parametrize(
    ("kind", "shown"),
    [
        ("dict", "a dict"),
        ("int", "an int"),
        ("ndarray", "an ndarray"),
        ("X", "an X"),
        ("LSTM", "an LSTM"),
        ("UUID", "a UUID"),
    ],
)
def test_a_type_has_the_article_that_is_spoken(kind, shown):
    assert with_article(kind) == shown


@pytest.mark.parametrize("value", ["out.pt", 3, {"w": 1}, None, staticmethod(torch.save)])
def test_what_is_no_function_cannot_be_wrapped(value):
    told = "None" if value is None else with_article(type(value).__name__)
    with pytest.raises(TypeError, match=f"wrap takes a function, not {told}; pass the function itself"):
        wrap(value)


def test_a_wrapped_function_looks_like_the_one_that_it_wraps():
    save = wrap(torch.save)

    assert save.__name__ == "save"
    assert save.__wrapped__ is torch.save
    assert save.__doc__ == torch.save.__doc__


def test_arguments_that_cannot_be_copied_are_refused_and_nothing_is_kept(tmp_path):
    with pytest.raises(UnsupportedStateError, match="save_text cannot be called in the background"):
        wrap(save_text)(threading.Lock(), str(tmp_path / "x"))
    assert names(tmp_path) == []

    wrap(save_text)("x", str(tmp_path / "x")).result()  # nor is the destination taken


# --- functions that fail -----------------------------------------------------------------------------------------


class Odd(BaseException):
    """No Exception."""


def half_done(error: BaseException) -> Callable[[Any, str], None]:
    def save(state: Any, path: str) -> None:
        os.makedirs(path)
        Path(path, "part").write_text("half")
        Path(path + ".json").write_text("{}")
        raise error

    return save


@pytest.mark.parametrize(
    "error",
    [
        Thrown("x"),
        OSError(28, "no space"),
        SystemExit(3),
        KeyboardInterrupt(),
        asyncio.CancelledError(),
        Odd(),
    ],
    ids=repr,
)
def test_what_a_function_raises_is_on_the_handle_and_nothing_is_visible(tmp_path, error):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "old").write_text("old")
    save = wrap(half_done(error))
    handle = save(torch.ones(3), str(tmp_path / "y"))
    assert handle.exception() is error
    with pytest.raises(type(error)):
        handle.result()
    assert names(tmp_path) == ["x/old"]

    assert wrap(save_text)("next", str(tmp_path / "y")).result().status == "committed"


@pytest.mark.parametrize("error", [StopIteration(1), StopAsyncIteration(), GeneratorExit()], ids=repr)
def test_what_python_itself_uses_to_end_things_does_not_hang_the_handle(tmp_path, error):
    handle = wrap(half_done(error))(1, str(tmp_path / "y"))
    found = handle.exception(60)

    assert error in (found, found.__cause__)
    assert names(tmp_path) == []


def test_a_stream_that_fails_in_the_middle_leaves_nothing(tmp_path):
    class Unpicklable:
        def __reduce__(self) -> Any:
            raise Thrown("in the middle")

        def __deepcopy__(self, memo: Any) -> Unpicklable:
            return self

    (tmp_path / "x.pt").write_text("old")
    handle = wrap(torch.save)([torch.ones(9 * MIB), Unpicklable()], tmp_path / "x.pt")

    assert isinstance(handle.exception(), Thrown)
    assert names(tmp_path) == ["x.pt"]
    assert (tmp_path / "x.pt").read_text() == "old"


def write_nothing(path: str) -> None:
    """Not a byte."""


def write_elsewhere(path: str) -> None:
    Path(path).parent.parent.joinpath("elsewhere").write_text("x")


def leave_open(path: str) -> None:
    leave_open.file = open(path, "w")  # noqa: SIM115
    leave_open.file.write("in the buffer")


@pytest.mark.parametrize(
    ("save", "message"),
    [
        (write_nothing, "wrote nothing to the path that it was given; .* is left as it was"),
        (write_elsewhere, "wrote nothing to the path that it was given"),
        (leave_open, "left x open, so its content may be incomplete; close it before returning"),
        (os.mkdir, "wrote nothing to the path that it was given"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_function_that_does_not_write_or_end_its_file_is_an_error(tmp_path, save, message):
    (tmp_path / "link").symlink_to(tmp_path)
    handle = wrap(save)(str(tmp_path / "link" / "x"))

    with pytest.raises(NothingWrittenError, match=message):
        handle.result()
    assert "x" not in names(tmp_path)
    if save is leave_open:
        leave_open.file.close()


def test_a_file_that_is_left_to_the_collector_is_an_error(tmp_path):
    """Which may close it without what Python has buffered for it."""

    def save(path: str) -> None:
        file = open(path, "w")  # noqa: SIM115
        file.write("x")
        circle = [file]
        circle.append(circle)

    threshold = gc.get_threshold()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # of whoever collects it in the end
        gc.set_threshold(0)  # no thread's allocation sets the collector off
        try:
            with pytest.raises(NothingWrittenError, match="left x open"):
                wrap(save)(str(tmp_path / "x")).result()
        finally:
            gc.set_threshold(*threshold)
            gc.collect()
    assert names(tmp_path) == []


def test_a_file_that_is_only_read_may_stay_open(tmp_path):
    kept = []

    def save(path: str) -> None:
        Path(path).write_text("x")
        kept.append(open(path))  # noqa: SIM115

    wrap(save)(str(tmp_path / "x")).result()
    kept[0].close()


def test_a_stream_without_a_byte_is_an_error(tmp_path):
    (tmp_path / "x").write_text("old")
    handle = wrap(lambda f: None, file_object=True)(str(tmp_path / "x"))

    with pytest.raises(NothingWrittenError, match="wrote nothing"):
        handle.result()
    assert (tmp_path / "x").read_text() == "old"


def test_a_failure_keeps_no_copies(tmp_path):
    gone = []

    def save(state: Any, path: str) -> None:
        gone.append(weakref.ref(state["w"]))
        inner(state)

    def inner(state: Any) -> None:
        try:
            state["w"].view(7)
        except RuntimeError as error:
            raise Thrown("x") from error

    gone_too = torch.ones(1000)
    gone.append(weakref.ref(gone_too))
    handle = wrap(save)({"w": gone_too}, str(tmp_path / "x"))
    del gone_too
    error = handle.exception()

    assert isinstance(error, Thrown)
    assert error.__traceback__ is not None
    assert [ref() for ref in gone] == [None, None]


def test_a_finished_handle_keeps_neither_the_arguments_nor_their_copies(tmp_path):
    gone = []

    def save(state: Any, path: str) -> None:
        gone.append(weakref.ref(state["w"]))
        torch.save(state, path)

    w = torch.ones(1000)
    gone.append(weakref.ref(w))
    handle = wrap(save)({"w": w}, str(tmp_path / "x"))
    del w
    handle.result()

    assert [ref() for ref in gone] == [None, None]


@pytest.mark.parametrize("fn", [async_ckpt.save, wrap(save_text)], ids=["save", "wrapped"])
def test_a_function_that_saves_in_the_background_itself_is_refused(tmp_path, fn):
    handle = wrap(fn)({"w": torch.ones(3)}, tmp_path / "x.tar")

    with pytest.raises(ValueError, match="nothing can be saved there in the background"):
        handle.result()
    assert names(tmp_path) == []


def test_wrapped_functions_may_write_into_a_folder_that_is_packed(tmp_path):
    with async_ckpt.pack(tmp_path / "x.tar") as folder:
        wrap(torch.save)(torch.ones(3), folder / "x.pt").result()
        async_ckpt.save({"w": torch.ones(3)}, folder / "x.tar").result()
    folder.handle.result()

    with async_ckpt.unpack(tmp_path / "x.tar") as again:
        assert sorted(os.listdir(again)) == ["x.pt", "x.tar"]


# --- the handle --------------------------------------------------------------------------------------------------


def test_the_report_has_the_numbers_of_the_save(tmp_path):
    handle = wrap(torch.save)([torch.ones(1000), torch.ones(10)], tmp_path / "x.pt")
    report = handle.result()

    assert isinstance(report, SaveReport)
    assert (report.status, report.step, report.path) == ("committed", None, str(tmp_path / "x.pt"))
    assert report.num_bytes == (tmp_path / "x.pt").stat().st_size
    assert report.num_tensors == 2
    assert report.retries == 0
    assert 0 < report.stall_seconds <= report.total_seconds
    assert report.write_seconds + report.commit_seconds <= report.total_seconds
    assert [(d.path, d.num_bytes) for d in report.destinations] == [(report.path, report.num_bytes)]
    assert handle.path == report.path
    assert handle.done()


def test_the_progress_ends_with_all_of_it(tmp_path, gate):
    def save(state: Any, path: str) -> None:
        gate.passed()
        Path(path).write_bytes(bytes(10 * state.nbytes))

    handle = wrap(save)(torch.ones(1000), str(tmp_path / "x"))
    gate.wait_reached()
    assert handle.progress == async_ckpt.core.report.Progress(4096, 4096, 0)
    gate.open()
    handle.result()

    assert handle.progress.fraction == 1.0
    assert handle.progress.written_bytes == 40_000


async def test_a_handle_can_be_awaited(tmp_path):
    report = await wrap(torch.save)(torch.ones(3), tmp_path / "x.pt")
    assert report.status == "committed"
    with pytest.raises(Thrown):
        await wrap(half_done(Thrown()))(1, str(tmp_path / "y"))


def test_calls_are_made_in_their_order_and_one_at_a_time(tmp_path):
    order: list[Any] = []

    def save(number: int, path: str) -> None:
        order.append(number)
        save_text(str(number), path)
        order.append(number)

    save = wrap(save)
    handles = [save(number, str(tmp_path / str(number))) for number in range(10)]
    for handle in reversed(handles):
        handle.result()

    assert order == [number for number in range(10) for _ in range(2)]


def test_the_function_runs_on_another_thread_and_may_start_its_own(tmp_path):
    seen = []

    def save(path: str) -> None:
        seen.append(threading.current_thread())
        writer = threading.Thread(target=save_text, args=("x", path))
        writer.start()
        writer.join()

    wrap(save)(str(tmp_path / "x")).result()

    assert isinstance(seen[0], LibraryThread)
    assert (tmp_path / "x").read_text() == "x"


def test_many_threads_may_call_at_once(tmp_path):
    save = wrap(torch.save)
    state = torch.arange(10_000)
    calls = [Call(lambda n=n: save(state + n, tmp_path / f"{n}.pt").result()) for n in range(16)]
    for call in calls:
        call.outcome()

    for number in range(16):
        assert torch.equal(loaded(tmp_path / f"{number}.pt"), state + number)


def test_a_failure_that_nobody_looked_at_is_told_at_the_next_call(tmp_path):
    handle = wrap(half_done(Thrown("lost")))(1, str(tmp_path / "y"))
    ended = threading.Event()
    handle.add_done_callback(lambda _: ended.set())
    assert ended.wait(60)
    with pytest.warns(RuntimeWarning, match="y was not saved: Thrown: lost") as told:
        wrap(save_text)("x", str(tmp_path / "x")).result()
    assert told[0].filename == __file__
    assert handle.exception() is not None

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrap(save_text)("x", str(tmp_path / "x")).result()


def test_a_hundred_calls_leave_no_threads_descriptors_or_memory(tmp_path):
    save = wrap(torch.save)

    def count() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0

    def call(number: int) -> None:
        save(torch.ones(number * 7919 % 300_000), tmp_path / f"{number % 3}.pt").result()

    for number in range(10):
        call(number)
    before = count()
    for number in range(100):
        call(number)

    names(tmp_path)
    threads, files = count()
    assert threads <= before[0] + 4  # a crew's threads may still be about to end
    assert files <= before[1] + 2
    assert kept_memory.host_memory()._idle_bytes() <= 32 * MIB


def test_release_gives_the_memory_back(tmp_path):
    wrap(torch.save)(torch.ones(1000), tmp_path / "x.pt").result()
    async_ckpt.release()

    assert repr(kept_memory.host_memory()).endswith(", 0 buffers idle>")


# --- functions within functions ----------------------------------------------------------------------------------


def test_waiting_for_a_handle_in_a_wrapped_function_raises_at_once(tmp_path):
    inner = wrap(torch.save)
    handles = []

    def outer(state: Any, path: str) -> None:
        handles.append(inner(state, elsewhere))
        handles[0].result()

    elsewhere = str(tmp_path / "inner.pt")
    with pytest.raises(RuntimeError, match="must not wait for a save"):
        wrap(outer)(torch.ones(3), str(tmp_path / "outer")).result()
    handles[0].result()

    assert names(tmp_path) == ["inner.pt"]


def test_a_wrapped_function_may_begin_another_save_elsewhere_whatever_memory_is_free(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_memory._shared, "host_memory", with_budget(monkeypatch, 1000))
    inner = wrap(torch.save)
    handles = []

    def outer(state: Any, path: str) -> None:
        handles.append(inner(state, elsewhere))
        torch.save(state, path)

    elsewhere = str(tmp_path / "inner.pt")
    wrap(outer)(torch.ones(1000), str(tmp_path / "outer.pt")).result(60)
    handles[0].result(60)

    assert records(tmp_path / "inner.pt") == records(tmp_path / "outer.pt")


def test_a_wrapped_function_that_is_called_into_the_folder_of_another_is_refused(tmp_path):
    save_weights = wrap(safetensors.torch.save_file)

    def save(state: Any, folder: str) -> None:
        os.makedirs(folder)
        save_weights(state, os.path.join(folder, "model.safetensors"))

    def save_at_once(state: Any, folder: str) -> None:
        os.makedirs(folder)
        save_weights.__wrapped__(state, os.path.join(folder, "model.safetensors"))

    with pytest.raises(ValueError, match=r"nothing can be saved there in the background.*__wrapped__"):
        wrap(save)({"w": torch.ones(3)}, str(tmp_path / "x")).result()
    assert names(tmp_path) == []

    wrap(save_at_once)({"w": torch.ones(3)}, str(tmp_path / "x")).result()
    assert names(tmp_path) == ["x/model.safetensors"]


def test_a_callback_may_call_a_wrapped_function(tmp_path):
    save, ended = wrap(save_text), threading.Event()
    handles = []

    def again(_: SaveHandle) -> None:
        handles.append(save("second", str(tmp_path / "b")))
        ended.set()

    save("first", str(tmp_path / "a")).add_done_callback(again)
    assert ended.wait(60)
    handles[0].result()

    assert names(tmp_path) == ["a", "b"]


def test_modules_and_their_types_come_through(tmp_path):
    state = types.SimpleNamespace(module=json, kind=torch.nn.Linear, dtype=torch.bfloat16)
    seen = []
    wrap(lambda s, path: (seen.append(s), save_text("x", path)))(state, str(tmp_path / "x")).result()

    assert seen[0] is not state
    assert (seen[0].module, seen[0].kind, seen[0].dtype) == (json, torch.nn.Linear, torch.bfloat16)
