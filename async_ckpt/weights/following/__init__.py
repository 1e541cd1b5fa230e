"""The sidecar of an engine: it pulls each new version into a folder, and has the engine load it.

- `follower.py`: `follow`, and the loop from version to version.
- `rollout_engines.py`: how each engine is told: `SGLang`, `VLLM`, `Post`, `Program`.
- `web.py`: a request with one deadline for all of it.
- `shared_folder.py`: the folder as several sidecars of a host share it: turns, and a record for each engine.
- `health.py`: the lines and the status file that say how it goes.
"""

from .rollout_engines import VLLM, Engine, Loading, Post, Program, SGLang
from .web import EngineError

__all__ = ["VLLM", "Engine", "EngineError", "Loading", "Post", "Program", "SGLang"]
