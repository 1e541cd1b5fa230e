"""One child for each place: a request, by its number, and what happens to it.

In: a scenario, a place, a server with a proxy before it. Out: what was found wrong, or nothing. Knows nothing of: which places
there are to try.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
import signal
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import clients
import pytest
from buckets import PART, Bucket
from children import Nursery
from racing import until

from async_ckpt.core.storage import store_facts
from async_ckpt.testing import moto_server
from async_ckpt.testing.servers import Server
from tests.matrices.attack_driver import NOT_MET, Place
from tests.matrices.calls.attack_places import broken, told_by
from tests.matrices.calls.scenario import Told
from tests.matrices.objects.request_faults import FAULTS, Asked, AttackingProxy, Fault, strike
from tests.matrices.objects.store_roots import SCENARIOS, StoreRoot, engine_of, takes_options

_PATIENCE: Final = 120.0

_JOB = """
import sys, warnings
warnings.simplefilter("ignore")
from tests.matrices.objects.store_roots import act
act(*sys.argv[1:])
"""


@dataclass(frozen=True)
class _Prepared:
    objects: Mapping[str, bytes]
    local: Path | None
    asked: Sequence[Asked] = ()


@dataclass(frozen=True)
class _Ended:
    status: int
    printed: str
    told: Told


@contextmanager
def request_attackers(folder: Path, num_workers: int) -> Iterator[Sequence[RequestAttacker]]:
    """Attackers who share a server. Each has a proxy before it, and a nursery."""
    clients.read_services_once()
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOTO_S3_DEFAULT_KEY_BUFFER_SIZE", str(PART))  # parts stay in memory
        patch.setenv("AWS_MAX_ATTEMPTS", "1")  # s3fs, which lists uploads, has a clock of its own
        server = stack.enter_context(moto_server())
        for name, value in (clients.environment_of(server) | clients.trusting_one_authority(folder)).items():
            patch.setenv(name, value)
        # For the checks, which are in this process, the day is over after which the leftovers of the dead are swept.
        patch.setattr(store_facts, "ORPHAN_SECONDS", -3600.0)
        yield [stack.enter_context(RequestAttacker(folder / f"worker-{n}", server)) for n in range(num_workers)]


class RequestAttacker:
    """Tries places, one after the other. One thread owns it, with its proxy and its nursery."""

    def __init__(self, folder: Path, server: Server) -> None:
        self._folder, self._server = folder, server
        self._prepared: dict[str, _Prepared] = {}
        self._numbers = itertools.count()
        self._stack = ExitStack()

    def __enter__(self) -> RequestAttacker:
        (self._folder / "nursery").mkdir(parents=True)
        self._proxy = self._stack.enter_context(AttackingProxy(self._server.endpoint))
        modules = ("tests.matrices.objects.store_roots", "async_ckpt.tools.command.main")
        self._nursery = self._stack.enter_context(Nursery(self._folder / "nursery", *modules))
        return self

    def __exit__(self, *told: Any) -> None:
        self._stack.__exit__(*told)

    def places(self, scenario: str) -> Sequence[Place]:
        """Each request of the unharmed scenario with each fault that fits it. Raises AssertionError if it fails by itself."""
        of_kind: Counter[str] = Counter()
        found = []
        for asked in self._ready(scenario).asked:
            of_kind[asked.kind] += 1
            fitting = [name for name, fault in FAULTS.items() if fault.fits(asked)]
            if not takes_options(scenario):
                fitting = [name for name in fitting if not FAULTS[name].options]
            found += [Place(scenario, name, asked.kind, of_kind[asked.kind]) for name in fitting]
        return found

    def wrong(self, place: Place) -> str | None:
        """What does not hold after this. None if all does."""
        fault = FAULTS[place.fault]
        bucket, local = self._laid_out(self._ready(place.scenario))
        try:
            nth = strike(self._proxy, fault, place.kind, place.number)
            ended = self._run(place.scenario, bucket, local, fault.options)
            if nth.struck is None:
                return NOT_MET
            found = self._wrong_end(place.scenario, fault, ended) or self._broken(
                place.scenario, bucket, local, ended.told
            )
            return found and f"{nth.struck.method} {nth.struck.target}: {found}"
        except AssertionError as hung:
            return f"{hung!s:.600}"
        finally:
            self._proxy.clear()
            shutil.rmtree(local)

    def _ready(self, name: str) -> _Prepared:
        if name in self._prepared:
            return self._prepared[name]
        bucket, local = self._laid_out(_Prepared({}, None))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            SCENARIOS[name].prepare(self._root(bucket, local))
        objects = {key: bucket.read(key) for key in self._server.keys(bucket)}

        copied, copy = self._laid_out(_Prepared(objects, local))
        before = len(self._proxy.requests)
        ended = self._run(name, copied, copy, {})
        asked = [Asked.of(request) for request in self._proxy.requests[before:]]
        found = self._wrong_end(name, Fault(strike), ended) or self._broken(name, copied, copy, ended.told)
        assert found is None, f"{name} is wrong by itself: {found}"
        shutil.rmtree(copy)
        self._prepared[name] = _Prepared(objects, local, asked)
        return self._prepared[name]

    def _laid_out(self, prepared: _Prepared) -> tuple[Bucket, Path]:
        """A bucket of its own for each place: a request that comes late finds nothing there that is looked at."""
        bucket, local = Bucket(self._server), self._folder / f"place-{next(self._numbers)}"
        self._server.make_bucket(bucket)
        for key, data in prepared.objects.items():
            self._server.client.put_object(Bucket=bucket, Key=key, Body=data)
        if prepared.local is not None:
            shutil.copytree(prepared.local, local)
        else:
            local.mkdir()
        return bucket, local

    def _root(self, bucket: Bucket, local: Path) -> Any:
        return StoreRoot(bucket, local, self._server.options)

    def _run(self, name: str, bucket: Bucket, local: Path, options: Mapping[str, Any]) -> _Ended:
        through = {**self._server.options, "endpoint": self._proxy.endpoint, **options}
        where = {"bucket": bucket, "local": str(local), "options": through}
        notes = self._folder / "notes"
        notes.unlink(missing_ok=True)
        self._proxy.victim = None
        # By botocore, s3fs tries five times unless it is told otherwise. obstore needs it to list uploads only.
        attempts = "1" if engine_of(name) is None else "5"
        env = {"AWS_ENDPOINT_URL": self._proxy.endpoint, "AWS_MAX_ATTEMPTS": attempts}
        child = self._nursery.start(_JOB, name, json.dumps(where), notes, env=env)
        self._proxy.victim = child.pid
        ended = child.ended(_PATIENCE)
        self._proxy.clear()
        until(lambda: self._proxy.is_quiet)
        return _Ended(ended.status, ended.out + ended.err, told_by(SCENARIOS[name], notes))

    def _wrong_end(self, scenario: str, fault: Fault, ended: _Ended) -> str | None:
        if self._server.options["secret_access_key"] in ended.printed:
            return "it has printed a secret key"
        if fault.kills and ended.status == -signal.SIGKILL:
            return None
        if ended.status != 0:
            return f"the child ended with {ended.status}: {ended.printed[-1500:]}"
        if "Traceback" in ended.printed:
            return f"it has printed: {ended.printed[-1500:]}"
        has_plain_errors = SCENARIOS[scenario].has_plain_errors
        return ended.told.wrong_refusal(is_survived=fault.is_survived, has_plain_errors=has_plain_errors)

    def _broken(self, scenario: str, bucket: Bucket, local: Path, told: Told) -> str | None:
        found = broken(SCENARIOS[scenario], self._root(bucket, local), told)
        return found or left_in(bucket)


def left_in(bucket: Bucket) -> str | None:
    """After a save of another process, a day later: objects of runs that no manifest names, and uploads that are open.

    A probe beside files that are no run may stay, since nobody lists a place for single files.
    """
    keys = bucket.keys()
    manifests = [key for key in keys if re.search(r"/manifest[^/]*\.json$", key)]
    named = b"".join(map(bucket.read, manifests)).decode()
    left = [key for key in keys if "/step_" in key and ".tar" in key and key.rpartition("/")[2] not in named]
    roots = {root for root, is_step, _ in (key.partition("/step_") for key in keys) if is_step}
    left += [key for key in keys if ".async_ckpt-probe-" in key and key.rpartition("/")[0] in roots]
    left += [key for key in keys if "/rollback-" in key]
    left += [f"the upload of {key}" for key in bucket.uploads()]
    return f"left: {', '.join(left)}" if left else None
