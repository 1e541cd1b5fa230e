"""The sidecar of an engine: it pulls each new version into a folder, and has the engine load it.

- `follower.py`: `follow`, and its loop from version to version.
- `rollout_engines.py`: how each engine is notified: `SGLang`, `VLLM`, `Post`, `Program`.
- `web.py`: HTTP requests with one deadline for connection, request and reply.
- `shared_folder.py`: the folder that several sidecars of a host share: locks, and a record for each engine.
- `health.py`: the log lines and the status file about a sidecar.
"""

from .rollout_engines import VLLM, Engine, Loading, Post, Program, SGLang
from .web import EngineError

__all__ = ["VLLM", "Engine", "EngineError", "Loading", "Post", "Program", "SGLang"]
