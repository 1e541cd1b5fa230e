"""What a run makes of a store that refuses, breaks off, is away, forgets or lies: an error that says what to do, or a
success after retries; never a half checkpoint, an open upload, a lost one from before, or a run that cannot go on.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from racing import Call, until
from states import MIB, SEGMENT, assert_is_state, leftovers, open_run, state_at
from test_stores import (
    ENGINES,
    PART,
    Bucket,
    OnServer,
    Place,
    _botocore_reads_its_files_once,  # noqa: F401
    archive_of,
    no_memory_is_lent,
    through,
)

import async_ckpt
from async_ckpt import (
    AsyncCheckpointer,
    CheckpointError,
    NotCommittedError,
    StepExistsError,
    StorageUnavailableError,
)
from async_ckpt.storage import stores
from async_ckpt.testing import FaultyProxy

# A store that does not come back is given up after this time.
SOON = {"deadline_seconds": 1.5}
# obstore makes no request again by itself, so that every trouble is the sink's.
NO_RETRIES = {"retry_config": {"max_retries": 0}}
# What the two engines say to do.
FORBIDDEN = "credentials|access key|make sure that one may"
AWAY = "see that the store is up|make sure that the endpoint is right"
BIG = 9  # MiB of a state that goes by two parts
MULTIPART = ["create_multipart_upload", "upload_part", "complete_multipart_upload"]


class Far:
    """A run that is reached through a proxy, and holds step 1."""

    def __init__(self, bucket: Bucket, proxy: FaultyProxy, engine: str) -> None:
        self.bucket, self.proxy, self.engine = bucket, proxy, engine
        self.direct = OnServer(bucket, "obstore")
        with self.direct.run() as ckpt:
            ckpt.save(state_at(1), step=1).result()

    @property
    def url(self) -> str:
        return self.direct.url

    def options(self, **options: Any) -> dict[str, Any]:
        return through(self.proxy, self.bucket, **options)

    def run(self, *, options: dict[str, Any] | None = None, **others: Any) -> AsyncCheckpointer:
        given = self.options(**(options or {}))
        return open_run(
            self.url, **{"segment_bytes": PART, "storage_options": given, "engine": self.engine, **others}
        )

    @contextmanager
    def unharmed(self, ckpt: AsyncCheckpointer) -> Iterator[None]:
        """What fails in the block leaves everything as it was, and the next save works."""
        before = self.direct.names()
        yield
        self.proxy.clear()
        no_memory_is_lent(ckpt)
        assert self.direct.names() == before
        assert_is_state(self.direct.load(), 1)
        self.goes_on(ckpt, 1)

    def goes_on(self, ckpt: AsyncCheckpointer, *steps: int) -> None:
        """The next save works, everything else is still there, and nothing more."""
        ckpt.save(state_at(9), step=9).result()
        ckpt.wait()
        assert ckpt.steps() == [*steps, 9]
        assert_is_state(ckpt.load(), 9)
        assert len(self.direct.names()) == 2 + 2 * (len(steps) + 1)
        no_memory_is_lent(ckpt)


@pytest.fixture
def bucket(s3: Any) -> Bucket:
    made = Bucket(s3)
    s3.make_bucket(made.name)
    return made


# Each fault meets one engine here, and both with ASYNC_CKPT_ENGINES=all; test_fsspec_store.py has s3fs' own faults.
ALL = os.environ.get("ASYNC_CKPT_ENGINES") == "all"


@pytest.fixture(params=ENGINES if ALL else ["obstore"])
def far(request: pytest.FixtureRequest, bucket: Bucket, proxy: FaultyProxy) -> Far:
    return Far(bucket, proxy, request.param)


@pytest.fixture
def obstore(bucket: Bucket, proxy: FaultyProxy) -> Far:
    return Far(bucket, proxy, "obstore")


def failure(call: Callable[[], Any], message: str) -> StorageUnavailableError:
    """The error of a call: ours, with a path, and a text that says what to do."""
    with pytest.raises(StorageUnavailableError, match=message) as caught:
        call()
    assert caught.value.path.startswith("s3://")
    assert caught.value.path[:60] in str(caught.value)
    return caught.value


# --- refusals -------------------------------------------------------------------------------------------------


REFUSALS = {
    "AccessDenied": FORBIDDEN,
    "InvalidAccessKeyId": FORBIDDEN,
    "SignatureDoesNotMatch": FORBIDDEN,
    "NoSuchBucket": "bucket.*does not exist.*create it, or correct the URL",
    "AuthorizationHeaderMalformed": "another region.*region",
    "PermanentRedirect": "another region.*region",
    "RequestTimeTooSkewed": "clock.*wrong.*set it",
    "ExpiredToken": "expired.*(log in|renew)",
}


# s3fs goes where S3 says that the bucket is, which the proxy does not say.
@pytest.mark.parametrize(
    ("far", "code"),
    [("obstore", code) for code in REFUSALS]
    + [("s3fs", code) for code in REFUSALS if code not in ("PermanentRedirect", "InvalidAccessKeyId")],
    indirect=["far"],
)
def test_a_refusal_says_what_to_do_whatever_is_asked(far, code):
    advice = REFUSALS[code]
    with far.run() as ckpt, far.unharmed(ckpt):
        fault = far.proxy.answer(code)
        failure(lambda: ckpt.save(state_at(2, BIG), step=2).result(), advice)
        failure(ckpt.steps, advice)
        failure(lambda: ckpt.load(1), advice)
        failure(lambda: ckpt.restore(state_at(0)), advice)
        one_off = {"storage_options": far.options(), "engine": far.engine}
        failure(lambda: async_ckpt.load(far.url, **one_off), advice)
        failure(lambda: async_ckpt.save(state_at(2), f"{far.url}/x.tar", **one_off).result(), advice)
        assert 0 < fault.hits < 40


@pytest.mark.parametrize("kind", MULTIPART)
def test_a_request_of_an_upload_that_is_forbidden_fails_the_save(far, kind):
    with far.run() as ckpt, far.unharmed(ckpt):
        far.proxy.answer("AccessDenied", kind=kind)
        failure(lambda: ckpt.save(state_at(2, BIG), step=2).result(), FORBIDDEN)


@pytest.mark.parametrize("target", ["manifest.json", r"rank_00000\S*\.tar"])
def test_a_put_that_is_forbidden_fails_the_save(far, target):
    with far.run() as ckpt, far.unharmed(ckpt):
        far.proxy.answer("AccessDenied", kind="put_object", target=target)
        failure(lambda: ckpt.save(state_at(2), step=2).result(), FORBIDDEN)


@pytest.mark.parametrize("kind", ["put_object", "delete_object", "list_objects"])
def test_what_cannot_be_done_after_the_commit_does_not_make_it_less_true(obstore, kind, caplog):
    with obstore.run(keep_last=1) as ckpt:
        held = obstore.proxy.delay(None, kind="put_object", target="manifest.json", times=1)
        handle = ckpt.save(state_at(2), step=2)
        held.wait()
        obstore.proxy.answer(
            "AccessDenied", kind=kind, where=lambda r: "manifest.json" not in r.target or r.method == "DELETE"
        )
        held.clear()
        assert handle.result().status == "committed"
        ckpt.wait()
        assert ckpt.metrics()["cleanup_failures"] == 1
        obstore.proxy.clear()
        ckpt.save(state_at(3), step=3).result()
        ckpt.wait()
        assert ckpt.steps() == [3]
    assert any("cleaning up" in record.getMessage() for record in caplog.records)
    assert len(obstore.direct.names()) == 4


@pytest.mark.parametrize("engine", ENGINES)
def test_a_bucket_that_does_not_exist_is_said_and_never_made(s3, engine):
    missing = Bucket(s3)
    place = Place(missing.url("run"), {"storage_options": s3.options, "engine": engine})
    with place.run() as ckpt:
        for call in (
            lambda: ckpt.save(state_at(1), step=1).result(),
            lambda: ckpt.save(state_at(1, BIG), step=2).result(),
            ckpt.steps,
            ckpt.load,
            lambda: ckpt.restore(state_at(0)),
            place.load,
            lambda: place.load("x.tar"),
            lambda: async_ckpt.save(state_at(1), f"{place.url}/x.tar", **place.options).result(),
            lambda: async_ckpt.save(state_at(1, 40), f"{place.url}/x.tar", **place.options).result(),
        ):
            failure(call, "bucket.*does not exist.*create it, or correct the URL")
        no_memory_is_lent(ckpt)
    assert missing.name not in [bucket["Name"] for bucket in s3.client.list_buckets()["Buckets"]]


@pytest.mark.parametrize(
    "url",
    [
        "s3://",
        "s3:///run",
        "s3://bucket/a//b",
        "s3://bucket/../x",
        "s3://bucket/run?versionId=3",
        "s3://me:pw@bucket/run",
    ],
)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_malformed_url_is_refused_where_it_is_given(url, engine):
    options = {
        "storage_options": {"endpoint": "http://127.0.0.1:9", "key": "k-e-y", "secret": "s-e-c"},
        "engine": engine,
    }
    for call in (
        lambda: AsyncCheckpointer(url, **options),
        lambda: async_ckpt.save({}, f"{url}/x.tar", **options),
        lambda: async_ckpt.load(f"{url}/x.tar", **options),
    ):
        with pytest.raises(ValueError, match="s3://") as refused:
            call()
        assert "pw" not in str(refused.value)


@pytest.mark.parametrize("options", [{}, {"engine": "fsspec"}])
def test_an_unknown_scheme_is_refused_where_it_is_given(options):
    for call in (
        lambda: AsyncCheckpointer("nowhere://bucket/run", **options),
        lambda: async_ckpt.save({}, "nowhere://bucket/x.tar", **options),
        lambda: async_ckpt.load("nowhere://bucket/x.tar", **options),
    ):
        with pytest.raises(ValueError, match="nowhere://"):
            call()


def test_a_scheme_that_obstore_does_not_know_is_refused():
    with pytest.raises(ValueError, match="sftp://"):
        AsyncCheckpointer("sftp://host/run", engine="obstore")


@pytest.mark.parametrize(
    ("url", "engine", "package", "command"),
    [
        ("s3://bucket/run", None, "obstore", 'pip install "async_ckpt[s3]"'),
        ("s3://bucket/run", None, "tenacity", 'pip install "async_ckpt[s3]"'),
        ("gs://bucket/run", None, "obstore", 'pip install "async_ckpt[s3]"'),
        ("s3://bucket/run", "s3fs", "s3fs", 'pip install "async_ckpt[fsspec]"'),
        ("s3://bucket/run", "s3fs", "fsspec", 'pip install "async_ckpt[fsspec]"'),
        ("memory://run", None, "fsspec", 'pip install "async_ckpt[fsspec]"'),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(nursery, url, engine, package, command):
    script = """
        import sys
        url, engine, package, command = sys.argv[1:]
        sys.modules[package] = None
        options = {"engine": engine} if engine != "None" else {}
        try:
            with async_ckpt.AsyncCheckpointer(url, **options) as ckpt:
                ckpt.steps()
        except ImportError as error:
            print(error)
        try:
            async_ckpt.save({"x": torch.ones(1)}, url + "/x.tar", **options).result()
        except ImportError as error:
            print(error)
    """
    ended = nursery.run("import async_ckpt, torch\n" + textwrap.dedent(script), url, engine, package, command)
    assert (ended.status, ended.err) == (0, "")
    assert ended.out.count(command) == 2


def test_without_the_package_that_lists_uploads_a_save_works_and_the_lifecycle_rule_is_named(
    s3, bucket, nursery
):
    script = """
        import json, logging, sys
        sys.modules["s3fs"] = None
        logging.basicConfig(format="%(name)s %(message)s", stream=sys.stdout)
        with async_ckpt.AsyncCheckpointer(sys.argv[1], storage_options=json.loads(sys.argv[2])) as ckpt:
            for step in (1, 2):
                ckpt.save({"x": torch.ones(1)}, step=step).result()
    """
    ended = nursery.run(
        "import async_ckpt, torch\n" + textwrap.dedent(script), bucket.url("run"), json.dumps(s3.options)
    )
    assert (ended.status, ended.err) == (0, "")
    assert ended.out.count("lifecycle rule") == 1


@pytest.mark.parametrize("engine", ENGINES)
def test_a_key_that_is_too_long_is_refused_and_nothing_is_sent(bucket, proxy, engine):
    options = {"storage_options": through(proxy, bucket), "engine": engine}
    url = bucket.url("/".join(["x" * 200] * 5))  # what lies in it is longer than S3 takes
    with open_run(url, segment_bytes=PART, **options) as ckpt:
        failure(lambda: ckpt.save(state_at(1), step=1).result(), r"1,024")
        no_memory_is_lent(ckpt)
    failure(lambda: async_ckpt.save(state_at(1), f"{url}/{'y' * 30}.tar", **options).result(), r"1,024")
    assert proxy.requests == []
    assert (bucket.keys(), bucket.uploads()) == ([], [])


def test_an_option_that_nobody_knows_is_named():
    for engine in ENGINES:
        with pytest.raises((ValueError, TypeError), match="no_such_option"):
            AsyncCheckpointer("s3://bucket/run", storage_options={"no_such_option": 1}, engine=engine)


# --- trouble that passes --------------------------------------------------------------------------------------


TROUBLE: dict[str, Callable[..., Any]] = {
    "SlowDown": lambda proxy, **match: proxy.answer("SlowDown", **match),
    "InternalError": lambda proxy, **match: proxy.answer("InternalError", **match),
    "cut before": lambda proxy, **match: proxy.cut_request(0, **match),
    "answer lost": lambda proxy, **match: proxy.lose_response(**match),
}


@pytest.mark.parametrize(
    ("trouble", "kind"),
    [("SlowDown", kind) for kind in [*MULTIPART, "small archive", "list_objects", "latest"]]
    + [("InternalError", kind) for kind in ["head_object", "manifest.json"]]
    + [("cut before", kind) for kind in [*MULTIPART, "head_object", "manifest.json"]]
    + [("answer lost", kind) for kind in [*MULTIPART, "small archive", "manifest.json", "latest"]],
)
def test_trouble_that_passes_is_only_seen_in_the_report(obstore, trouble, kind):
    where = {
        "manifest.json": {"kind": "put_object", "target": "manifest.json"},
        "small archive": {"kind": "put_object", "target": r"\.tar"},
        "latest": {"kind": "put_object", "target": "latest"},
    }.get(kind, {"kind": kind})
    mib = 1 if kind == "small archive" else BIG
    with obstore.run(options=NO_RETRIES) as ckpt:
        fault = TROUBLE[trouble](obstore.proxy, times=2, **where)
        report = ckpt.save(state_at(2, mib), step=2).result()
        ckpt.wait()
        assert fault.hits == 2
        assert (report.retries > 0) == (kind in (*MULTIPART, "small archive"))
        assert ckpt.metrics()["cleanup_failures"] == 0
        assert_is_state(ckpt.load(2), 2, mib)
        no_memory_is_lent(ckpt)
        assert len(obstore.direct.names()) == 6


@pytest.mark.parametrize("trouble", ["SlowDown", "answer lost"])
@pytest.mark.parametrize("kind", [*MULTIPART, "manifest.json"])
def test_trouble_that_passes_is_overcome_by_s3fs_too(bucket, proxy, trouble, kind):
    far = Far(bucket, proxy, "s3fs")
    where = {"kind": "put_object", "target": kind} if kind == "manifest.json" else {"kind": kind}
    with far.run() as ckpt:
        fault = TROUBLE[trouble](proxy, times=1, **where)
        ckpt.save(state_at(2, BIG), step=2).result()
        ckpt.wait()
        assert fault.hits == 1
        far.goes_on(ckpt, 1, 2)


def test_a_seventh_part_that_is_cut_five_times_is_sent_a_sixth_time(obstore):
    """By obstore itself, which does not tell how often: such requests are in no report."""
    with obstore.run() as ckpt:
        fault = obstore.proxy.cut_request(MIB, times=5, kind="upload_part", target=r"partNumber=7\b")
        report = ckpt.save(state_at(2, 50), step=2).result()
        assert (fault.hits, report.retries) == (5, 0)
        assert obstore.proxy.count(kind="create_multipart_upload") == 1
        assert_is_state(ckpt.load(2), 2, 50)
        obstore.goes_on(ckpt, 1, 2)


def test_a_seventh_part_that_is_cut_five_times_is_sent_again_or_an_error_with_s3fs(bucket, proxy):
    """s3fs makes a request five times."""
    far = Far(bucket, proxy, "s3fs")
    with far.run() as ckpt:
        fault = proxy.cut_request(MIB, times=5, kind="upload_part", target=r"partNumber=7\b")
        with far.unharmed(ckpt):
            failure(lambda: ckpt.save(state_at(2, 50), step=2).result(), AWAY)
            assert fault.hits == 5


def test_an_upload_that_fails_for_good_is_taken_back(far):
    with far.run(options=SOON | NO_RETRIES) as ckpt, far.unharmed(ckpt):
        far.proxy.answer("SlowDown", kind="upload_part")
        failure(lambda: ckpt.save(state_at(2, BIG), step=2).result(), f"SlowDown|{AWAY}")


def test_without_the_memory_to_send_it_again_an_upload_that_fails_says_so(obstore):
    with obstore.run(options=NO_RETRIES, host_bytes=4 * PART) as ckpt, obstore.unharmed(ckpt):
        fault = obstore.proxy.answer("SlowDown", kind="complete_multipart_upload", times=1)
        failure(lambda: ckpt.save(state_at(2, 45), step=2).result(), "memory was needed elsewhere")
        assert fault.hits == 1


def test_a_part_that_is_never_answered_ends_at_the_deadline(far):
    with far.run(options=SOON | NO_RETRIES) as ckpt, far.unharmed(ckpt):
        far.proxy.black_hole(kind="upload_part")
        failure(lambda: ckpt.save(state_at(2, BIG), step=2).result(), AWAY)


def test_uploads_of_others_are_left_alone_when_an_own_one_had_to_be_sent_again(obstore):
    """Their keys begin in the same way, and no name of ours is in them."""
    others = ["runs/a/x.tar.zst", "runs/a/x.tar/y"]
    for key in others:
        obstore.bucket.begin_upload(key)
    obstore.proxy.answer("SlowDown", kind="upload_part", times=1)
    place = {"storage_options": obstore.options(**NO_RETRIES)}
    report = async_ckpt.save(state_at(2, 40), f"{obstore.url}/x.tar", **place).result()
    assert report.retries == 1
    assert obstore.bucket.uploads() == sorted(others)


def test_an_upload_that_the_store_has_forgotten_is_begun_again(obstore):
    """It was aborted by somebody else, or by a lifecycle rule."""
    with obstore.run(options=NO_RETRIES) as ckpt:
        fault = obstore.proxy.answer("NoSuchUpload", kind="upload_part", target=r"partNumber=2\b", times=1)
        report = ckpt.save(state_at(2, BIG), step=2).result()
        assert (fault.hits, report.retries) == (1, 1)
        obstore.goes_on(ckpt, 1, 2)


# --- credentials ----------------------------------------------------------------------------------------------


class Provider:
    """New keys each time, as for a role that is assumed again."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> dict[str, Any]:
        self.calls += 1
        return {
            "access_key_id": f"key-{self.calls}",
            "secret_access_key": f"secret-{self.calls}",
            "token": f"token-{self.calls}",
            "expires_at": None,
        }


def keyless(far: Far, **options: Any) -> dict[str, Any]:
    given = far.options(**options)
    return {name: given[name] for name in given if "access_key" not in name}


@pytest.mark.parametrize("status", [400, 403])
def test_credentials_that_expire_in_the_middle_of_an_upload_are_renewed(obstore, status):
    provider = Provider()
    options = keyless(obstore, credential_provider=provider, **NO_RETRIES)
    with obstore.run(storage_options=options) as ckpt:
        fault = obstore.proxy.answer(
            "ExpiredToken", status=status, kind="upload_part", target=r"partNumber=3\b", times=1
        )
        report = ckpt.save(state_at(2, 25), step=2).result()
        assert fault.hits == 1
        assert report.retries == 1
        assert provider.calls > 1
        assert_is_state(ckpt.load(2), 2, 25)
        obstore.goes_on(ckpt, 1, 2)
    used = {r.headers["authorization"].partition("key-")[2].partition("/")[0] for r in obstore.proxy.requests}
    assert len(used) > 1


def test_credentials_that_stay_expired_end_in_an_error_at_the_deadline(obstore):
    options = keyless(obstore, credential_provider=Provider(), **SOON, **NO_RETRIES)
    with obstore.run(storage_options=options) as ckpt, obstore.unharmed(ckpt):
        obstore.proxy.answer("ExpiredToken", status=403, kind="upload_part")
        failure(lambda: ckpt.save(state_at(2, 25), step=2).result(), "expired.*log in again")


def test_given_credentials_that_expire_are_an_error_at_once(far):
    with far.run() as ckpt, far.unharmed(ckpt):
        fault = far.proxy.answer("ExpiredToken", status=403, kind="upload_part")
        failure(lambda: ckpt.save(state_at(2, 25), step=2).result(), "expired")
        assert fault.hits <= 8


# --- a store that is away -------------------------------------------------------------------------------------


def test_a_store_that_is_away_for_the_whole_deadline_fails_the_save(far):
    with far.run(options=SOON | NO_RETRIES) as ckpt, far.unharmed(ckpt):
        far.proxy.refuse()
        handle = ckpt.save(state_at(2, BIG), step=2)
        failure(handle.result, AWAY)
        failure(ckpt.steps, AWAY)


def test_a_store_that_goes_away_in_the_middle_fails_the_save(obstore):
    """An upload that cannot be aborted, since the store is away, is the one thing that may be left: it is swept."""
    with obstore.run(options=SOON | NO_RETRIES) as ckpt:
        before = obstore.bucket.keys()
        held = obstore.proxy.delay(None, kind="upload_part", target=r"partNumber=2\b")
        handle = ckpt.save(state_at(2, BIG), step=2)
        held.wait()
        away = obstore.proxy.refuse()
        failure(handle.result, AWAY)
        no_memory_is_lent(ckpt)
        away.clear()
        held.clear()
        assert obstore.bucket.keys() == before
        ckpt.save(state_at(3), step=3).result()
        assert ckpt.steps() == [1, 3]


def test_a_store_that_comes_back_in_time_has_only_cost_time(obstore):
    """The upload that was cut off may have been left open, since it could not be aborted either."""
    with obstore.run(options=NO_RETRIES) as ckpt:
        held = obstore.proxy.delay(None, kind="upload_part", target=r"partNumber=2\b", times=1)
        handle = ckpt.save(state_at(2, BIG), step=2)
        held.wait()
        away = obstore.proxy.refuse()
        away.clear()
        held.clear()
        assert handle.result().retries > 0
        obstore.goes_on(ckpt, 1, 2)


@pytest.fixture
def both(obstore: Far, tmp_path: Any) -> Iterator[tuple[Far, Any, AsyncCheckpointer]]:
    """A disk and a store that is reached through the proxy; a step is committed where it is durable first."""
    options = {"storage_options": obstore.options(**SOON, **NO_RETRIES)}
    with open_run([tmp_path, obstore.url], commit="any", segment_bytes=PART, **options) as ckpt:
        yield obstore, tmp_path, ckpt


@pytest.fixture
def patient(obstore: Far, tmp_path: Any) -> Iterator[tuple[Far, Any, AsyncCheckpointer]]:
    """The same, with the time that a store has by default."""
    options = {"storage_options": obstore.options()}
    with open_run([tmp_path, obstore.url], commit="any", segment_bytes=PART, **options) as ckpt:
        yield obstore, tmp_path, ckpt


@pytest.mark.filterwarnings("ignore:a root does not answer")
def test_with_any_a_save_is_committed_on_disk_while_the_store_is_away_and_caught_up_by_the_next(both):
    far, disk, ckpt = both
    away = far.proxy.refuse()
    report = ckpt.save(state_at(2, BIG), step=2).result()
    ckpt.wait()
    assert report.path.startswith(str(disk))
    assert report.destinations[0].error is None
    assert "StorageUnavailableError" in (report.destinations[1].error or "")
    assert ckpt.metrics()["destinations_missed"] == 1
    assert ckpt.steps() == [2]
    assert_is_state(ckpt.load(), 2, BIG)
    no_memory_is_lent(ckpt)
    away.clear()
    assert ckpt.steps() == [1, 2]

    ckpt.save(state_at(3, BIG), step=3).result()
    ckpt.wait()
    until(lambda: len(far.direct.names()) == 2 + 2 * 3)
    with far.direct.run() as alone:
        assert alone.steps() == [1, 2, 3]
        for step in (2, 3):
            assert_is_state(alone.load(step), step, BIG)
    assert leftovers(disk) == []


@pytest.mark.filterwarnings("ignore:a root does not answer")
def test_with_any_a_store_that_was_away_is_caught_up_when_asked(both):
    far, disk, ckpt = both
    away = far.proxy.refuse()
    ckpt.save(state_at(2, BIG), step=2).result()
    ckpt.wait()
    with pytest.raises(StorageUnavailableError):
        ckpt.catch_up()
    away.clear()
    assert ckpt.catch_up() == {str(disk): [1], far.url: [2]}
    assert ckpt.catch_up() == {str(disk): [], far.url: []}
    assert far.direct.read("latest") == b"step_00000002\n"
    with far.direct.run() as alone:
        assert_is_state(alone.load(), 2, BIG)
    with open_run(disk) as alone:
        assert alone.steps() == [1, 2]


def test_with_any_a_slow_store_arrives_by_itself_after_the_disk_has_committed(patient):
    far, disk, ckpt = patient
    held = far.proxy.delay(None, kind="create_multipart_upload", times=1)
    report = ckpt.save(state_at(2, BIG), step=2).result()
    held.wait()
    assert report.path.startswith(str(disk))
    assert "not durable yet" in (report.destinations[1].error or "")
    assert far.bucket.uploads() == []
    held.clear()
    ckpt.wait()
    assert ckpt.metrics()["destinations_missed"] == 0
    with far.direct.run() as alone:
        assert_is_state(alone.load(2), 2, BIG)
    far.direct.names()
    no_memory_is_lent(ckpt)


def test_with_any_a_throttled_store_holds_up_no_save(patient):
    far, _, ckpt = patient
    throttled = far.proxy.throttle(64 * MIB, kind="upload_part")
    for step in (2, 3):
        report = ckpt.save(state_at(step, BIG), step=step).result()
        assert report.destinations[0].error is None
    ckpt.wait()
    throttled.clear()
    assert ckpt.catch_up()[far.url] == []
    with far.direct.run() as alone:
        assert alone.steps() == [1, 2, 3]


def test_with_all_a_store_that_is_away_fails_the_save_and_leaves_nothing_on_the_disk(obstore, tmp_path):
    options = {"storage_options": obstore.options(**SOON, **NO_RETRIES)}
    with open_run([tmp_path, obstore.url], segment_bytes=PART, **options) as ckpt:
        obstore.proxy.refuse()
        failure(lambda: ckpt.save(state_at(2, BIG), step=2).result(), AWAY)
        assert leftovers(tmp_path) == []
        obstore.proxy.clear()
        no_memory_is_lent(ckpt)
        ckpt.save(state_at(3, BIG), step=3).result()
        ckpt.wait()
        assert ckpt.steps() == [1, 3]


# --- a store that lies ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mib", "kind"), [(1, "put_object"), (BIG, "complete_multipart_upload")])
def test_an_archive_that_the_store_acknowledges_and_loses_is_no_checkpoint(far, mib, kind):
    with far.run(options=SOON | NO_RETRIES) as ckpt, far.unharmed(ckpt):
        fault = far.proxy.lose(kind=kind, target=r"\.tar")
        failure(lambda: ckpt.save(state_at(2, mib), step=2).result(), "acknowledged.*lost")
        assert fault.hits > 0


@pytest.mark.parametrize(("mib", "kind"), [(1, "put_object"), (BIG, "complete_multipart_upload")])
def test_an_archive_that_is_lost_once_is_sent_again(obstore, mib, kind):
    with obstore.run(options=NO_RETRIES) as ckpt:
        fault = obstore.proxy.lose(kind=kind, target=r"\.tar", times=1)
        report = ckpt.save(state_at(2, mib), step=2).result()
        assert (fault.hits, report.retries) == (1, 1)
        assert_is_state(ckpt.load(2), 2, mib)
        assert obstore.bucket.uploads() == []
        obstore.goes_on(ckpt, 1, 2)


@pytest.mark.filterwarnings("ignore:a root does not answer")
def test_with_any_an_archive_that_the_store_loses_is_caught_up_later(both):
    far, _, ckpt = both
    lost = far.proxy.lose(kind="complete_multipart_upload")
    ckpt.save(state_at(2, BIG), step=2).result()
    ckpt.wait()
    assert ckpt.metrics()["destinations_missed"] == 1
    lost.clear()
    assert ckpt.catch_up()[far.url] == [2]
    with far.direct.run() as alone:
        assert_is_state(alone.load(2), 2, BIG)


# --- reading --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("far", "trouble"),
    [
        ("obstore", "SlowDown"),
        ("obstore", "cut before"),
        ("obstore", "cut inside"),
        ("s3fs", "SlowDown"),
        ("s3fs", "cut inside"),
    ],
    indirect=["far"],
)
def test_reading_goes_on_after_trouble(far, trouble):
    with far.direct.run() as ckpt:
        ckpt.save(state_at(2, 18), step=2).result()
    with far.run() as ckpt:
        make = TROUBLE.get(trouble, lambda proxy, **match: proxy.cut_response(100_000, **match))
        faults = [
            make(far.proxy, times=1, kind="get_object", target=r"\.tar"),
            make(far.proxy, times=1, kind="list_objects") if trouble != "cut inside" else None,
        ]
        assert_is_state(ckpt.load(), 2, 18)
        assert all(fault.hits == 1 for fault in faults if fault)
        make(far.proxy, times=2, kind="get_object", target=r"\.tar")
        live = state_at(0, 18)
        assert ckpt.restore(live) == 2
        assert_is_state(live, 2, 18)


def test_reading_from_a_store_that_is_away_is_an_error(obstore):
    with obstore.run(options=SOON | NO_RETRIES) as ckpt:
        obstore.proxy.refuse()
        live = state_at(0)
        for call in (lambda: ckpt.load(1), lambda: ckpt.restore(live)):
            failure(call, AWAY)
        assert_is_state(live, 0)
        obstore.proxy.clear()
        assert ckpt.restore(live) == 1


def test_an_archive_that_is_replaced_while_it_is_read_is_not_mixed_up(far):
    name = archive_of(far.direct.names(), 1)
    with far.run() as ckpt:
        held = far.proxy.delay(None, kind="get_object", target=r"\.tar", times=1)
        call = Call(ckpt.load)
        held.wait()
        far.bucket.write([f"runs/a/{name}"], far.direct.read(name)[::-1])
        held.clear()
        with pytest.raises(StorageUnavailableError, match=r"replaced.*load it again"):
            call.outcome()


def test_with_two_roots_a_store_that_is_away_is_read_around(both):
    far, _, ckpt = both
    ckpt.save(state_at(2), step=2).result()
    ckpt.wait()
    far.proxy.refuse()
    with pytest.warns(RuntimeWarning, match="does not answer"):
        assert ckpt.latest() == 2
    with pytest.warns(RuntimeWarning, match="does not answer"):
        assert_is_state(ckpt.load(2), 2)


# --- commits --------------------------------------------------------------------------------------------------


def test_a_commit_whose_answer_is_lost_is_a_commit(far):
    with far.run() as ckpt:
        fault = far.proxy.lose_response(kind="put_object", target="manifest.json", times=1)
        assert ckpt.save(state_at(2), step=2).result().status == "committed"
        assert fault.hits == 1
        far.goes_on(ckpt, 1, 2)


def test_an_overwrite_whose_answer_is_lost_is_an_overwrite(far):
    with far.run() as ckpt:
        fault = far.proxy.lose_response(kind="put_object", target="manifest.json", times=1)
        assert ckpt.save(state_at(5), step=1, overwrite=True).result().status == "committed"
        assert fault.hits == 1
        ckpt.wait()
        assert_is_state(ckpt.load(1), 5)
        far.goes_on(ckpt, 1)


def test_an_overwrite_that_fails_leaves_the_step_that_was_there(far):
    with far.run() as ckpt, far.unharmed(ckpt):
        far.proxy.answer("AccessDenied", kind="put_object", target="manifest.json")
        failure(lambda: ckpt.save(state_at(5, BIG), step=1, overwrite=True).result(), FORBIDDEN)


def test_one_writer_in_each_of_two_processes_and_one_step(bucket, s3, nursery, proxy):
    """Both are held at the commit, so that neither knows of the other."""
    script = """
        import json, sys
        import async_ckpt
        from states import open_run, state_at
        with open_run(sys.argv[1], storage_options=json.loads(sys.argv[2]), segment_bytes=8 << 20) as ckpt:
            try:
                ckpt.save(state_at(int(sys.argv[3])), step=1).result()
            except async_ckpt.StepExistsError:
                print("exists")
            else:
                print("committed")
    """
    held = proxy.delay(None, kind="put_object", target="manifest.json")
    options = json.dumps(through(proxy, bucket))
    children = [nursery.start(script, bucket.url("run"), options, number) for number in (10, 11)]
    until(lambda: held.hits >= 2)
    held.clear()
    ends = [child.ended() for child in children]
    assert [end.err for end in ends] == ["", ""]
    assert sorted(end.out.strip() for end in ends) == ["committed", "exists"]
    winner = 10 + [end.out.strip() for end in ends].index("committed")
    with open_run(bucket.url("run"), storage_options=s3.options) as ckpt:
        assert_is_state(ckpt.load(1), winner)
    assert len(bucket.keys()) == 4


# --- the end of the process -----------------------------------------------------------------------------------


SAVE = """
    import json, sys
    import async_ckpt
    from states import open_run, state_at
    options = {"storage_options": json.loads(sys.argv[2]), "engine": sys.argv[3]}
    ckpt = open_run(sys.argv[1], segment_bytes=8 << 20, **options)
    ckpt.save(state_at(2, 9), step=2)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="forks as Linux does")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_script_that_ends_at_once_has_saved(bucket, s3, nursery, engine):
    ended = nursery.run(SAVE, bucket.url("runs/a"), json.dumps(s3.options), engine)
    assert (ended.status, ended.err) == (0, "")
    place = OnServer(bucket, engine)
    assert_is_state(place.load(), 2, 9)
    assert len(place.names()) == 4


@pytest.mark.skipif(sys.platform != "linux", reason="forks as Linux does")
def test_a_script_whose_save_fails_at_its_end_says_so_and_has_a_status(bucket, proxy, nursery):
    proxy.answer("AccessDenied", kind="upload_part")
    ended = nursery.run(SAVE, bucket.url("runs/a"), json.dumps(through(proxy, bucket)), "obstore")
    assert ended.status == 75
    assert "step 2" in ended.err
    assert "AccessDenied" in ended.err
    assert (bucket.keys(), bucket.uploads()) == ([], [])


@pytest.mark.skipif(sys.platform != "linux", reason="forks as Linux does")
def test_a_process_that_is_killed_in_the_middle_of_an_upload_leaves_only_what_is_swept(
    far, nursery, monkeypatch
):
    held = far.proxy.delay(None, kind="upload_part", target=r"partNumber=2\b")
    child = nursery.start(SAVE, far.url, json.dumps(far.options()), far.engine)
    held.wait()
    child.send(signal.SIGKILL)
    assert child.ended().status == -signal.SIGKILL
    far.proxy.clear()
    assert not any("step_00000002" in key for key in far.bucket.keys())  # noqa: SIM118
    assert len(far.bucket.uploads()) == 1
    far.bucket.begin_upload("runs/ab/of/another/run")

    with far.run() as ckpt:
        assert ckpt.steps() == [1]
        assert_is_state(ckpt.load(), 1)
        ckpt.save(state_at(2), step=2).result()
        ckpt.wait()
    assert len(far.bucket.uploads()) == 2  # not yet old

    monkeypatch.setattr(stores, "ORPHAN_SECONDS", -3600.0)
    with far.run() as ckpt:
        ckpt.save(state_at(3), step=3).result()
        ckpt.wait()
        assert ckpt.steps() == [1, 2, 3]
    assert far.bucket.uploads() == ["runs/ab/of/another/run"]


@pytest.mark.skipif(sys.platform != "linux", reason="forks as Linux does")
def test_an_archive_that_was_never_committed_is_swept_once_it_is_old(far, nursery, monkeypatch):
    held = far.proxy.black_hole(kind="put_object", target="manifest.json")
    child = nursery.start(SAVE, far.url, json.dumps(far.options()), far.engine)
    held.wait()
    child.send(signal.SIGKILL)
    child.ended()
    far.proxy.clear()
    orphan = archive_of(far.direct.names(), 2)
    for seconds, stays in ((86400.0, True), (-3600.0, False)):
        monkeypatch.setattr(stores, "ORPHAN_SECONDS", seconds)
        with far.run() as ckpt:
            ckpt.save(state_at(3), step=3, overwrite=True).result()
            ckpt.wait()
            assert ckpt.steps() == [1, 3]
        assert (orphan in far.direct.names()) == stays


# --- memory ---------------------------------------------------------------------------------------------------


def test_a_failed_upload_under_memory_pressure_gives_everything_back(far):
    with far.run(options=SOON | NO_RETRIES, host_bytes=4 * PART) as ckpt, far.unharmed(ckpt):
        far.proxy.answer("AccessDenied", kind="upload_part", target=r"partNumber=3\b")
        # Or what the server says to another part, which was under way when the upload was aborted for this one.
        failure(lambda: ckpt.save(state_at(2, 45), step=2).result(), rf"{FORBIDDEN}|answered 500")


def test_a_guarded_save_that_fails_lets_the_optimizer_go_on(far):
    parameter = torch.nn.Parameter(torch.ones(3 * MIB))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    parameter.grad = torch.ones_like(parameter)
    with far.run(guard=optimizer, options=SOON | NO_RETRIES) as ckpt, far.unharmed(ckpt):
        far.proxy.answer("AccessDenied")
        handle = ckpt.save({"w": parameter}, step=2)
        optimizer.step()
        failure(handle.result, FORBIDDEN)
        assert float(parameter.detach()[0]) == 0.0


# --- nobody hears of secrets ----------------------------------------------------------------------------------


SECRETS = {
    "access_key_id": "AKIADISTINCTKEYOFTHISTEST",
    "secret_access_key": "distinct/secret+of-this-test",
    "session_token": "distinct-token-of-this-test//////==",
}


def everything_told(error: BaseException | None) -> str:
    """All that a person could come to read of an error: its causes, contexts and notes."""
    return (
        "" if error is None else "".join(traceback.format_exception(error)) + repr(error) + repr(vars(error))
    )


def test_secrets_are_nowhere(far, caplog, recwarn):
    caplog.set_level(logging.DEBUG, logger="async_ckpt")
    caplog.set_level(logging.INFO)
    names = {"access_key_id": "key", "secret_access_key": "secret", "session_token": "token"}
    given = {names[name] if far.engine == "s3fs" else name: value for name, value in SECRETS.items()}
    options = {**keyless(far, **SOON, **NO_RETRIES), **given}
    told: list[str] = []
    place = Place(far.url, {"storage_options": options, "engine": far.engine})
    with place.run() as ckpt:
        for step in (2, 3):
            handle = ckpt.save(state_at(step, BIG), step=step)
            report = handle.result()
            told += [repr(handle), repr(report), str(report), repr(report.as_dict()), repr(ckpt.metrics())]
        ckpt.wait()
        told += [
            repr(ckpt),
            repr(ckpt._roots),
            *map(repr, ckpt._roots.runs),
            *(repr(r.storage) for r in ckpt._roots.runs),
        ]
        for make in (
            lambda: far.proxy.answer("AccessDenied"),
            lambda: far.proxy.answer("SignatureDoesNotMatch"),
            lambda: far.proxy.answer("ExpiredToken"),
            lambda: far.proxy.answer("InvalidAccessKeyId", kind="upload_part"),
            lambda: far.proxy.lose(kind="complete_multipart_upload"),
            far.proxy.refuse,
        ):
            make()
            handle = ckpt.save(state_at(4, BIG), step=4)
            error = handle.exception()
            assert isinstance(error, CheckpointError)
            told += [everything_told(error), repr(handle)]
            try:
                ckpt.steps()
            except CheckpointError as refused:
                told.append(everything_told(refused))
            far.proxy.clear()
        with pytest.raises(NotCommittedError) as missing:
            ckpt.load(7)
        told.append(everything_told(missing.value))
        with pytest.raises(StepExistsError) as exists:
            ckpt.save(state_at(3), step=3).result()
        told.append(everything_told(exists.value))
    told += [record.getMessage() + str(record.exc_text or record.exc_info or "") for record in caplog.records]
    told += [str(warning.message) for warning in recwarn]
    told += [far.bucket.read(key).decode("latin-1") for key in far.bucket.keys()]  # noqa: SIM118
    for text in told:
        assert not any(secret in text for secret in SECRETS.values()), text[:2000]


@pytest.mark.parametrize("engine", ENGINES)
def test_keys_in_a_url_are_refused_without_being_shown(engine):
    secret = "".join(["sEc", "ReT"])  # the traceback shows this line too
    with pytest.raises(ValueError, match=r"storage_options|names no bucket|user") as refused:
        AsyncCheckpointer(f"s3://AKIAKEY:{secret}@bucket/run", engine=engine)
    assert secret not in everything_told(refused.value)


def test_nothing_is_reported_to_nobody(far, caplog):
    """A failed save is the handle's to tell: asyncio has no forgotten task to complain of."""
    with far.run(options=SOON | NO_RETRIES) as ckpt:
        far.proxy.answer("AccessDenied")
        failure(lambda: ckpt.save(state_at(2, BIG), step=2).result(), FORBIDDEN)
        far.proxy.clear()
        ckpt.save(state_at(3), step=3).result()
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


def test_every_segment_size_survives_a_failure(obstore):
    """Two segments make one part here."""
    with obstore.run(options=NO_RETRIES, segment_bytes=SEGMENT, host_bytes=8 * SEGMENT) as ckpt:
        fault = obstore.proxy.answer("SlowDown", kind="upload_part", target=r"partNumber=2\b", times=1)
        report = ckpt.save(state_at(2, 14), step=2).result()
        assert (fault.hits, report.retries) == (1, 1)
        assert_is_state(ckpt.load(2), 2, 14)
        obstore.goes_on(ckpt, 1, 2)
