"""Plug-ins for other projects, imported on use.

- `transformers/`: a base class for the Trainer of Transformers; `accelerate.py`: `save_state` and `load_state`.
- `lightning/`: a plugin, a callback and strategies for Lightning's Trainer and Fabric.
- `deepspeed/`: DeepSpeed's engine, with files as it writes them, or archives.
- `torchtitan.py`: a checkpoint manager for torchtitan; `ray_train.py`: a checkpointer for the workers of Ray Train.
- `common/`: what these share.
- `skyrl/`: base classes for SkyRL's trainers, workers and FSDP strategy; the checkpoint calls of its Tinker backend.
- `dcp/`: storage writer, storage reader, stager and converters for torch.distributed.checkpoint.
"""
