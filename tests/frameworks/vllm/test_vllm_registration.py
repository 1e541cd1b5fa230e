"""How vLLM finds what is here, and what is said where it has moved."""

from __future__ import annotations

import tomllib
import warnings
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import async_ckpt
from async_ckpt.integrations.common import framework_checks

pytest.importorskip("vllm", reason="vllm is not installed: make test-vllm")

import vllm
import vllm.distributed.weight_transfer as transfer
import vllm.model_executor.model_loader as loaders
import vllm_engines

from async_ckpt.integrations.vllm import plugin, register, registration

REGISTRIES = (
    transfer.WeightTransferEngineFactory._registry,
    transfer.WeightTransferTrainerFactory._registry,
    loaders._LOAD_FORMAT_TO_MODEL_LOADER,
)


def forget() -> None:
    """As in a process that has just imported vLLM."""
    register.cache_clear()
    framework_checks.require.cache_clear()
    for registry in REGISTRIES:
        registry.pop("async_ckpt", None)


@pytest.fixture(autouse=True)
def _fresh():
    forget()
    yield
    forget()


def test_the_plugin_that_the_package_names_registers_all_once_however_often_it_is_called():
    told = tomllib.loads((Path(async_ckpt.__file__).parents[1] / "pyproject.toml").read_text())
    ((name, value),) = told["project"]["entry-points"]["vllm.general_plugins"].items()
    load = EntryPoint(name, value, "vllm.general_plugins").load()

    load()
    load()
    register()

    assert "async_ckpt" in transfer.WeightTransferEngineFactory._registry
    assert "async_ckpt" in transfer.WeightTransferTrainerFactory._registry
    assert loaders.get_model_loader(vllm_engines.LoadConfig(load_format="async_ckpt")).__module__.startswith(
        "async_ckpt."
    )
    engine = transfer.WeightTransferEngineFactory._registry["async_ckpt"]()
    assert issubclass(engine, transfer.WeightTransferEngine)
    assert not engine.__abstractmethods__


def test_a_second_backend_by_this_name_is_not_replaced():
    transfer.WeightTransferEngineFactory.register_engine("async_ckpt", "somebody.elses", "Engine")

    with pytest.raises(ValueError, match="already registered"):
        register()


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (transfer, "ParamMeta"),
        (transfer, "WeightTransferEngineFactory"),
        (transfer.WeightTransferTrainerFactory, "trainer_init"),
        (loaders, "register_model_loader"),
        (loaders.DefaultModelLoader, "get_all_weights"),
        (import_module("vllm.model_executor.model_loader.reload"), "finalize_layerwise_reload"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_an_interface_that_has_moved_is_named_when_it_is_registered_and_vllm_starts_all_the_same(
    monkeypatch, owner, name
):
    monkeypatch.delattr(owner, name)

    with pytest.raises(RuntimeError, match=rf"vllm {vllm.__version__} has no .*{name}.*install a version"):
        register()
    with pytest.warns(RuntimeWarning, match=f"not registered with vLLM.*{name}"):
        plugin()
    assert not any("async_ckpt" in registry for registry in REGISTRIES)


def test_a_module_that_has_moved_is_named(monkeypatch):
    monkeypatch.setattr(registration, "_USED", {"vllm.distributed.weights_transferred": {}})

    with pytest.raises(RuntimeError, match=r"no module vllm\.distributed\.weights_transferred"):
        register()


def test_another_version_of_vllm_gives_one_warning(monkeypatch):
    monkeypatch.setattr(vllm, "__version__", "0.41.2")

    def make_two_workers() -> None:
        register()
        vllm_engines.Worker()
        vllm_engines.Worker()

    with pytest.warns(UserWarning, match=r"vllm 0\.41\.2 was not tested") as told:
        make_two_workers()

    assert len(told) == 1


def test_the_version_that_was_tested_gives_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        register()
