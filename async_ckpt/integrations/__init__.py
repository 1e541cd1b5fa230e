"""Plug-ins for other projects, imported on use.

- `lightning/`: a plugin, a callback and strategies for Lightning's Trainer and Fabric.
- `skyrl.py`: the checkpoint calls of SkyRL's Tinker backend and of its FSDP strategy.
- `dcp/`: storage writer, storage reader, stager and converters for torch.distributed.checkpoint.
"""
