"""Checkpoints of any format, as named items or as a state.

- `sources.py` opens a place: an archive, a step, a run, safetensors, a folder of torch.distributed.checkpoint, a file
  of torch.
- `torch_files.py` reads files of torch.
- `named_items.py` takes a state apart into items with names, and the containers around them.
"""
