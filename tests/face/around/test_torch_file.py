"""Files of `torch.save` that this library writes: a disk that refuses them is named, and what to do."""

import sys
from pathlib import Path

import pytest
import torch

from async_ckpt import StorageFullError, StorageUnavailableError
from async_ckpt.face.around.torch_file import write_by_torch


@pytest.mark.parametrize("in_zip", [True, False])
def test_torch_loads_what_was_written(tmp_path, in_zip):
    write_by_torch({"w": torch.arange(5)}, tmp_path / "x.pt", in_zip=in_zip)

    assert torch.equal(torch.load(tmp_path / "x.pt")["w"], torch.arange(5))


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
@pytest.mark.parametrize("num_items", [1, 5000, 5_000_000])
def test_a_full_disk_is_told_of_as_one(num_items):
    with pytest.raises(StorageFullError, match=r"/dev/full: there is no room left; delete old steps"):
        write_by_torch({"w": torch.zeros(num_items)}, Path("/dev/full"))


def test_a_folder_that_is_not_there_is_told_of(tmp_path):
    with pytest.raises(StorageUnavailableError, match="make sure that the folder exists"):
        write_by_torch({}, tmp_path / "none" / "x.pt")
