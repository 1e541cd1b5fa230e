"""Calls around checkpoints: functions that write files, folders, and models, with the archives of this library.

- `wrap.py`: `wrap`; `arguments.py`: the tensors in a call's arguments; `destination.py`: the argument that is the path.
- `pack.py`: `pack`; `unpack.py`: `unpack` and `files.extract`; `streams.py`: file objects over stored objects.
- `export.py`: `export_hf`; `hf_weights.py`: names and small files; `shards.py`: safetensors files; `hf_folder.py`:
  the folder.
- `spread.py`: `export_hf` of a model that is sharded over ranks.
- `merge.py`: `merge`, one archive from those of several ranks.
"""
