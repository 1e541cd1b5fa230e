"""Plug-ins for other projects, imported on use.

- `transformers/`: a base class for the Trainer of Transformers; `accelerate.py`: `save_state` and `load_state`.
- `lightning/`: a plugin, a callback and strategies for Lightning's Trainer and Fabric.
- `deepspeed/`: DeepSpeed's engine, with files as it writes them, or archives.
- `megatron.py`: the strategies of Megatron-Core.
- `torchtitan.py`: a checkpoint manager for torchtitan; `ray_train.py`: a checkpointer for the workers of Ray Train.
- `common/`: code that the integrations of trainers share.
- `skyrl/`: base classes for SkyRL's trainers, workers and FSDP strategy; the checkpoint calls of its Tinker backend.
- `verl/`: verl's checkpoint manager for FSDP, and engines that have it; `verl_weights/`: a checkpoint engine for verl.
- `vllm/`: a source, transfer engines and a model loader for vLLM; `sglang.py`: weights for SGLang's engines;
  `parameter_server.py`: for checkpoint-engine's server.
- `wandb.py`, `mlflow.py`, `trackio.py`, `tensorboard.py`: experiment trackers, for `AsyncCheckpointer.track`.
- `prometheus.py`, `opentelemetry.py`: metrics and traces; `metric_table.py` has their names.
- `dcp/`: storage writer, storage reader, stager and converters for torch.distributed.checkpoint.
"""
