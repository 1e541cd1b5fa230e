"""The load format `async_ckpt` of vLLM: a model that starts with weights that lie anywhere."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import async_ckpt
from async_ckpt.integrations.common import stored_weights

pytest.importorskip("vllm", reason="vllm is not installed: make test-vllm")

from vllm_engines import Decoder, loaded, reloaded


def same(model: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = zip(model.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


def state_of(model: torch.nn.Module) -> dict[str, Any]:
    """A training's state, of which the weights are a part."""
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "epoch": 3, "rng": async_ckpt.RngState()}


At = Callable[[str], str | async_ckpt.Place]


def saved_archive(model: Decoder, at: At) -> str:
    return async_ckpt.save(state_of(model), at("x.tar")).result().path


def saved_weights(model: Decoder, at: At) -> str:
    return async_ckpt.save(model.state_dict(), at("x.tar")).result().path


def saved_run(model: Decoder, at: At) -> str:
    return saved_step(model, at).rpartition("/")[0]


def saved_step(model: Decoder, at: At) -> str:
    with async_ckpt.AsyncCheckpointer(at("run")) as ckpt:
        ckpt.save({**state_of(model), "model": Decoder()}, step=1).result()
        path = ckpt.save(state_of(model), step=2).result().path
    return path.rpartition("/")[0] if path.endswith(".tar") else path


def saved_export(model: Decoder, at: At) -> str:
    return async_ckpt.export_hf(model.state_dict(), at("hf"), max_shard_bytes=1500).result().path


SAVED = [saved_archive, saved_weights, saved_run, saved_step, saved_export]


@pytest.fixture
def on_disk(tmp_path: Path) -> At:
    return lambda name: f"{tmp_path}/{name}"


@pytest.mark.parametrize("save", SAVED, ids=lambda save: save.__name__)
def test_an_engine_starts_with_what_was_saved_to_a_disk(on_disk, save):
    trained, model = Decoder(), Decoder()
    path = save(trained, on_disk)

    loaded(model, path=path)

    assert same(model, trained)


@pytest.mark.parametrize("save", SAVED, ids=lambda save: save.__name__)
def test_an_engine_starts_with_what_was_saved_to_a_store(s3, bucket, save):
    trained, model = Decoder(), Decoder()
    path = save(trained, lambda name: async_ckpt.Place(f"s3://{bucket}/{name}", options=s3.options))
    assert path.startswith("s3://")

    loaded(model, given={"path": path, "options": s3.options})

    assert same(model, trained)


def test_an_engine_starts_with_a_version_that_was_published_to_a_store(s3, bucket, tmp_path):
    trained, model = Decoder(), Decoder()
    root = f"s3://{bucket}/weights"
    with async_ckpt.Publisher(async_ckpt.Place(root, options=s3.options)) as publisher:
        publisher.publish(trained, version=4).result()

    loaded(model, given={"path": root, "options": s3.options, "folder": str(tmp_path / "local")})

    assert same(model, trained)


def test_an_engine_starts_with_a_step_that_is_not_the_newest(tmp_path):
    trained, model = Decoder(), Decoder()
    with async_ckpt.AsyncCheckpointer(tmp_path, keep=2) as ckpt:
        ckpt.save({"policy": trained, "value": Decoder()}, step=1).result()
        ckpt.save({"policy": Decoder(), "value": Decoder()}, step=2).result()

    loaded(model, given={"path": str(tmp_path), "step": 1, "part": "policy"})

    assert same(model, trained)


@pytest.mark.parametrize("version", [1, 2, 3, None])
def test_an_engine_starts_with_a_published_version_and_reads_only_deltas_the_next_time(tmp_path, version):
    model, of_version = Decoder(), {}
    with async_ckpt.Publisher(tmp_path / "weights", anchor_every=10) as publisher:
        trained = Decoder(256)
        for number in (1, 2, 3):
            with torch.no_grad():
                trained.head.weight[number] += 1
            publisher.publish(trained, version=number).result()
            of_version[number] = {name: tensor.clone() for name, tensor in trained.state_dict().items()}
    model, given = Decoder(256), {"path": str(tmp_path / "weights"), "folder": str(tmp_path / "local")}
    loaded(model, given={**given, "version": 1})

    loaded(model, given={**given, "version": version})

    wanted = of_version[3 if version is None else version]
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())
    deltas = async_ckpt.Subscriber(tmp_path / "weights").pull(tmp_path / "local", 3)
    assert deltas.num_versions == 3 - (version or 3)


def test_a_version_goes_to_the_folder_for_downloads_that_vllm_is_given(tmp_path):
    trained, model = Decoder(), Decoder()
    with async_ckpt.Publisher(tmp_path / "weights") as publisher:
        publisher.publish(trained, version=1).result()

    loaded(model, path=tmp_path / "weights", download_dir=tmp_path / "downloads")

    assert same(model, trained)
    assert (tmp_path / "downloads").is_dir()


def refused(error: type[Exception], says: str, **arguments: Any) -> None:
    model = Decoder()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(error, match=says):
        loaded(model, **arguments)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_place_without_weights_is_refused_before_anything_is_loaded(on_disk, tmp_path):
    archive = saved_archive(Decoder(), on_disk)
    run = saved_run(Decoder(), on_disk)
    weights = tmp_path / "weights"
    with async_ckpt.Publisher(weights) as publisher:
        publisher.publish(Decoder(), version=1).result()
    missing = async_ckpt.NotCommittedError

    refused(missing, "nothing at this path", given={"path": str(tmp_path / "nowhere")})
    refused(missing, "step 7 is not committed", given={"path": run, "step": 7})
    refused(
        missing, "version 7: the version does not exist; there are 1 to 1", given={"path": str(weights), "version": 7}
    )
    refused(missing, "version 1 does not exist", given={"path": run, "version": 1})
    refused(ValueError, '"folder"', given={"path": str(weights)})
    refused(KeyError, "'policy'.*model, optimizer", given={"path": archive, "part": "policy"})
    refused(KeyError, "no tensors in 'epoch'", given={"path": archive, "part": "epoch"})
    refused(ValueError, "'pth' is not known", given={"pth": archive})
    refused(ValueError, "step must be of type int", given={"path": run, "step": "2"})
    refused(ValueError, "give one of them", given={"path": run, "step": 2, "version": 2})


@pytest.mark.parametrize("is_given", [True, False], ids=["path", "model"])
def test_an_engine_that_runs_reloads_from_its_place_or_from_the_one_that_the_request_names(tmp_path, is_given):
    model, run, exported = Decoder(), tmp_path / "run", tmp_path / "exported"
    published, first, later = Decoder(), Decoder(), Decoder()
    async_ckpt.export_hf(published.state_dict(), exported).result()
    with async_ckpt.AsyncCheckpointer(run) as ckpt:
        ckpt.save({"model": first}, step=1).result()
        engine = loaded(model, given={"path": str(run), "part": "model"}) if is_given else loaded(model, path=run)
        assert same(model, first)

        ckpt.save({"model": later}, step=2).result()
        reloaded(engine, model)
        assert same(model, later)

    for _ in range(2):  # as vLLM's own load formats do, it stays at the place that a request has named
        reloaded(engine, model, exported)
        assert same(model, published)
        torch.nn.init.zeros_(model.head.weight)
    reloaded(engine, model)
    assert same(model, published)


def test_a_step_whose_commit_never_came_is_no_step(on_disk, tmp_path):
    run = saved_run(Decoder(), on_disk)
    (step,) = tmp_path.glob("run/*2/manifest.json")
    step.unlink()

    refused(async_ckpt.NotCommittedError, "step 2 is not committed", given={"path": run, "step": 2})


def test_a_state_with_several_models_must_be_told_which(tmp_path):
    async_ckpt.save({"policy": Decoder(), "value": Decoder()}, tmp_path / "x.tar").result()

    refused(KeyError, "policy, value.*say which", given={"path": str(tmp_path / "x.tar")})


def test_weights_of_another_model_are_refused_by_the_name_of_a_tensor(on_disk, tmp_path):
    wide = saved_weights(Decoder(24), on_disk)
    async_ckpt.save({"other.weight": torch.zeros(3)}, tmp_path / "y.tar").result()

    refused(async_ckpt.StateMismatchError, "x.tar: Decoder refuses.*embed.weight", path=wide)
    refused(async_ckpt.StateMismatchError, "y.tar: Decoder refuses.*other.weight", path=tmp_path / "y.tar")


def test_weights_that_leave_a_parameter_as_it_was_are_refused(tmp_path):
    state = Decoder().state_dict()
    del state["head.weight"]
    async_ckpt.save(state, tmp_path / "x.tar").result()

    with pytest.raises(async_ckpt.StateMismatchError, match=re.escape("head.weight")):
        loaded(Decoder(), path=tmp_path / "x.tar")


def test_a_damaged_byte_fails_the_load_and_is_not_blamed_on_the_model(on_disk, tmp_path):
    path = Path(saved_weights(Decoder(256), on_disk))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)

    with pytest.raises(async_ckpt.CorruptCheckpointError):
        loaded(Decoder(256), path=path)


def test_a_folder_that_is_brought_to_another_version_while_it_is_read_fails_the_load(tmp_path, monkeypatch):
    trained = Decoder()
    with async_ckpt.Publisher(tmp_path / "weights", anchor_every=10) as publisher:
        publisher.publish(trained, version=1).result()
        with torch.no_grad():
            trained.head.weight[0] += 1
        publisher.publish(trained, version=2).result()
    model = Decoder()

    def pull_meanwhile(name: str) -> None:
        async_ckpt.Subscriber(tmp_path / "weights").pull(tmp_path / "local", 2)

    model.before_weight = pull_meanwhile  # type: ignore[assignment]
    given = {"path": str(tmp_path / "weights"), "folder": str(tmp_path / "local"), "version": 1}
    monkeypatch.setattr(stored_weights, "PIECE_BYTES", 1)  # or all would be read before the model takes the first
    with pytest.raises(async_ckpt.StorageUnavailableError, match="from version 1 to 2"):
        loaded(model, given=given)
