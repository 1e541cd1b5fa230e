"""The contract of storages, and the life of a run, on servers and clients that are not alike.

SeaweedFS lists by folders; rclone's S3 server and the package sshfs send whole objects for a part; WebDAV renames onto no
name that exists; Azure and Google have interfaces of their own.
"""

import gc
import json
import logging
import os
import subprocess
import sys
import uuid
import warnings

import pytest
import store_servers
import torch
from slices import ALL, some
from states import SEGMENT, assert_is_state, open_run, save_into, state_at

import async_ckpt
from async_ckpt import Place, Publisher, Subscriber
from async_ckpt.testing import StorageContract

_NO_CONDITIONS = "nobody can be made sure to be the only one there"
_RACES: dict[str, str] = {
    "test_of_many_writers_that_put_a_new_object_exactly_one_wins": _NO_CONDITIONS,
    "test_of_many_writers_that_replace_one_version_exactly_one_wins": _NO_CONDITIONS,
}


# The clients of webdav4 and asyncssh leave their connections to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


@pytest.fixture(scope="module", autouse=True)
def _connections():
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def seaweed(folder):
    (folder / "weed").mkdir()
    with store_servers.seaweed(folder / "weed") as server:
        server.make_bucket("bucket")  # one for all, since each takes some of the server's volumes
        yield server


@pytest.fixture(scope="module")
def azurite():
    with store_servers.azurite() as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def google():
    with store_servers.google() as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def wsgidav(folder):
    (folder / "dav").mkdir()
    with store_servers.wsgidav(folder / "dav") as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def rclone_webdav(folder):
    (folder / "rclone").mkdir()
    with store_servers.rclone_webdav(folder / "rclone") as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def sftp(folder):
    (folder / "sftp").mkdir()
    with store_servers.sftp(folder / "sftp") as options:
        yield options


def on_seaweed(request, engine):
    server = request.getfixturevalue("seaweed")
    return Place(
        f"s3://bucket/{uuid.uuid4().hex[:12]}/run", options={**server.options, "deadline_seconds": 20}, engine=engine
    )


def on_rclone(request, engine):
    server, bucket = request.getfixturevalue("rclone"), f"bucket-{uuid.uuid4().hex[:12]}"
    server.make_bucket(bucket)
    return Place(f"s3://{bucket}/run", options={**server.options, "deadline_seconds": 20}, engine=engine)


def on_azurite(request, engine):
    endpoint = request.getfixturevalue("azurite")
    if engine == "fsspec":
        store_servers.need("adlfs")
    options = {**store_servers.azure_options(endpoint), "deadline_seconds": 20}
    return Place(f"az://{store_servers.make_container(endpoint)}/run", options=options, engine=engine)


def on_google(request, engine):
    endpoint = request.getfixturevalue("google")
    if engine == "fsspec":
        store_servers.need("gcsfs")
    options = {"endpoint": endpoint, "deadline_seconds": 20}
    return Place(f"gs://{store_servers.make_google_bucket(endpoint)}/run", options=options, engine=engine)


def on_webdav(request, server):
    endpoint = request.getfixturevalue(server)
    return store_servers.place_on_webdav(endpoint, f"{uuid.uuid4().hex[:12]}/run")


def on_sftp(request, _):
    options = request.getfixturevalue("sftp")
    return Place(f"ssh://127.0.0.1/{uuid.uuid4().hex[:12]}/run", options={**options, "deadline_seconds": 20})


PLACES = {
    "webdav4 on wsgidav": (on_webdav, "wsgidav"),
    "webdav4 on rclone": (on_webdav, "rclone_webdav"),
    "sshfs": (on_sftp, None),
    "obstore on rclone": (on_rclone, "obstore"),
    "s3fs on rclone": (on_rclone, "s3fs"),
    "obstore on seaweedfs": (on_seaweed, "obstore"),
    "s3fs on seaweedfs": (on_seaweed, "s3fs"),
    "obstore on azurite": (on_azurite, "obstore"),
    "adlfs on azurite": (on_azurite, "fsspec"),
    "obstore on fake-gcs-server": (on_google, "obstore"),
    "gcsfs on fake-gcs-server": (on_google, "fsspec"),
}


# Each small object takes several requests there, and pages are unknown.
FOLDERS = ("webdav4 on wsgidav", "webdav4 on rclone", "sshfs")

_FOLDERS_STAY = "to delete a folder is to delete what is in it, so empty ones are left"
_NAMES = "webdav4 does not escape what is special in a URL"
_WEBDAV = {
    **dict.fromkeys(
        (
            "test_many_are_deleted_at_once_and_those_that_are_gone_are_no_error",
            "test_an_aborted_object_leaves_no_trace",
            "test_all_below_a_folder_is_deleted_however_deep_and_nothing_beside_it",
            "test_a_folder_that_others_remove_while_something_is_begun_in_it_is_made_again",
            "test_a_folder_that_a_deletion_leaves_empty_goes_too",
        ),
        _FOLDERS_STAY,
    ),
    **dict.fromkeys(
        ("test_a_name_may_have_any_character", "test_sizes_are_by_the_names_that_objects_were_given"), _NAMES
    ),
}
_SEAWEED = dict.fromkeys(
    (
        "test_many_are_deleted_at_once_and_those_that_are_gone_are_no_error",
        "test_all_below_a_folder_is_deleted_however_deep_and_nothing_beside_it",
        "test_a_folder_that_a_deletion_leaves_empty_goes_too",
    ),
    "the server lists a folder for some time after its last object was deleted",
)
NOT_APPLICABLE: dict[str, dict[str, str]] = {
    "webdav4 on wsgidav": _WEBDAV,
    "webdav4 on rclone": _WEBDAV,
    "obstore on rclone": _RACES,
    **dict.fromkeys(("obstore on seaweedfs", "s3fs on seaweedfs"), _SEAWEED),
    "sshfs": {
        "test_an_object_that_is_replaced_while_it_is_read_is_never_a_mixture": "SFTP tells times in whole seconds"
    },
    "gcsfs on fake-gcs-server": {
        "test_a_name_may_have_any_character": "the server does not find some of these names after a copy"
    },
}


@pytest.fixture(params=PLACES)
def place(request):
    make, argument = PLACES[request.param]
    return make(request, argument)


def state(value):
    return {"model": {"w": torch.full((1000,), float(value))}, "step": value}


# --- the contract ---------------------------------------------------------------------------------------------


class TestContract(StorageContract):
    """Some of the places in each run of the tests, since each takes up to half a minute."""

    @pytest.fixture(autouse=True, params=some(list(PLACES), 5))
    def _applicable(self, request):
        if reason := NOT_APPLICABLE.get(request.param, {}).get(request.node.originalname):
            pytest.skip(reason)
        self.of = request.param
        has_pages = " on rclone" not in self.of and request.param not in FOLDERS
        self.num_listed = 1100 if ALL and has_pages else 20

    @pytest.fixture
    def storage(self, request, _applicable):
        make, argument = PLACES[self.of]
        return make(request, argument).storage()


# --- the life of a run ----------------------------------------------------------------------------------------


def test_a_run_is_saved_replaced_rolled_back_deleted_and_read_again(place, caplog):
    with caplog.at_level(logging.WARNING, "async_ckpt"):
        with open_run(place, keep=2, segment_bytes=SEGMENT) as ckpt:
            for step in range(1, 6):
                assert ckpt.save(state_at(step, 9), step=step).result().status == "committed"
            ckpt.wait()
            assert ckpt.steps() == [4, 5]
        with open_run(place, segment_bytes=SEGMENT, on_rollback="retire") as ckpt:
            live = state_at(0, 9)
            assert ckpt.restore(live, step=4) == 4
            assert_is_state(live, 4, 9)
            ckpt.save(state_at(7, 9), step=5, overwrite=True).result()
            ckpt.wait()
        with open_run(place) as ckpt:
            assert (ckpt.steps(), ckpt.latest()) == ([4, 5], 5)
            assert_is_state(ckpt.load(), 7, 9)
            assert list(ckpt.load(select="model.bias")["model"]) == ["bias"]
    assert str(async_ckpt.verify(place)).startswith(f"{place.text}: 2 steps, 4 to 5, are sound")
    said = [record.message for record in caplog.records if record.name == "async_ckpt"]
    assert not [line for line in said if "failed" in line or "incomplete" in line]


def test_versions_follow_each_other(place, tmp_path):
    with Publisher(place) as publisher:
        for version in (1, 2, 3):
            publisher.publish({"w": torch.full((1000,), float(version))}, version).result()
    with Subscriber(place) as subscriber:
        assert subscriber.pull(tmp_path / "replica").version == 3


# --- the command ----------------------------------------------------------------------------------------------


def run_command(*words, **variables):
    done = subprocess.run(
        [sys.executable, "-m", "async_ckpt", *words, "--deadline", "20", "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
        check=False,
    )
    return done.returncode, json.loads(done.stdout or "null"), done.stderr


@pytest.mark.parametrize("by", ["option", "variables", "connection string"])
def test_the_command_reaches_azure_at_an_endpoint_without_tls(request, by):
    place = on_azurite(request, "obstore")
    save_into(place, 1)
    endpoint, account = place.options["endpoint"], place.options["account_name"]
    keys = {"AZURE_STORAGE_ACCOUNT_NAME": account, "AZURE_STORAGE_ACCOUNT_KEY": place.options["account_key"]}
    words: tuple[str, ...] = ()
    if by == "option":
        words = ("--endpoint", endpoint)
    elif by == "variables":
        keys["AZURE_STORAGE_ENDPOINT"] = endpoint
    else:
        parts = {"AccountName": account, "AccountKey": place.options["account_key"], "BlobEndpoint": endpoint}
        keys = {"AZURE_STORAGE_CONNECTION_STRING": ";".join(f"{name}={value}" for name, value in parts.items())}
    for word in ("ls", "verify"):
        status, told, error = run_command(word, place.text, *words, **keys)
        assert (status, error) == (0, "")
        assert told


@pytest.mark.parametrize("by", ["option", "GOOGLE_BASE_URL", "STORAGE_EMULATOR_HOST"])
def test_the_command_reaches_google_at_an_endpoint_without_tls(request, by):
    place = on_google(request, "obstore")
    save_into(place, 1)
    endpoint = place.options["endpoint"]
    words = ("--endpoint", endpoint) if by == "option" else ()
    variables = {} if by == "option" else {by: endpoint.removeprefix("http://" if by.startswith("STORAGE") else "")}
    for word in ("ls", "verify"):
        status, told, error = run_command(word, place.text, *words, **variables)
        assert (status, error) == (0, "")
        assert told
