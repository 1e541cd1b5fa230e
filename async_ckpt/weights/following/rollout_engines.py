"""The requests by which each kind of engine loads a version, and reports which version it has.

In: a folder with a version. Out: an engine that has loaded it, or EngineError. Knows nothing of: roots, pulls, locks.

The requests are those of SGLang 0.5.23 and vLLM 0.33.0. Both also report their version, which a `Sidecar` checks after
each load.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, Final, NamedTuple, Protocol

from ...plumbing import hf_weights, spec, timing
from .web import EngineError, HttpClient, Reply, refusal

# The time for the answer to a request that needs no work.
_PROBE_SECONDS: Final = 5.0
# The time that an engine has by default to load a version.
ANSWER_SECONDS: Final = 600.0


class Loading(NamedTuple):
    """A version that an engine is to load: its folder, its number, and the descriptor of the lock on the folder."""

    folder: Path
    version: int
    lock: int


class Engine(Protocol):
    """The interface of an engine for a sidecar.

    `name` distinguishes it from other engines of the folder. `answer_seconds` is its time to load a version. `address`
    is the host and port of a server. If no process listens there any more, the engine is not loading.
    """

    name: str
    answer_seconds: float
    address: tuple[str, int] | None = None

    def take(self, loading: Loading, deadline: float) -> None:
        """Have the engine load a version, and return when it has done so. Raises EngineError."""

    def version(self) -> str | None:
        """The version that the engine reports; None if it cannot report any. Raises EngineError without an answer."""
        return None


class BaseEngine(Engine):
    """The base class of the engines below. By itself it stands for an engine that watches the folder."""

    def __init__(self, name: str = "", answer_seconds: float = ANSWER_SECONDS) -> None:
        self.name, self.answer_seconds = name, spec.seconds_above_0("answer_seconds", answer_seconds)

    def take(self, loading: Loading, deadline: float) -> None:
        """Do nothing."""


class _EngineServer(BaseEngine):
    """An engine that is a server, and loads versions by requests."""

    _kind: ClassVar[str]
    # The advice in the error for status 404.
    _advice: ClassVar[str] = ""

    def __init__(self, url: str, *, answer_seconds: float = ANSWER_SECONDS, key: str | None = None) -> None:
        self._client = HttpClient(url, key=key)
        super().__init__(f"{self._kind} {self._client.url}", answer_seconds)
        self.address = self._client.address

    def _refusal(self, path: str, reply: Reply, advice: str = "") -> EngineError:
        return refusal(f"{self._client.url}{path}", reply, self._advice if reply.status == 404 else advice)

    def _post(self, path: str, body: Mapping[str, object] | None, deadline: float, advice: str = "") -> Reply:
        """Send a request. Raises EngineError for any status but 2xx."""
        reply = self._client.post(path, body, deadline=deadline)
        if not reply.is_fine:
            raise self._refusal(path, reply, advice)
        return reply


class _FolderServer(_EngineServer, ABC):
    """A server that loads the weights of a whole model from a folder, on request."""

    # The requests by which it loads an adapter, which this class does not support.
    _adapters: ClassVar[str]
    # The path at which it reports its version.
    _version_path: ClassVar[str]

    def __init__(
        self,
        url: str,
        *,
        abort_requests: bool = False,
        answer_seconds: float = ANSWER_SECONDS,
        key: str | None = None,
    ) -> None:
        super().__init__(url, answer_seconds=answer_seconds, key=key)
        self._abort_requests = abort_requests

    def take(self, loading: Loading, deadline: float) -> None:
        # The server would expect the weights of a model in this folder.
        if (loading.folder / hf_weights.ADAPTER_CONFIG).exists():
            raise EngineError(
                f"{loading.folder} has an adapter, and {self._kind} takes only whole models; run the sidecar with "
                f"--exec, and a program that asks for {self._adapters}"
            )
        self._load(loading, deadline)

    @abstractmethod
    def _load(self, loading: Loading, deadline: float) -> None:
        """Have the server load a version of a whole model, and return when it has done so. Raises EngineError."""

    def version(self) -> str | None:
        """The version that the server reports. Raises EngineError if it reports none."""
        reply = self._client.get(self._version_path, deadline=timing.TIMEKEEPER.now() + _PROBE_SECONDS)
        if not reply.is_fine:
            raise self._refusal(self._version_path, reply)
        version = reply.fields().get("weight_version")
        if not isinstance(version, str):
            raise EngineError(
                f"{self._client.url}{self._version_path} names no weight_version, so its loaded version is unknown; "
                f"{self._advice}"
            )
        return version


class SGLang(_FolderServer):
    """An SGLang server, which loads by `/update_weights_from_disk`, after running requests have ended or were aborted.

    Args:
        url: the URL of the server, such as "http://127.0.0.1:30000".
        abort_requests: abort running requests instead of waiting for them.
        answer_seconds: the time that the server has to finish or abort requests, and to load.
        key: its `--admin-api-key`, or its `--api-key`.

    Raises ValueError for an invalid URL.
    """

    _kind = "sglang"
    _adapters = "/unload_lora_adapter and /load_lora_adapter"
    _version_path = "/model_info"
    _advice = "use a SGLang that has it, such as 0.5.23"

    def _load(self, loading: Loading, deadline: float) -> None:
        body = {
            "model_path": str(loading.folder),
            "load_format": "auto",  # the server's default may be "dummy"
            "weight_version": str(loading.version),
            "flush_cache": True,
            "abort_all_requests": self._abort_requests,
        }
        reply = self._post("/update_weights_from_disk", body, deadline)
        if reply.fields().get("success") is not True:
            raise self._refusal("/update_weights_from_disk", reply)


class VLLM(_FolderServer):
    """A vLLM server that was started with `VLLM_SERVER_DEV_MODE=1`.

    The server is paused, loads the folder by `reload_weights`, gets the number of the version, and resumes. If it
    cannot load the version, its weights may be a mixture, so it stays paused until it has loaded one.

    Args:
        url: the URL of the server, such as "http://127.0.0.1:8000".
        abort_requests: abort running requests instead of waiting for them. New requests get a 503 in both cases.
        answer_seconds: the time that the server has to finish or abort requests, and to load.
        key: its `--api-key`.

    Raises ValueError for an invalid URL.
    """

    _kind = "vllm"
    _adapters = "/v1/load_lora_adapter with load_inplace"
    _version_path = "/weight_info"
    _advice = "start vLLM with VLLM_SERVER_DEV_MODE=1"

    def _load(self, loading: Loading, deadline: float) -> None:
        self._post(f"/pause?mode={'abort' if self._abort_requests else 'wait'}", None, deadline)
        rpc = {"method": "reload_weights", "kwargs": {"weights_path": str(loading.folder)}}
        self._post("/collective_rpc", rpc, deadline, "it stays paused until it has loaded a version")
        self._post("/update_weight_version", {"new_version": str(loading.version)}, deadline)
        self._post("/resume", None, deadline)


class Post(_EngineServer):
    """Any server that accepts a POST of `{"version": 120, "folder": "/local/model"}`, and answers 2xx after loading.

    Raises ValueError for an invalid URL.
    """

    _kind = "post"

    def take(self, loading: Loading, deadline: float) -> None:
        self._post("", {"version": loading.version, "folder": str(loading.folder)}, deadline)


class Program(BaseEngine):
    """A program that is run for each version. It has an engine load the version, and then ends with status 0.

    Its environment has `ASYNC_CKPT_VERSION` and `ASYNC_CKPT_FOLDER`, and its output is written to stderr. If it still
    runs after `answer_seconds`, it is killed, with the processes of its group.

    Args:
        command: the program and its arguments: a list, or a text that is split like in a shell. No shell runs it.
        answer_seconds: the time that the program has.

    Raises ValueError if there is no such program.
    """

    def __init__(self, command: str | Sequence[str], *, answer_seconds: float = ANSWER_SECONDS) -> None:
        self._words = shlex.split(command) if isinstance(command, str) else [*map(str, command)]
        if not self._words or shutil.which(self._words[0]) is None:
            raise ValueError(f"{(self._words or [''])[0]!r:.200} is not a program here; give its path, or install it")
        super().__init__(f"exec {shlex.join(self._words)}", answer_seconds)

    def take(self, loading: Loading, deadline: float) -> None:
        facts = {"ASYNC_CKPT_VERSION": str(loading.version), "ASYNC_CKPT_FOLDER": str(loading.folder)}
        # The program inherits the lock: if this process is killed, the folder stays locked until the program ends.
        shared = (loading.lock,) if os.name == "posix" else ()
        try:
            child = subprocess.Popen(  # the words of --exec, without a shell  # nosec B603
                self._words,
                env={**os.environ, **facts},
                stdin=subprocess.DEVNULL,
                stdout=2,
                start_new_session=True,
                pass_fds=shared,
            )
        except OSError as error:
            raise EngineError(f"{self._words[0]} cannot be run: {error.strerror or error}") from error
        try:
            status = child.wait(max(0.0, deadline - timing.TIMEKEEPER.now()))
        except subprocess.TimeoutExpired:
            raise EngineError(f"{self._words[0]} was killed because it took too long") from None
        finally:
            if child.poll() is None:
                _kill(child)
        if status:
            ended = f"with status {status}" if status > 0 else f"by signal {-status}"
            raise EngineError(f"{self._words[0]} ended {ended}")


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Kill a program and its group, and wait for its end."""
    with suppress(ProcessLookupError):
        if os.name == "posix":
            os.killpg(child.pid, signal.SIGKILL)
        else:
            child.kill()
    child.wait()


class Function(BaseEngine):
    """A function of the user, called with the folder and the version. Any exception means that the load failed."""

    def __init__(self, function: Callable[[Path, int], object]) -> None:
        super().__init__(f"function {getattr(function, '__qualname__', type(function).__qualname__)}")
        self._function = function

    def take(self, loading: Loading, deadline: float) -> None:  # noqa: ARG002 - a call cannot be ended
        try:
            self._function(loading.folder, loading.version)
        except Exception as error:
            raise EngineError(f"{self.name} raised {type(error).__name__}: {error}") from error


def engine_of(engine: Engine | Callable[[Path, int], object] | None) -> Engine:
    """The engine for an argument of `follow`. Raises TypeError."""
    if engine is None:
        return BaseEngine()
    if hasattr(engine, "take") and not isinstance(engine, type):
        return engine  # type: ignore[return-value]
    if callable(engine) and not isinstance(engine, type):
        return Function(engine)
    raise TypeError(f"engine must be an engine or a function of a folder and a version, got {engine!r:.100}")
