"""A rollout process: it generates, and takes over new weights between two generations, without a restart.

In: a folder with versions. Out: one line of JSON per event on stdout. Knows nothing of: the training.

    python -m examples.rollout demo_out/rollout
"""

from __future__ import annotations

import argparse
import threading
import time
from pathlib import Path
from typing import Any

import torch

import async_ckpt
from examples.train_rollout import PROMPT, digest_of_logits, new_model, prompt_tokens, tell

NUM_TOKENS = 40


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("--until", type=int, help="the version to end with; without it, it goes on")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = new_model()
    tell("ready")
    follow(arguments.root, model, arguments.until)


def follow(root: Path, model: Any, until: int | None) -> None:
    """The example: all that `async_ckpt` adds to a loop that generates."""
    with async_ckpt.Subscriber(root / "weights") as subscriber:
        version = None
        while version is None or version != until:
            newest = subscriber.latest()
            if newest is None:
                threading.Event().wait(0.05)
                continue
            if newest != version:
                report = subscriber.pull(model, newest)
                version = report.version
                tell(
                    "swapped", version=version, base=report.base, num_versions=report.num_versions, num_bytes=report.num_bytes, seconds=report.seconds,
                    at=time.time(), logits=digest_of_logits(model), text=PROMPT + generate(model),
                )  # fmt: skip
            else:
                generate(model)


@torch.no_grad()
def generate(model: Any) -> str:
    """What the model goes on with, the likeliest byte at a time."""
    made = model.generate(
        prompt_tokens(), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return bytes(made[0, len(PROMPT) :].tolist()).decode(errors="replace")


if __name__ == "__main__":
    main()
