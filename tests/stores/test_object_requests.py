"""Object stores: small objects, reading, what dead writers left, bad input and credentials."""

import itertools
import logging
import os
import threading

import obstore
import pytest
from loans import SEGMENT, Archive, behind
from racing import PATIENCE, Call

from async_ckpt import StorageUnavailableError
from async_ckpt.core.storage import store_facts
from async_ckpt.stores.s3 import aws_settings
from async_ckpt.stores.s3.error_translation import translate
from async_ckpt.stores.s3.settings import BucketSettings
from async_ckpt.stores.s3.store import ObjectStorage


@pytest.fixture
def store(s3, bucket):
    return ObjectStorage(f"s3://{bucket}/run", s3.options)


@pytest.fixture
def far(s3, bucket, proxy):
    """The same bucket, by way of the proxy; obstore itself makes a request once again, and no more."""
    return behind(proxy, s3, bucket)


# --- small objects ---------------------------------------------------------------------------------------------


def test_of_many_writers_of_one_new_object_one_wins(s3, bucket, store):
    stores = [store] + [ObjectStorage(f"s3://{bucket}/run", s3.options) for _ in range(3)]
    start = threading.Barrier(8)
    won = []

    def put(number: int) -> None:
        start.wait(PATIENCE)
        try:
            stores[number % 4].put_new("manifest.json", b"%d" % number)
        except FileExistsError:
            return
        won.append(number)

    for call in [Call(lambda n=n: put(n)) for n in range(8)]:
        call.outcome()

    assert len(won) == 1
    assert store.read("manifest.json")[0] == b"%d" % won[0]
    assert store.names("") == ["manifest.json"]  # and of the probes nothing is left


def test_many_objects_are_read_by_one_request_each(far, proxy):
    paths = [f"{number}/x" for number in range(20)]
    for path in paths:
        far.replace(path, path.encode())
    before = len(proxy.requests)
    contents = far.read_many([*paths, "20/x"])

    assert contents.pop("20/x") is None
    assert {path: content[0] for path, content in contents.items()} == {path: path.encode() for path in paths}
    assert [request.kind for request in proxy.requests[before:]] == ["list_objects", *["get_object"] * 21]
    assert all(far.read(path) == content for path, content in contents.items())


def test_of_many_objects_those_that_a_listing_does_not_show_are_asked_for(far, proxy):
    paths = [f"step_{number:05d}/manifest.json" for number in range(60)]
    for path in paths[::2]:
        far.replace(path, b"1")
        far.replace(path.replace("manifest.json", "rank_00000.tar"), b"1")
    before = len(proxy.requests)

    assert far.existing(paths) == paths[::2]
    assert [request.kind for request in proxy.requests[before:]] == ["list_objects", *["head_object"] * 30]
    assert {path for path, content in far.read_many(paths).items() if content} == {*paths[::2]}


def test_of_many_objects_those_are_known_to_be_missing_whose_folders_show_later_names(far, proxy):
    """Such as the manifests of steps that a rollback has retired."""
    paths = [f"step_{number:05d}/manifest.json" for number in range(60)]
    for path in paths:
        far.replace(path.replace("manifest.json", "rank_00000.tar"), b"1")
    far.replace(paths[7], b"1")
    before = len(proxy.requests)

    assert far.existing(paths) == [paths[7]]
    assert [request.kind for request in proxy.requests[before:]] == ["list_objects"]


def test_more_objects_than_a_page_has_are_looked_for_on_several_pages(far, proxy, s3, bucket):
    paths = [f"step_{number:05d}/manifest.json" for number in range(1100)]
    for path in paths[3:]:
        s3.client.put_object(Bucket=bucket, Key=f"run/{path}", Body=b"1")
    before = len(proxy.requests)

    assert far.existing(paths[::-1]) == paths[:2:-1]
    kinds = [request.kind for request in proxy.requests[before:]]
    assert kinds == [*["list_objects"] * 2, *["head_object"] * 3]  # and those that no page has shown


def test_where_pages_tell_little_each_object_is_asked_for(far, proxy, s3, bucket):
    """A thousand archives lie between two manifests."""
    for number in range(1200):
        s3.client.put_object(Bucket=bucket, Key=f"run/step_00000/rank_{number:05d}.tar", Body=b"1")
    paths = [f"step_{number:05d}/manifest.json" for number in range(6)]
    far.replace(paths[4], b"1")
    before = len(proxy.requests)

    assert far.existing(paths) == [paths[4]]
    assert [request.kind for request in proxy.requests[before:]] == ["list_objects", *["head_object"] * 5]


def test_an_empty_object_that_marks_a_folder_is_no_object_of_its_name(far, s3, bucket):
    s3.client.put_object(Bucket=bucket, Key="run/a/x/", Body=b"")
    far.replace("b/x", b"")
    far.replace("c/x", b"1")

    assert far.existing(["a/x", "b/x", "c/x", ".y"]) == ["b/x", "c/x"]


@pytest.mark.parametrize("page", [["c", "a"], ["c"], [], ["z"], ["b/z", "b/y", "a/z"]])
def test_pages_are_not_taken_for_more_than_they_say(far, monkeypatch, page):
    """Directory buckets list in no order, SeaweedFS by folders, and some servers leave out whole folders."""
    for name in "abc":
        far.replace(f"{name}/x", b"1")
    monkeypatch.setattr(
        type(far._client), "_page", lambda *_: {f"run/{name if '/' in name else f'{name}/x'}": 1 for name in page}
    )

    assert far.existing(["a/x", "b/x", "c/x", "d/x"]) == ["a/x", "b/x", "c/x"]
    many = [f"{name}/x" for name in "abcdefghi"]
    assert {path for path, content in far.read_many(many).items() if content} == {"a/x", "b/x", "c/x"}


def test_a_server_that_does_not_list_after_a_key_is_asked_for_each_object(far, proxy):
    far.replace("a/x", b"1")
    proxy.answer("NotImplemented", status=501, kind="list_objects", target="start-after")

    assert far.existing(["a/x", "b/x", "c/x"]) == ["a/x"]


def test_an_error_ends_the_reading_of_many_objects_and_is_left_to_a_read_to_tell(far, proxy):
    paths = [f"{number}/x" for number in range(200)]
    for path in paths:
        far.replace(path, b"1")
    fault = proxy.answer("AccessDenied", status=403, kind="get_object")

    assert far.read_many(paths) == {}
    assert fault.hits < len(paths)
    with pytest.raises(StorageUnavailableError, match="AccessDenied"):
        far.read(paths[0])


def test_many_objects_of_a_bucket_that_does_not_exist_are_not_there(s3):
    missing = ObjectStorage("s3://no-such-bucket/run", s3.options)

    assert missing.read_many([f"{number}/x" for number in range(20)]) == {}
    with pytest.raises(StorageUnavailableError, match="no-such-bucket"):
        missing.read("0/x")


def test_a_commit_that_another_writer_made_meanwhile_is_theirs(far, store, proxy):
    far.put_new("first", b"the store is known to have conditions")
    proxy.answer("SlowDown", times=1, kind="put_object")
    store.put_new("manifest.json", b"theirs")
    with pytest.raises(FileExistsError):
        far.put_new("manifest.json", b"ours")

    assert store.read("manifest.json")[0] == b"theirs"


@pytest.mark.parametrize("refuses", [True, False])
def test_a_store_without_conditions_is_found_out_and_said_once(s3, bucket, proxy, caplog, refuses):
    def conditional(request):
        return {"if-none-match", "if-match"} & set(request.headers)

    far = behind(proxy, s3, bucket)
    if refuses:
        proxy.answer("NotImplemented", status=501, kind="put_object", where=conditional)
    else:
        proxy.lose(kind="put_object", where=conditional)
    with caplog.at_level(logging.WARNING, "async_ckpt"):
        far.put_new("a", b"1")
        _, version = far.read("a")
        far.replace("a", b"2", version=version)
        with pytest.raises(FileExistsError):
            far.put_new("a", b"3")
        with pytest.raises(FileExistsError):
            far.replace("a", b"3", version=version)

    assert [record.message for record in caplog.records if "no conditional puts" in record.message] == [
        caplog.records[0].message
    ]
    assert far.read("a")[0] == b"2"
    assert far.names("") == ["a"]


@pytest.mark.parametrize("put", [ObjectStorage.put_new, ObjectStorage.replace])
def test_a_put_that_is_answered_by_404_says_that_the_bucket_is_not_there(far, proxy, put):
    proxy.answer("NoSuchKey", kind="put_object", target="/x")

    with pytest.raises(StorageUnavailableError, match="bucket does not exist"):
        put(far, "x", b"one")


def test_a_store_that_lists_the_same_page_for_ever_is_refused(store, monkeypatch):
    store.put_new("f/a", b"")
    store.put_new("f/b", b"")
    listed = obstore.list
    monkeypatch.setattr(obstore, "list", lambda *given: itertools.cycle(list(listed(*given))))

    with pytest.raises(StorageUnavailableError, match="returns nothing new; check that the endpoint is a store"):
        store.sizes("f")


def test_a_listing_of_many_pages_is_whole(s3, bucket, store):
    names = [f"{number:05}" for number in range(1050)]  # a page holds 1,000

    def put(some: list[str]) -> None:
        for name in some:
            store.replace(f"many/{name}", b"")

    for call in [Call(lambda n=n: put(names[n::8])) for n in range(8)]:
        call.outcome()

    assert store.names("many") == names


def test_a_request_that_fails_is_made_again(far, proxy):
    far.replace("a", b"1")
    for kind in ("get_object", "head_object", "list_objects", "put_object", "delete_object"):
        proxy.answer("SlowDown", times=1, kind=kind)
    far.replace("b", b"2")
    results = far.read("a")[0], far.exists("a"), far.names("")
    far.delete("a")

    assert results == (b"1", True, ["a", "b"])
    assert far.names("") == ["b"]


# --- reading ---------------------------------------------------------------------------------------------------


def test_an_object_that_was_replaced_is_not_read_on(store):
    store.replace("x", b"1" * 100)
    reader = store.open("x")
    store.replace("x", b"2" * 100)
    with pytest.raises(StorageUnavailableError, match="was replaced while it was being read; load it again"):
        reader.read_into(0, memoryview(bytearray(100)))


# --- what dead writers left ------------------------------------------------------------------------------------


def test_only_what_is_old_by_the_stores_clock_is_swept(store, monkeypatch):
    store.replace("folder/a", b"1")
    young = store.sweep("folder", ["a"], delete=True, decided=True)
    monkeypatch.setattr(store_facts, "ORPHAN_SECONDS", -10.0)  # all is older than ten seconds from now
    undecided = store.sweep("folder", ["a"], delete=True, decided=False)
    left = store.sweep("folder", ["a", "gone"], decided=True)
    kept = store.exists("folder/a")
    deleted = store.sweep("folder", ["a"], delete=True, decided=True)

    assert (young, undecided, left, kept, deleted) == ([], [], ["a"], True, ["a"])
    assert store.names("") == []


# --- bad input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    ["s3://", "s3:///prefix", "s3", "", "s3://u:topsecret@/x", "s3://b/a//b", "s3://b/../x", "ftp://b/x"],
)
def test_a_url_that_names_no_place_is_refused_when_it_is_given(url):
    with pytest.raises(ValueError, match=r"names no bucket|not an object store|a key must not have") as caught:
        ObjectStorage(url)
    assert "topsecret" not in str(caught.value)


def test_a_line_break_in_a_key_is_an_error_that_says_so(s3, bucket):
    """obstore panics, which is no `Exception` of Python."""
    store = ObjectStorage(f"s3://{bucket}", {**s3.options, "access_key_id": "from a file\n"})
    with pytest.raises(StorageUnavailableError, match="line break"):
        store.put_new("x", b"")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"nonsense": "1"}, "nonsense"),
        ({"client_options": {"nonsense": "1"}}, "nonsense"),
        ({"client_kwargs": {"nonsense": "1"}}, "nonsense"),
        ({"endpoint": "localhost:9000"}, "https://host:port"),
        ({"endpoint": "http://localhost:port"}, "https://host:port"),
        ({"endpoint": "http://localhost:99999"}, "https://host:port"),
        ({"endpoint": "http://[::1"}, "https://host:port"),
        ({"session_token": "t"}, "give both"),
    ],
)
def test_an_option_that_nobody_knows_is_named(options, named):
    with pytest.raises(ValueError, match=named):
        ObjectStorage("s3://bucket", options)


@pytest.mark.parametrize("scheme", ["gs", "az", "abfs"])
def test_other_clouds_are_reached_by_their_own_options(scheme):
    options = {"gs": {"skip_signature": True}}.get(scheme, {"account_name": "a", "skip_signature": True})
    storage = ObjectStorage(f"{scheme}://bucket/run", options)

    assert storage.locate("x") == f"{scheme}://bucket/run/x"


def test_making_a_storage_sends_no_request(s3, bucket, proxy):
    behind(proxy, s3, bucket).create("x", num_bytes=1, segment_bytes=SEGMENT)

    assert proxy.requests == []


@pytest.mark.parametrize(
    ("code", "status", "advice"),
    [
        ("AccessDenied", 403, "let these credentials"),
        ("RequestTimeTooSkewed", 403, "clock"),
        ("PermanentRedirect", 301, "another region"),
        ("AuthorizationHeaderMalformed", 400, "another region"),
        ("SignatureDoesNotMatch", 403, "check the access key"),
        ("ExpiredToken", 400, "log in again"),
    ],
)
def test_an_error_says_what_to_do(far, proxy, code, status, advice):
    proxy.answer(code, status=status)
    for call in (lambda: far.exists("x"), lambda: far.names(""), lambda: far.put_new("x", b"1")):
        with pytest.raises(StorageUnavailableError, match=advice):
            call()
    assert len(proxy.requests) <= 8  # it is not asked again what will not change


# --- credentials -----------------------------------------------------------------------------------------------


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """An environment that says nothing of stores."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return tmp_path


def keys_sent(proxy) -> list[str]:
    return [request.headers["authorization"].split("Credential=")[1].split("/")[0] for request in proxy.requests]


@pytest.mark.parametrize("botocore", [True, False])
def test_keys_and_places_come_from_options_then_environment_then_files(bare, monkeypatch, proxy, bucket, botocore):
    if not botocore:
        monkeypatch.setattr(aws_settings, "_botocore_session", lambda: None)
    (bare / "config").write_text(f"[profile lab]\nregion = eu-north-1\nendpoint_url = {proxy.endpoint}\n")
    (bare / "credentials").write_text("[lab]\naws_access_key_id = of-file\naws_secret_access_key = s1\n")
    monkeypatch.setenv("AWS_PROFILE", "lab")
    ObjectStorage(f"s3://{bucket}").exists("x")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-environment")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s2")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "t2")
    ObjectStorage(f"s3://{bucket}").exists("x")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    options = {"key": "of-options", "secret": "s3", "client_kwargs": {"endpoint_url": proxy.endpoint}}
    ObjectStorage(f"s3://{bucket}", options).exists("x")

    sent = [
        (key, "eu-north-1" in r.headers["authorization"])
        for key, r in zip(keys_sent(proxy), proxy.requests, strict=True)
    ]
    assert list(dict.fromkeys(sent)) == [("of-file", True), ("of-environment", True), ("of-options", True)]
    assert {r.headers.get("x-amz-security-token") for r in proxy.requests} == {None, "t2"}
    assert "x-amz-security-token" not in proxy.requests[-1].headers


@pytest.mark.parametrize(
    ("more", "environment"),
    [
        ("", {}),
        ("endpoint_url = http://global:1\n", {}),
        ("services = local\n", {}),
        ("services = local\nendpoint_url = http://global:1\n", {}),
        ("services = of-others\nendpoint_url = http://global:1\n", {}),
        ("services = local\n", {"AWS_ENDPOINT_URL": "http://environment:1"}),
        ("services = local\n", {"AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true"}),
        ("services = local\nignore_configured_endpoint_urls = true\n", {"AWS_ENDPOINT_URL_S3": "http://environment:1"}),
    ],
)
def test_the_endpoint_is_the_one_that_botocore_finds(bare, monkeypatch, more, environment):
    session = pytest.importorskip("botocore.session")
    services = "[services local]\nec2 =\n  endpoint_url = http://ec2:1\ns3 =\n  max_attempts = 3\n  endpoint_url = http://s3:1\n"
    of_others = "[services of-others]\nec2 =\n  endpoint_url = http://ec2:1\n"
    (bare / "config").write_text(f"[profile lab]\nregion = eu-north-1\n{more}{services}{of_others}")
    for name, value in {"AWS_PROFILE": "lab", **environment}.items():
        monkeypatch.setenv(name, value)

    found = session.Session().create_client("s3").meta.endpoint_url
    setup = aws_settings.AwsSetup({})
    used = setup.config.get("aws_endpoint_url_s3", "")
    assert used == found or (found.endswith("amazonaws.com") and not setup.endpoint)
    assert used or not {*environment} & {"AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"}  # obstore would take that of these


def test_keys_that_ended_are_looked_up_again(bare, monkeypatch, proxy, s3, bucket):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "old-key-id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "old")
    options = {"endpoint": proxy.endpoint, "retry_config": {"max_retries": 0}, "deadline_seconds": 30.0}
    far = ObjectStorage(f"s3://{bucket}/run", options)
    ended = proxy.answer(
        "ExpiredToken",
        status=400,
        where=lambda r: "old-key-id" in r.headers["authorization"],
        kind="upload_part",
    )
    archive = Archive(3 * SEGMENT)
    sink = archive.sink(far)
    archive.write_all(sink)
    ended.wait()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "new-key-id")
    sink.finish()

    assert sink.num_retries >= 1
    assert keys_sent(proxy)[-1] == "new-key-id"
    assert far.read("x.tar")[0] == archive.data


def test_without_keys_the_error_says_where_to_put_them(bare, proxy, bucket):
    far = ObjectStorage(f"s3://{bucket}", {"endpoint": proxy.endpoint, "deadline_seconds": 5.0})
    with pytest.raises(
        StorageUnavailableError, match=r"no credentials were found; give keys in Place\(url, options=…\)"
    ):
        far.names("")

    assert proxy.requests == []


def test_over_plain_http_to_another_host_the_payload_is_signed(bare):
    def unsigned(endpoint: str) -> bool:
        return ObjectStorage("s3://bucket", {"endpoint": endpoint})._client.settings.aws.config["aws_unsigned_payload"]

    assert unsigned("https://store.example") is True
    assert unsigned("http://127.0.0.1:9000") is True
    assert unsigned("http://store.example") is False


@pytest.mark.parametrize(
    ("url", "said"),
    [("s3://b", "aws sso login"), ("gcs://b", "gcloud auth"), ("az://b", "az login"), ("abfs://b", "az login")],
)
def test_who_has_no_credentials_is_told_how_that_store_s_are_given(url, said):
    error = OSError("Generic error: no answer from http://169.254.169.254/computeMetadata/v1/instance")
    assert said in str(translate(error, "run", BucketSettings(url, None)))


def test_more_names_than_a_page_has_are_listed_by_pages_side_by_side(far, proxy, s3, bucket):
    names = [f"rank_{number:05d}.1234abcd.tar" for number in range(2100)]
    for name in [*names[3:], "archives.1234abcd.bin"]:
        s3.client.put_object(Bucket=bucket, Key=f"run/step_00000001/{name}", Body=b"1")
    before = len(proxy.requests)

    assert far.listed("step_00000001", names[::-1]) == {*names[3:]}
    kinds = [request.kind for request in proxy.requests[before:]]
    assert kinds == ["list_objects"] * 3
    assert far.listed("step_00000001", names[:5]) == {*names[3:5]}
