"""Plug-ins for other projects, imported on use.

- `transformers/`: a base class for the Trainer of Transformers; `accelerate.py`: `save_state` and `load_state`.
- `lightning/`: a plugin, a callback and strategies for Lightning's Trainer and Fabric.
- `common/`: `frameworks.py`, `folders.py`, `fsdp_files.py`, `joint_errors.py`, `run_folders.py`, `small_files.py`,
  `step_guard.py`, `training_archive.py`: what these share.
- `skyrl.py`: the checkpoint calls of SkyRL's Tinker backend and of its FSDP strategy.
- `dcp/`: storage writer, storage reader, stager and converters for torch.distributed.checkpoint.
"""
