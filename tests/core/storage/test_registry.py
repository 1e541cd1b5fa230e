"""A user's own storage, which a Place takes by its scheme."""

from pathlib import Path

import pytest
from states import save_into, state_at, states_equal

import async_ckpt
from async_ckpt import Place
from async_ckpt.core.storage.local import LocalStorage
from async_ckpt.core.storage.place import register_storage


class Vault(LocalStorage):
    """A storage that is not one of ours."""


@pytest.fixture
def vault(tmp_path: Path) -> Path:
    asked = []

    def make(url, options):
        asked.append(options)
        return Vault(tmp_path / url.removeprefix("vault://"))

    register_storage("vault", make)
    return tmp_path


def test_a_place_with_its_scheme_is_in_the_storage_that_was_registered(vault):
    assert isinstance(Place("vault://a").storage(), Vault)
    storage, name = Place("vault://a/x.tar").object()
    assert isinstance(storage, Vault)
    assert name == "x.tar"


def test_a_file_and_a_run_are_saved_to_it_and_loaded(vault):
    async_ckpt.save(state_at(1), "vault://a/x.tar").result()
    save_into("vault://run", 2)

    assert states_equal(async_ckpt.load("vault://a/x.tar"), state_at(1))
    assert states_equal(async_ckpt.load("vault://run"), state_at(2))
    assert async_ckpt.verify("vault://run").num_archives == 1
    assert (vault / "run/step_00000002/manifest.json").is_file()


def test_its_function_gets_the_options_of_the_place(tmp_path):
    asked = []
    register_storage("vault", lambda url, options: asked.append((url, options)) or Vault(tmp_path))
    Place("vault://a", options={"speed": 3}).storage()
    Place("vault://a").storage()
    assert asked == [("vault://a", {"speed": 3}), ("vault://a", None)]


def test_an_engine_is_refused_for_it(vault):
    with pytest.raises(ValueError, match="vault:// has a storage of its own; leave out engine="):
        Place("vault://a", engine="fsspec").storage()


@pytest.mark.parametrize("scheme", ["s3", "gs", "file", "az"])
def test_a_scheme_that_has_a_client_is_refused(scheme):
    with pytest.raises(ValueError, match=f"{scheme}:// has a client already"):
        register_storage(scheme, lambda url, options: Vault("x"))


@pytest.mark.parametrize("scheme", ["", "a://", "Mem", "a b", 3])
def test_a_scheme_that_is_none_is_refused(scheme):
    with pytest.raises(ValueError, match="scheme must be lower-case"):
        register_storage(scheme, lambda url, options: Vault("x"))


def test_what_is_no_function_is_refused():
    with pytest.raises(TypeError, match="make must be a function"):
        register_storage("vault", "Vault")  # type: ignore[arg-type]
