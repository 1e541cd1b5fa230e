"""The mutants of the device code are those of the code as it is, and what is kept of them is theirs."""

import json

import pytest
from mutants_device import CRASHED, KEPT, MUTANTS, OF_CUDA_ALONE, ROOT, TOO_LONG, Mutant


@pytest.mark.parametrize("mutant", [*MUTANTS, *OF_CUDA_ALONE], ids=lambda mutant: mutant.what)
def test_the_text_of_a_mutant_is_in_the_code_exactly_once_and_still_compiles_when_it_is_changed(mutant):
    place = ROOT / mutant.place()
    changed = place.read_text(encoding="utf-8").replace(mutant.old, mutant.new)

    assert changed != place.read_text(encoding="utf-8")
    compile(changed, str(place), "exec")


def test_of_every_mutant_a_test_is_kept_that_is_there():
    killers = json.loads(KEPT.read_text(encoding="utf-8"))

    assert list(killers) == [mutant.what for mutant in MUTANTS]
    for killer in set(killers.values()) - {CRASHED, TOO_LONG}:
        file, _, name = killer.partition("::")
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), killer


def test_a_mutant_whose_text_has_changed_is_an_error():
    with pytest.raises(LookupError, match="not in the device code exactly once"):
        Mutant("no such line", "def no_such_function", "pass").place()
