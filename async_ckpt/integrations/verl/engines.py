"""verl's FSDP engines with our checkpoint manager, registered in verl under a vendor's name.

In: verl's own engines. Out: the same engines with another manager. Knows nothing of: the content of checkpoints.

verl imports this module on every worker (`VERL_USE_EXTERNAL_MODULES=async_ckpt.integrations.verl.engines`), and uses
these engines if `VERL_ENGINE_VENDOR=async_ckpt` is set.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

from ..common.framework_checks import require, require_names
from .checkpoint_manager import VerlCheckpointManager

VENDOR: Final = "async_ckpt"
_BACKENDS: Final = ["fsdp", "fsdp2"]
_DEVICES: Final = ["cuda", "npu"]

_verl: Final = require("verl")
_registry: Final[Any] = import_module("verl.workers.engine").EngineRegistry
_engines: Final[Any] = import_module("verl.workers.engine.fsdp.transformer_impl")
require_names(_verl, _engines.FSDPEngineWithLMHead, ["initialize", "save_checkpoint", "get_per_tensor_param"])


class SavingInBackground:
    """A first base class, before an engine of verl, that replaces its checkpoint manager by ours."""

    checkpoint_manager: Any
    optimizer_config: Any
    is_param_offload_enabled: bool
    is_optimizer_offload_enabled: bool

    def initialize(self) -> None:
        """Build the model as the engine does, and replace its manager."""
        super().initialize()  # type: ignore[misc]
        theirs = self.checkpoint_manager
        self.checkpoint_manager = VerlCheckpointManager(
            model=theirs.model,
            optimizer=theirs.optimizer,
            lr_scheduler=theirs.lr_scheduler,
            processing_class=theirs.processing_class,
            checkpoint_config=theirs.checkpoint_config,
            # Offloading moves them to the host and back between two steps.
            moves_state=self.is_param_offload_enabled or self.is_optimizer_offload_enabled,
        )

    def save_checkpoint(
        self,
        local_path: str | None,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **options: Any,
    ) -> None:
        """Save as the engine does. The save of the last step is durable on return, since Ray then ends the workers."""
        super().save_checkpoint(local_path, hdfs_path, global_step, max_ckpt_to_keep, **options)  # type: ignore[misc]
        last_step = getattr(self.optimizer_config, "total_training_steps", None)
        if last_step is not None and 0 < last_step <= global_step:
            self.checkpoint_manager.wait_durable()

    def get_per_tensor_param(self, *args: Any, **options: Any) -> Any:
        """The weights for a rollout. The trainer requests them only after its save is complete."""
        self.checkpoint_manager.trainer_went_on()
        return super().get_per_tensor_param(*args, **options)  # type: ignore[misc]


@_registry.register(model_type="language_model", backend=_BACKENDS, device=_DEVICES, vendor=VENDOR)
class LanguageModelEngine(SavingInBackground, _engines.FSDPEngineWithLMHead):  # type: ignore[misc]
    """verl's FSDP engine for an actor or a reference model, with our checkpoint manager."""


@_registry.register(model_type="value_model", backend=_BACKENDS, device=_DEVICES, vendor=VENDOR)
class ValueModelEngine(SavingInBackground, _engines.FSDPEngineWithValueHead):  # type: ignore[misc]
    """verl's FSDP engine for a critic, with our checkpoint manager."""
