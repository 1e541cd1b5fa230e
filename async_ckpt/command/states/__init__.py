"""Checkpoints of any format, as named items or as a state.

- `sources.py` opens a place: an archive, a step, a run, safetensors, a folder of torch.distributed.checkpoint, or a file
  of torch, which `torch_files.py` reads.
- `named_items.py` takes a state apart into items with names, and the containers around them.
"""
