"""What a run makes of a store that refuses, breaks off, is away, forgets or lies: an error that says what to do, or a
success after retries; never a half checkpoint, an open upload, a lost one from before, or a run that cannot go on.
"""

import gc
import itertools
import json
import logging
import math
import random
import textwrap
import traceback
from typing import Any

import pytest
import torch
from buckets import ENGINES, PART, Bucket, RunAt, no_memory_is_lent
from faulty import AWAY, BIG, FORBIDDEN, NO_RETRIES, SOON, TROUBLE, Far, failure
from slices import some
from states import MIB, SEGMENT, assert_is_state, open_run, state_at

import async_ckpt
from async_ckpt import (
    AsyncCheckpointer,
    CheckpointError,
    NotCommittedError,
    Place,
    StepExistsError,
    StorageUnavailableError,
)
from async_ckpt.stores import retry

MULTIPART = ["create_multipart_upload", "upload_part", "complete_multipart_upload"]


pytestmark = pytest.mark.usefixtures("nobody_waits")


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
    some([("obstore", code) for code in REFUSALS], 2)
    + some([("s3fs", code) for code in REFUSALS if code not in ("PermanentRedirect", "InvalidAccessKeyId")], 3),
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
        failure(lambda: async_ckpt.load(far.place()), advice)
        failure(lambda: async_ckpt.save(state_at(2), far.place("x.tar")).result(), advice)
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


def test_a_commit_is_not_acknowledged_while_nobody_can_see_whether_another_process_has_the_run(obstore):
    with obstore.run() as ckpt:
        held = obstore.proxy.delay(None, kind="put_object", target="manifest.json", times=1)
        handle = ckpt.save(state_at(2), step=2)
        held.wait()
        obstore.proxy.answer("AccessDenied", kind="list_objects")
        held.clear()
        error = handle.exception()
        assert isinstance(error, StorageUnavailableError)
        assert error.__notes__ == ["The manifest of step 2 exists: check which steps are committed"]
        obstore.proxy.clear()
        assert ckpt.steps() == [1, 2]
        ckpt.save(state_at(3), step=3).result()
        assert ckpt.steps() == [1, 2, 3]


@pytest.mark.parametrize("kind", ["put_object", "delete_object"])
def test_what_cannot_be_done_after_the_commit_does_not_make_it_less_true(obstore, kind, caplog):
    with obstore.run(keep=1) as ckpt:
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
    run = RunAt(missing.place("run", engine))
    with run.run() as ckpt:
        for call in (
            lambda: ckpt.save(state_at(1), step=1).result(),
            lambda: ckpt.save(state_at(1, BIG), step=2).result(),
            ckpt.steps,
            ckpt.load,
            lambda: ckpt.restore(state_at(0)),
            run.load,
            lambda: run.load("x.tar"),
            lambda: async_ckpt.save(state_at(1), run.at("x.tar")).result(),
            lambda: async_ckpt.save(state_at(1, 40), run.at("x.tar")).result(),
        ):
            failure(call, "bucket.*does not exist.*create it, or correct the URL")
        no_memory_is_lent(ckpt)
    assert missing not in [bucket["Name"] for bucket in s3.client.list_buckets()["Buckets"]]


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
    options = {"endpoint": "http://127.0.0.1:9", "key": "k-e-y", "secret": "s-e-c"}
    for call in (
        lambda: AsyncCheckpointer(Place(url, options=options, engine=engine)),
        lambda: async_ckpt.save({}, Place(f"{url}/x.tar", options=options, engine=engine)),
        lambda: async_ckpt.load(Place(f"{url}/x.tar", options=options, engine=engine)),
    ):
        with pytest.raises(ValueError, match="s3://") as refused:
            call()
        assert "pw" not in str(refused.value)


@pytest.mark.parametrize("engine", [None, "fsspec"])
def test_an_unknown_scheme_is_refused_where_it_is_given(engine):
    for call in (
        lambda: AsyncCheckpointer(Place("nowhere://bucket/run", engine=engine)),
        lambda: async_ckpt.save({}, Place("nowhere://bucket/x.tar", engine=engine)),
        lambda: async_ckpt.load(Place("nowhere://bucket/x.tar", engine=engine)),
    ):
        with pytest.raises(ValueError, match="nowhere://"):
            call()


def test_a_scheme_that_obstore_does_not_know_is_refused():
    with pytest.raises(ValueError, match="sftp://"):
        AsyncCheckpointer(Place("sftp://host/run", engine="obstore"))


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
        import os, sys
        url, engine, package, command = sys.argv[1:]
        for name in [name for name in sys.modules if name.startswith(package + ".")]:
            del sys.modules[name]
        sys.modules[package] = None
        engine = None if engine == "None" else engine
        try:
            with async_ckpt.AsyncCheckpointer(async_ckpt.Place(url, engine=engine)) as ckpt:
                ckpt.steps()
        except ImportError as error:
            print(error, flush=True)
        try:
            place = async_ckpt.Place(url + "/x.tar", engine=engine)
            async_ckpt.save({"x": torch.ones(1)}, place).result()
        except ImportError as error:
            print(error, flush=True)
        os._exit(0)  # how an interpreter ends is for other tests
    """
    out = nursery.out_of("import async_ckpt, torch\n" + textwrap.dedent(script), url, engine, package, command)
    assert out.count(command) == 2


def test_without_the_package_that_lists_uploads_a_save_works_and_the_lifecycle_rule_is_named(s3, bucket, nursery):
    script = """
        import json, logging, sys
        sys.modules["s3fs"] = None
        logging.basicConfig(format="%(name)s %(message)s", stream=sys.stdout)
        place = async_ckpt.Place(sys.argv[1], options=json.loads(sys.argv[2]))
        with async_ckpt.AsyncCheckpointer(place) as ckpt:
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
    folder = "/".join(["x" * 200] * 5)  # what lies in it is longer than S3 takes
    run = RunAt(bucket.place(folder, engine, endpoint=proxy.endpoint))
    with run.run() as ckpt:
        failure(lambda: ckpt.save(state_at(1), step=1).result(), r"1,024")
        no_memory_is_lent(ckpt)
    failure(lambda: async_ckpt.save(state_at(1), run.at(f"{'y' * 30}.tar")).result(), r"1,024")
    assert proxy.requests == []
    assert (bucket.keys(), bucket.uploads()) == ([], [])


# --- trouble that passes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trouble", "kind"),
    some([("SlowDown", kind) for kind in [*MULTIPART, "small archive", "list_objects", "latest"]], 3)
    + some([("InternalError", kind) for kind in ["head_object", "manifest.json"]], 2)
    + some([("cut before", kind) for kind in [*MULTIPART, "head_object", "manifest.json"]], 3)
    + some([("answer lost", kind) for kind in [*MULTIPART, "small archive", "manifest.json", "latest"]], 3),
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


def test_the_waits_between_tries_grow_up_to_a_limit_and_take_no_number_from_the_training():
    waits: list[float] = []
    away = StorageUnavailableError("away", path="s3://bucket", transient=True)
    tries = iter([away] * 200)

    def attempt() -> str:
        if (error := next(tries, None)) is not None:
            raise error
        return "answered"

    before = random.getstate()
    assert retry.persist(attempt, deadline_seconds=math.inf, sleep=waits.append) == "answered"
    assert random.getstate() == before  # its numbers are the training's
    assert len(waits) == 200
    assert all(0 <= seconds <= min(0.2 * 2**number, 30.0) for number, seconds in enumerate(waits))
    assert max(waits) > 20.0


@pytest.mark.parametrize(
    ("trouble", "kind"), some(list(itertools.product(["SlowDown", "answer lost"], [*MULTIPART, "manifest.json"])), 3)
)
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
        failure(lambda: ckpt.save(state_at(2, 45), step=2).result(), "another save needed the memory")
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
    report = async_ckpt.save(state_at(2, 40), obstore.place("x.tar", **NO_RETRIES)).result()
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


@pytest.mark.parametrize("status", some([400, 403], 2))
def test_credentials_that_expire_in_the_middle_of_an_upload_are_renewed(obstore, status):
    provider = Provider()
    options = keyless(obstore, credential_provider=provider, **NO_RETRIES)
    with open_run(Place(obstore.url, options=options), segment_bytes=PART) as ckpt:
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
    place = Place(obstore.url, options=options)
    with open_run(place, segment_bytes=PART) as ckpt, obstore.unharmed(ckpt):
        obstore.proxy.answer("ExpiredToken", status=403, kind="upload_part")
        failure(lambda: ckpt.save(state_at(2, 25), step=2).result(), "expired.*log in again")


def test_given_credentials_that_expire_are_an_error_at_once(far):
    with far.run() as ckpt, far.unharmed(ckpt):
        fault = far.proxy.answer("ExpiredToken", status=403, kind="upload_part")
        failure(lambda: ckpt.save(state_at(2, 25), step=2).result(), "expired")
        assert fault.hits <= 8


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
    return "" if error is None else "".join(traceback.format_exception(error)) + repr(error) + repr(vars(error))


def test_secrets_are_nowhere(far, caplog, recwarn):
    caplog.set_level(logging.DEBUG, logger="async_ckpt")
    caplog.set_level(logging.INFO)
    names = {"access_key_id": "key", "secret_access_key": "secret", "session_token": "token"}
    given = {names[name] if far.engine == "s3fs" else name: value for name, value in SECRETS.items()}
    options = {**keyless(far, **SOON, **NO_RETRIES), **given}
    told: list[str] = []
    place = Place(far.url, options=options, engine=far.engine)
    told.append(repr(place))
    with open_run(place, segment_bytes=PART) as ckpt:
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
