"""The engines that `follow` tells of new versions, and what they raise.

In: nothing. Out: names of the sidecar, where users import them. Knows nothing of: how engines are told.
"""

from .weights.following import VLLM, Engine, EngineError, Loading, Post, Program, SGLang

__all__ = ["VLLM", "Engine", "EngineError", "Loading", "Post", "Program", "SGLang"]
