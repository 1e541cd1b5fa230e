"""The costs of saves under frameworks that need their own environments, compared with the frameworks' own saves.

In: a setting. Out: figures by name. Knows nothing of: how a plug-in saves.

As in `trainers.py`, one model trains by the framework's own steps, and the ways to save take turns. A framework's own
saves are "own" if they block the training, and "own " with the name of the mode if they do not. All run on processors,
on one rank.
"""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch
import torch.distributed as dist
import typing_extensions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from .figures import Saves, Trains
from .setting import Setting
from .table import Figure
from .trainers import Gpt2 as TransformersGpt2
from .trainers import Way, beside_asynchronous, compared, figures_of
from .workloads import Gpt2

_ADAMW: Final[dict[str, Any]] = {"lr": 1e-5, "fused": True}
_OWN: Final = "own "


def _gpt2(setting: Setting) -> Gpt2:
    """The model with 124 million parameters and AdamW's state, or a toy."""
    return Gpt2(setting.training_bytes * 3 // 2)


def _released(gpt2: Gpt2) -> Gpt2:
    """The model without gradients and optimizer state, for a framework that creates its own."""
    gpt2.optimizer.zero_grad(set_to_none=True)
    gpt2.optimizer.state.clear()
    return gpt2


def _measured(name: str, setting: Setting, subject: Trains, ways: Mapping[str, Way | Saves]) -> dict[str, Figure]:
    """All figures of a framework. Asynchronous saves that cannot run here have the reason instead."""
    why_not = {key: why for key, way in ways.items() if key.startswith(_OWN) and (why := _why_not(way))}
    costs = compared(setting, subject, {key: way for key, way in ways.items() if key not in why_not})
    rows = figures_of(name, costs)
    for key in ways:
        if key.startswith(_OWN):
            rows |= beside_asynchronous(name, key.removeprefix(_OWN), costs, why_not.get(key) or costs[key])
    return rows


def _why_not(way: Way | Saves) -> str:
    """The reason why this save does not run here; empty if it does."""
    try:
        way.durable_seconds()
    except Exception as error:
        return f"not measured: {type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return ""


@contextmanager
def _one_rank(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'ranks'}", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


# --- torchtitan -----------------------------------------------------------------------------------------------------


class _UnderTorchtitan:
    """GPT-2 with torchtitan's container of optimizers, which calls the managers as torchtitan's trainer does."""

    def __init__(self, gpt2: Gpt2) -> None:
        self._gpt2, self._managers = gpt2, list[Any]()
        titan: Any = import_module("torchtitan.components.optimizer")
        groups = [titan.ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": _ADAMW["lr"]})]
        config = titan.OptimizersContainer.Config(param_groups=groups, implementation="fused")
        self.optimizers = titan.OptimizersContainer(config, model_parts=[gpt2.model])
        schedules = titan.LRSchedulersContainer.Config(warmup_steps=0)
        self._schedulers = schedules.build(optimizers=self.optimizers, training_steps=10**6)
        self.step()

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self._gpt2.model, "optimizer": self.optimizers}

    def step(self) -> None:
        self.optimizers.zero_grad(set_to_none=False)
        self._gpt2.loss(self._gpt2.model).backward()
        for manager in self._managers:
            manager.maybe_wait_for_staging()
        self.optimizers.step()

    def way(self, kind: Any, folder: Path, **options: Any) -> Way:
        """The saves of a manager of torchtitan, or of ours if `kind` is our module."""
        config = kind.CheckpointManager.Config(
            enable=True, interval=1, keep_latest_k=0, last_save_model_only=False, **options
        )
        manager = config.build(
            dataloader=None, model_parts=[self._gpt2.model], optimizers=self.optimizers, lr_schedulers=self._schedulers,
            states={}, sd_adapter=None, base_folder=str(folder),
        )  # fmt: skip
        self._managers.append(manager)

        def save(step: int) -> object:
            manager.save(step)
            return manager.save_future

        is_durable = kind.__name__.startswith("async_ckpt")
        return Way(
            save, manager.maybe_wait_for_saving, lambda step: folder / f"checkpoint/step-{step}", is_durable=is_durable
        )

    def close(self) -> None:
        for manager in self._managers:
            manager.close()


def torchtitan(setting: Setting) -> dict[str, Figure]:
    warnings.simplefilter("ignore")
    theirs: Any = import_module("torchtitan.components.checkpointer")
    ours: Any = import_module("async_ckpt.integrations.torchtitan")
    folder = setting.folder / "torchtitan"
    with _one_rank(setting.folder / "world"):
        subject = _UnderTorchtitan(_released(_gpt2(setting)))
        plain = Saves(folder / "plain", subject.state, guard=subject.optimizers)
        with plain.checkpointer:
            ways: dict[str, Way | Saves] = {"plain": plain, "own": subject.way(theirs, folder / "own")}
            for mode in ("async", "async_with_pinned_mem"):
                ways[_OWN + mode] = subject.way(theirs, folder / mode, async_mode=mode)
            ways["archive"] = subject.way(ours, folder / "archive")
            rows = _measured("torchtitan", setting, subject, ways)
        subject.close()
    return rows


# --- DeepSpeed ------------------------------------------------------------------------------------------------------


class _UnderDeepSpeed:
    """GPT-2 in an engine of DeepSpeed under ZeRO 1, with one checkpoint engine after the other."""

    def __init__(self, gpt2: Gpt2) -> None:
        self._gpt2 = gpt2
        deepspeed: Any = import_module("deepspeed")
        self.engine: Any = deepspeed.initialize(
            model=gpt2.model,
            optimizer=torch.optim.AdamW(gpt2.model.parameters(), **_ADAMW),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "zero_optimization": {"stage": 1},
                "zero_allow_untested_optimizer": True,
                # Without data_parallel, DeepSpeed 0.19.8 looks for a missing rank.
                "checkpoint": {"writer": {"type": "python", "decoupled": True, "data_parallel": "replica"}},
            },
            dist_init_required=False,
        )[0]
        engines: Any = import_module("deepspeed.runtime.checkpoint_engine")
        self._decoupled = self.engine.checkpoint_engine
        self._blocking = self.engine.checkpoint_engine = engines.TorchCheckpointEngine(self.engine._config)
        self.step()

    @property
    def state(self) -> dict[str, Any]:
        zero = self.engine.optimizer
        return {"model": self._gpt2.model, "fp32": zero.single_partition_of_fp32_groups, "optimizer": zero.optimizer}

    def step(self) -> None:
        self.engine.backward(self._gpt2.loss(self.engine))
        self.engine.step()

    def way_of_layout(self, layout: str, folder: Path) -> Way:
        use: Any = import_module("async_ckpt.integrations.deepspeed").use
        checkpoints = use(self.engine, layout)
        save = checkpoints.save_checkpoint
        self._leave_alone()

        def begin(number: int) -> object:
            self.engine.checkpoint_engine = checkpoints
            save(folder, f"save-{number}")
            return checkpoints.ended

        return Way(begin, checkpoints.wait, lambda number: folder / f"save-{number}")

    def way_of_own(self, folder: Path, *, decoupled: bool) -> Way:
        def begin(number: int) -> object:
            self.engine.checkpoint_engine = self._decoupled if decoupled else self._blocking
            self.engine.save_checkpoint(folder, f"save-{number}")
            return _Committed(self.engine) if decoupled else None

        return Way(begin, lambda: None, lambda number: folder / f"save-{number}", is_durable=False)

    def _leave_alone(self) -> None:
        """Restore the engine to its state before `use`."""
        self.engine.checkpoint_engine = self._blocking
        del self.engine.save_checkpoint, self.engine.load_checkpoint

    def close(self) -> None:
        self._decoupled.cleanup()


class _Committed(Future[None]):
    """The end of a save of the decoupled engine, which it commits before the next optimizer step."""

    def __init__(self, engine: Any) -> None:
        super().__init__()
        self._engine = engine

    def done(self) -> bool:
        return self._engine.checkpoint_engine.get_commit_info() is None

    def result(self, timeout: float | None = None) -> None:  # noqa: ARG002
        self._engine._commit_decoupled_checkpoint()


def deepspeed(setting: Setting) -> dict[str, Figure]:
    """DeepSpeed's saves. The decoupled engine comes last, since it moves tensors to shared memory permanently."""
    warnings.simplefilter("ignore")
    # As DeepSpeed's launcher sets them.
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0", "CROSS_RANK": "0", "CROSS_SIZE": "1"}
    # Otherwise, it would be compiled when the engine is created.
    ops: Any = import_module("deepspeed.ops")
    ops.__compatible_ops__["deepspeed_shm_comm"] = False
    guard: Any = import_module("async_ckpt.integrations.deepspeed.zero_guard").ZeroGuard()
    folder = setting.folder / "deepspeed"
    with _one_rank(setting.folder / "world"):
        subject = _UnderDeepSpeed(_released(_gpt2(setting)))
        plain = Saves(folder / "plain", subject.state, guard=guard(subject.engine))
        ours: dict[str, Way | Saves] = {
            layout: subject.way_of_layout(layout, folder / layout) for layout in ("deepspeed", "archive")
        }
        with plain.checkpointer:
            own = subject.way_of_own(folder / "own", decoupled=False)
            rows = _measured("deepspeed", setting, subject, {"plain": plain, "own": own, **ours})
            mode, decoupled = "decoupled", subject.way_of_own(folder / "decoupled", decoupled=True)
            why_not = _why_not(decoupled)
            costs = compared(setting, subject, {**ours, **({} if why_not else {_OWN + mode: decoupled})})
            rows |= beside_asynchronous("deepspeed", mode, costs, why_not or costs[_OWN + mode])
        subject.close()
    return rows


# --- Ray Train ------------------------------------------------------------------------------------------------------


def ray(setting: Setting) -> dict[str, Figure]:
    """Saves inside a worker of Ray Train, since only a worker may report."""
    os.environ |= {"RAY_memory_monitor_refresh_ms": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    cluster, train, trainers = (import_module(name) for name in ("ray", "ray.train", "ray.train.torch"))
    # The worker imports this module.
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    cluster.init(
        num_cpus=2,
        object_store_memory=100 * 2**20,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": path}},
    )
    setting.folder.mkdir(parents=True)
    try:
        trainers.TorchTrainer(
            _in_worker,
            train_loop_config={"setting": setting},
            scaling_config=train.ScalingConfig(num_workers=1),
            run_config=train.RunConfig(name="run", storage_path=str(setting.folder / "storage")),
        ).fit()
    finally:
        cluster.shutdown()
    rows: dict[str, Figure] = pickle.loads((setting.folder / "rows").read_bytes())
    return rows


def _in_worker(config: dict[str, Any]) -> None:
    setting: Setting = config["setting"]
    checkpointer: Any = import_module("async_ckpt.integrations.ray_train").RayCheckpointer
    train: Any = import_module("ray.train")
    run = Path(train.get_context().get_storage().experiment_fs_path)
    subject = _gpt2(setting)
    plain = Saves(setting.folder / "plain", subject.state, guard=subject.optimizer)
    with plain.checkpointer, checkpointer(guard=subject.optimizer) as ckpt:
        modes = train.CheckpointUploadMode
        ways: dict[str, Way | Saves] = {
            "plain": plain,
            "own": _way_of_ray(subject, setting.folder, run, modes.SYNC),
            _OWN + "CheckpointUploadMode.ASYNC": _way_of_ray(subject, setting.folder, run, modes.ASYNC),
            "archive": _way_of_checkpointer(ckpt, subject, run),
        }
        rows = _measured("ray", setting, subject, ways)
    (setting.folder / "rows").write_bytes(pickle.dumps(rows))


def _way_of_ray(subject: Gpt2, folder: Path, run: Path, mode: Any) -> Way:
    """A file of torch.save that Ray copies to the run's storage, as in its documentation."""
    train: Any = import_module("ray.train")

    def save(number: int) -> object:
        uploaded: Future[None] = Future()

        def upload(checkpoint: Any, name: str) -> Any:
            """Ray's own upload, followed by a signal that it is done."""
            kept = train.get_context().get_storage().persist_current_checkpoint(checkpoint, name)
            uploaded.set_result(None)
            return kept

        local = Path(tempfile.mkdtemp(dir=folder))
        torch.save(subject.state_dict(), local / "checkpoint.pt")
        train.report(
            {},
            checkpoint=train.Checkpoint.from_directory(local),
            checkpoint_dir_name=f"{mode.name}-{number}",
            checkpoint_upload_mode=mode,
            checkpoint_upload_fn=upload,
            delete_local_checkpoint_after_upload=True,
        )
        return uploaded

    return Way(save, _controller_has_heard, lambda number: run / f"{mode.name}-{number}", is_durable=False)


def _way_of_checkpointer(ckpt: Any, subject: Gpt2, run: Path) -> Way:
    def save(step: int) -> object:
        handle = ckpt.save(subject.state, step)
        ckpt.report({}, handle)
        return handle

    def wait() -> None:
        ckpt.wait()
        _controller_has_heard()

    return Way(save, wait, lambda step: run / f"step_{step:08d}")


def _controller_has_heard() -> None:
    """Wait until Ray's controller has received the last report, since the next report waits for that."""
    train: Any = import_module("ray.train")
    train.get_all_reported_checkpoints(train.CheckpointConsistencyMode.COMMITTED)


# --- verl -----------------------------------------------------------------------------------------------------------


def _under_fsdp2(
    name: str, setting: Setting, ways_of: Callable[[TransformersGpt2, Path], Mapping[str, Way]]
) -> dict[str, Figure]:
    """All figures of a framework that trains Transformers' GPT-2 under FSDP2, as verl and SkyRL do."""
    folder = setting.folder / name
    with _one_rank(setting.folder / "world"):
        subject = TransformersGpt2(setting)
        subject.optimizer.zero_grad()
        fully_shard(subject.model, mesh=init_device_mesh("cpu", (1,)))
        subject.optimizer = torch.optim.AdamW(subject.model.parameters(), **_ADAMW)
        subject.scheduler = torch.optim.lr_scheduler.LambdaLR(subject.optimizer, lambda _: 1.0)
        subject.step()
        plain = Saves(folder / "plain", subject.state, guard=subject.optimizer)
        with plain.checkpointer:
            return _measured(name, setting, subject, {"plain": plain, **ways_of(subject, folder)})


def verl(setting: Setting) -> dict[str, Figure]:
    warnings.simplefilter("ignore")
    os.environ["VERL_LOGGING_LEVEL"] = "ERROR"
    theirs: Any = import_module("verl.utils.checkpoint.fsdp_checkpoint_manager").FSDPCheckpointManager
    ours: Any = import_module("async_ckpt.integrations.verl").VerlCheckpointManager
    return _under_fsdp2(
        "verl",
        setting,
        lambda subject, folder: {
            "own": _way_of_verl(theirs, subject, folder / "own"),
            "archive": _way_of_verl(ours, subject, folder / "archive"),
        },
    )


def _way_of_verl(kind: Any, subject: TransformersGpt2, folder: Path) -> Way:
    """The saves of a manager, each into the folder of a step with the name that verl's trainer uses."""
    config: Any = import_module("verl.trainer.config").CheckpointConfig
    is_ours = kind.__module__.startswith("async_ckpt")
    manager = kind(subject.model, subject.optimizer, subject.scheduler, checkpoint_config=config(async_save=is_ours))

    def save(step: int) -> object:
        manager.save_checkpoint(str(folder / f"global_step_{step}" / "actor"), None, step)
        return manager._pending.durable if is_ours else None

    wait = manager.wait if is_ours else lambda: None
    return Way(save, wait, lambda step: folder / f"global_step_{step}", is_durable=is_ours)


# --- SkyRL ----------------------------------------------------------------------------------------------------------


def skyrl(setting: Setting) -> dict[str, Figure]:
    """Saves by the strategy of SkyRL's workers, which stalls the training during a save."""
    warnings.simplefilter("ignore")
    have_skyrl_without_gpu()
    theirs: Any = import_module("skyrl.backends.skyrl_train.distributed.fsdp_strategy").FSDPStrategy
    ours: Any = import_module("async_ckpt.integrations.skyrl").FSDPCheckpoints
    return _under_fsdp2(
        "skyrl",
        setting,
        lambda subject, folder: {
            "own": _way_of_skyrl(theirs, subject, folder / "own"),
            "async_ckpt": _way_of_skyrl(type("Strategy", (ours, theirs), {}), subject, folder / "async_ckpt"),
        },
    )


def have_skyrl_without_gpu() -> None:
    """Make SkyRL importable here. Its calls that wait for a GPU then do nothing.

    It imports flash_attn, whose kernels are not called. On Python before 3.12, pydantic refuses the TypedDict of
    `typing`.
    """
    if sys.version_info < (3, 12):
        typing.TypedDict = typing_extensions.TypedDict
    import_module("transformers.trainer")  # it looks for the real flash_attn
    for name in ("flash_attn", "flash_attn.bert_padding"):
        sys.modules.setdefault(name, ModuleType(name))
    padding: Any = sys.modules["flash_attn.bert_padding"]
    padding.pad_input = padding.unpad_input = None
    cuda: Any = torch.cuda
    cuda.synchronize = cuda.empty_cache = lambda *_: None


def _way_of_skyrl(kind: Any, subject: TransformersGpt2, folder: Path) -> Way:
    """The saves of a strategy, each into the folder of a step with the name that SkyRL's trainer uses."""
    config: Any = import_module("skyrl.train.config").FSDPConfig
    strategy = kind(config())
    strategy.world_size = 1
    strategy.print = lambda *_: None
    is_ours = hasattr(strategy, "finalize_pending_saves")

    def save(step: int) -> object:
        place = str(folder / f"global_step_{step}" / "policy")
        return strategy.save_checkpoint(subject.model, place, 0, subject.optimizer, subject.scheduler)

    wait = strategy.finalize_pending_saves if is_ours else lambda: None
    return Way(save, wait, lambda step: folder / f"global_step_{step}", is_durable=is_ours)


MEASURES: Final = {"torchtitan": torchtitan, "deepspeed": deepspeed, "ray": ray, "verl": verl, "skyrl": skyrl}
