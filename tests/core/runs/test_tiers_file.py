"""`tiers.json`: what it tells of the places of a run, and what it keeps to itself."""

import json
import os

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from scripted_disk import scripted
from states import open_run, save, save_into, state_at

from async_ckpt import CorruptCheckpointError, Keep, Naming, Place, StorageUnavailableError
from async_ckpt.core.runs import tiers_file
from async_ckpt.core.runs.manifest import seal
from async_ckpt.errors import FormatVersionError


def test_the_first_save_at_a_place_tells_all_places_with_their_options(roots):
    best = Keep(last=3, best=("loss", "min", 2), whole_folder=True)
    far = Place(roots[1], keep=best, every=10, volatile=True)
    with open_run([roots[0], far], keep=2, max_bandwidth=5e6, naming="verl") as ckpt:
        ckpt.save(state_at(10), step=10, record={"loss": 1.0}).result()
    told = tiers_file.read(Place(roots[0]))
    assert told is not None
    assert [(one.text, one.keep, one.every, one.is_volatile) for one in told.places] == [
        (str(roots[0]), Keep(last=2), None, Place(roots[0]).is_volatile),
        (str(roots[1]), best, 10, True),
    ]
    assert told.naming == Naming("global_step_{}", "latest_checkpointed_iteration.txt")
    assert told.max_bandwidth == 5e6
    assert not (roots[1] / "tiers.json").exists()  # it takes no saves


def test_a_run_of_one_place_has_no_such_file(tmp_path):
    save_into(tmp_path, 1)
    assert tiers_file.read(Place(tmp_path)) is None


def test_a_place_that_is_now_elsewhere_is_the_one_that_was_read(roots):
    save_into(roots, 1)
    moved = roots[0].rename(roots[0].with_name("mounted elsewhere"))
    told = tiers_file.read(Place(moved))
    assert told is not None
    assert [one.text for one in told.places] == [str(moved), str(roots[1])]


def test_a_place_whose_name_is_not_text_is_told_too(tmp_path):
    roots = [tmp_path / os.fsdecode(b"near \xff"), tmp_path / os.fsdecode(b"far \xff")]
    save_into(roots, 1)
    assert [one.text for one in tiers_file.read(Place(roots[0])).places] == list(map(str, roots))


def test_no_secret_is_written(tmp_path):
    options = {"endpoint": "http://user:word@minio:9000", "region": "here", "secret_access_key": "hidden", "timeout": 7}
    places = (Place(tmp_path), Place("s3://bucket/run", options=options), Place("sftp://me:hidden@host/run"))
    tiers_file.TiersFile(places, Naming()).write(places[0].storage(), at=0)
    text = (tmp_path / "tiers.json").read_text()
    assert "hidden" not in text
    assert "word@" not in text
    told = tiers_file.read(Place(tmp_path))
    assert told is not None
    assert told.places[1].options == {"region": "here", "timeout": 7}
    assert told.places[2].text == "sftp://host/run"


def test_a_path_on_a_filesystem_is_told_as_its_url_and_not_as_a_folder_of_this_machine(tmp_path):
    places = (Place(tmp_path), Place("/data/run", fs=MemoryFileSystem()))
    tiers_file.TiersFile(places, Naming()).write(places[0].storage(), at=0)
    told = tiers_file.read(Place(tmp_path))
    assert told.places[1].text == "memory:///data/run"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b'{"version": 1}',
        seal({"version": 1, "at": 0}),
        seal({"version": 1, "at": 1, "naming": {}, "places": []}),
        seal({"version": "1"}),
        seal({"version": 1, "at": 0, "naming": {"step_format": "{}", "tracker": None}, "places": [{"url": 3}]}),
    ],
)
def test_a_damaged_file_is_an_error_that_says_what_to_do(tmp_path, data):
    (tmp_path / "tiers.json").write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=r"tiers\.json cannot be read .* or delete it"):
        tiers_file.read(Place(tmp_path))


def test_a_newer_file_is_an_error_that_names_its_version(tmp_path):
    (tmp_path / "tiers.json").write_bytes(seal({"version": 2, "further": True}))
    with pytest.raises(FormatVersionError, match="version 2, this library reads up to 1"):
        tiers_file.read(Place(tmp_path))


def test_the_file_stands_in_no_ones_way(roots):
    for steps in ((1, 2), (3, 4)):
        with open_run(roots, keep=1) as ckpt:
            assert ckpt.restore(state_at(0)) == (None if steps[0] == 1 else 2)
            save(ckpt, *steps)
    with open_run(roots[0]) as alone:
        assert alone.steps() == [4]
    assert json.loads((roots[0] / "tiers.json").read_text())["at"] == 0


def test_the_file_is_written_again_when_it_is_lost_or_could_not_be_written(roots):
    with open_run(roots) as ckpt:
        disk = scripted(ckpt)
        disk.fail("replace", "tiers.json", error=StorageUnavailableError("the disk is away", path="near"))
        assert isinstance(ckpt.save(state_at(1), 1).exception(), StorageUnavailableError)
        save(ckpt, 2)
        assert len(tiers_file.read(Place(roots[0])).places) == 2
        with open_run([*roots, roots[0].with_name("third")]) as other:  # of the same start
            save(other, 3)
        assert len(tiers_file.read(Place(roots[0])).places) == 3
        (roots[0] / "tiers.json").unlink()
        save(ckpt, 4)
        save(ckpt, 5)
        assert len(tiers_file.read(Place(roots[0])).places) == 2
