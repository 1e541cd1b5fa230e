"""A few of the places at which a request to a store fails; `python -m tests.matrices.objects` tries thousands."""

import itertools
import random
import sys

import pytest
import slices
from buckets import Bucket

from tests.matrices.attack_driver import NOT_MET
from tests.matrices.objects.__main__ import COLUMNS
from tests.matrices.objects.request_faults import FAULTS
from tests.matrices.objects.request_places import left_in, request_attackers
from tests.matrices.objects.store_roots import SCENARIOS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks as Linux does")


def test_no_request_that_fails_breaks_a_promise(tmp_path):
    names = list(SCENARIOS)
    with request_attackers(tmp_path, 1) as [attacker]:
        places = attacker.places(names[slices.PART % len(names)])
        tried = random.Random(slices.PART).sample(places, 6)
        found = {str(place): attacker.wrong(place) for place in tried}

    assert {place: wrong for place, wrong in found.items() if wrong not in (None, NOT_MET)} == {}


def test_each_fault_is_in_one_column_of_the_table():
    assert sorted(itertools.chain(*COLUMNS.values())) == sorted(FAULTS)


def test_an_archive_that_nothing_names_and_an_open_upload_are_found(s3):
    bucket = Bucket(s3)
    s3.make_bucket(bucket)
    bucket.write(["run/step_00000001/manifest.json"], b'{"name": "a.tar"}')
    bucket.write(["run/step_00000001/a.tar"])
    assert left_in(bucket) is None

    bucket.write(["run/step_00000001/b.tar"])
    bucket.begin_upload("run/step_00000002/c.tar")
    bucket.write(["run/.async_ckpt-probe-01", "single/.async_ckpt-probe-02"])
    assert left_in(bucket) == (
        "left: run/step_00000001/b.tar, run/.async_ckpt-probe-01, the upload of run/step_00000002/c.tar"
    )
