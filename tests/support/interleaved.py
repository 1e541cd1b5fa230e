"""Processes that share a store, one request at a time, in an order that a test chooses. They are threads of the test."""

import itertools
import threading
from collections.abc import Callable, Sequence

from racing import PATIENCE, Call

from async_ckpt import Keep
from async_ckpt.core.runs.manifest import Archive, Manifest, parse
from async_ckpt.core.runs.run import Run
from async_ckpt.core.runs.starts import Seen, Start, split_starts
from async_ckpt.core.runs.tenure import Tenure
from async_ckpt.core.storage.interface import Storage


class Killed(BaseException):
    """The process is not there any more."""


class Objects:
    """What lies in a store: shared by all processes."""

    def __init__(self) -> None:
        self.data: dict[str, tuple[bytes, str]] = {}
        self.manifests: list[Manifest] = []  # all that were ever put
        self.seen: dict[Start, Seen] = {}  # likewise
        self._versions = itertools.count()

    def put(self, path: str, data: bytes) -> str:
        if path.endswith("/manifest.json"):
            self.manifests.append(parse(data, path=path))
        version = str(next(self._versions))
        self.data[path] = data, version
        if path.endswith(".seen"):
            (start,) = split_starts([path.replace(".seen", ".json"), path])[1]
            seen = Seen.read(StoreOf(self), start)  # type: ignore[arg-type]
            assert seen is not None
            self.seen[start] = seen
        return version


class StoreOf(Storage):
    """The store as one process has it: `turn` is called ahead of each request, and comes back when it is made."""

    remote = False  # else several requests would be made at once
    in_order = True

    def __init__(self, objects: Objects, turn: Callable[[str, str], None] = lambda *_: None) -> None:
        self._objects, self._turn = objects, turn

    def locate(self, path: str) -> str:
        return f"mem://{path}"

    def names(self, folder: str) -> list[str]:
        self._turn("names", folder)
        below = f"{folder}/" if folder else ""
        return sorted({path.removeprefix(below).split("/")[0] for path in self._objects.data if path.startswith(below)})

    def read(self, path: str) -> tuple[bytes, str]:
        self._turn("read", path)
        if path not in self._objects.data:
            raise FileNotFoundError(path)
        return self._objects.data[path]

    def exists(self, path: str) -> bool:
        self._turn("exists", path)
        return path in self._objects.data

    def existing(self, paths: Sequence[str]) -> list[str]:
        return [path for path in paths if self.exists(path)]

    def put_new(self, path: str, data: bytes) -> None:
        self._turn("put_new", path)
        if path in self._objects.data:
            raise FileExistsError(path)
        self._objects.put(path, data)

    def replace(self, path: str, data: bytes, *, version: str | None = None) -> str:
        self._turn("replace", path)
        if version is not None and self._objects.data.get(path, (b"", ""))[1] != version:
            raise FileExistsError(path)
        return self._objects.put(path, data)

    def move(self, path: str, to: str) -> None:
        """Comes at once after it was read: nothing between these two can be told apart from a request that is on its way."""
        if path not in self._objects.data:
            raise FileNotFoundError(path)
        self._objects.data[to] = self._objects.data.pop(path)

    def hold(self, path: str) -> Callable[[], None]:
        return lambda: None

    def is_held(self, path: str) -> bool:
        return False

    def delete(self, path: str) -> None:
        self._turn("delete", path)
        self._objects.data.pop(path, None)

    def delete_many(self, paths: Sequence[str]) -> None:
        for path in paths:
            self.delete(path)

    delete_all = delete

    def remove_if_empty(self, folder: str) -> bool:
        return False


class Process:
    """One that restores the newest step, and then saves: it stops ahead of each request until it is let on."""

    _numbers = itertools.count(1)

    def __init__(
        self,
        objects: Objects,
        steps: Sequence[int],
        *,
        retire: bool,
        overwrite: bool = False,
        token: str = "",
    ) -> None:
        """It saves the newest step that it finds and so many more, one after the other."""
        self.number = next(self._numbers)
        self._attempts = itertools.count()
        self.acknowledged: list[Manifest] = []
        self.starts: list[Start] = []  # by which each of these was acknowledged
        self.errors: list[BaseException] = []
        self._steps, self._retire, self._overwrite = steps, retire, overwrite
        self._changed = threading.Condition()
        self._is_waiting = self._may_go = self._is_killed = self._has_ended = False
        self.at = ""  # the request that it stops ahead of
        self.run = Run(StoreOf(objects, self._turn), clock=lambda: 0.0, keep=Keep(), opening=token)  # type: ignore[arg-type]
        self.run._tenure = Tenure()
        self._thread = Call(self._work)

    def _turn(self, call: str, path: str) -> None:
        with self._changed:
            self._is_waiting, self.at = True, f"{call} {path}"
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._may_go or self._is_killed, PATIENCE)
            self._is_waiting = self._may_go = False
            if self._is_killed:
                raise Killed

    def go(self) -> bool:
        """Let it make one request, and return when it stops ahead of the next; False once it has ended."""
        self._until_waiting()
        with self._changed:
            if not self._is_waiting:
                return False
            self._is_waiting, self._may_go = False, True
            self._changed.notify_all()
        self._until_waiting()
        return True

    def _until_waiting(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._is_waiting or self._has_ended, PATIENCE)

    def kill(self) -> None:
        with self._changed:
            self._is_killed = True
            self._changed.notify_all()
        self._thread.join(PATIENCE)

    def finish(self) -> None:
        while self.go():
            pass

    def _work(self) -> None:
        try:
            begin = -1 if (latest := self.run.latest()) is None else latest
            for more in self._steps:
                try:
                    self.save(max(0, begin + more))
                except Exception as error:
                    self.errors.append(error)
        except Killed:
            pass
        finally:
            with self._changed:
                self._has_ended = True
                self._changed.notify_all()

    def save(self, step: int) -> None:
        """As a checkpointer does it for one root."""
        run, options = self.run, {"overwrite": self._overwrite, "rolled_back": False, "retire": self._retire}
        run.check_start()
        run.check_known(step, overwrite=self._overwrite)
        run.check(step, **options)
        if run.take(step, []):
            run.check(step, **options)
        replaces = run.manifest_to_replace(step) if self._overwrite else None
        attempt = f"{self.number % 65536:04x}{next(self._attempts):04x}"
        archive = Archive(f"rank_00000.{attempt}.tar", 1, "0" * 32)
        run.storage.replace(run.root.archive_path(step, archive), b"x")
        made = run.commit(step, attempt, (archive,), replaces=replaces, retire=self._retire)
        assert run.root.own is not None
        self.acknowledged.append(made)
        self.starts.append(run.root.own)
        run.announce(step)
        run.retain(step, replaced=replaces[0] if replaces else None, in_flight=[step])


def line(objects: Objects) -> list[Manifest]:
    """The run as a reader sees it that comes now."""
    run = Run(StoreOf(objects), clock=lambda: 0.0)  # type: ignore[arg-type]
    steps = run.steps()
    assert run.latest() == (steps[-1] if steps else None)
    assert list(run.view()) == steps
    return [run.manifest(step) for step in steps]
