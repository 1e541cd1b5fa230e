"""A training that rollout engines follow: one snapshot of each step is both its checkpoint and its published version.

In: a folder. Out: one line of JSON per event on stdout. Knows nothing of: who generates with the weights.

    python -m examples.train_rollout demo_out/rollout

Run it again after a Ctrl-C or a SIGKILL: it goes on from the last commit, and begins with an anchor.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

import async_ckpt
from examples.gpt import BYTE_VALUES, Sizes, batches

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when it is imported

from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as hf_logging

EVERY = 10
SIZES = Sizes(context=64, batch=4)
PROMPT = "def "


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("--steps", type=int, default=120)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if rank_and_world()[0] != 0:  # the others would train with it; one of them publishes
        return
    train(arguments.root, arguments.steps)


def train(root: Path, steps: int) -> None:
    """The example: all that `async_ckpt` adds to a loop."""
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    state = {"model": model, "optimizer": optimizer, "rng": async_ckpt.RngState()}
    draw = batches(SIZES)
    with (
        async_ckpt.AsyncCheckpointer(root / "run", keep=2, ranks=(0, 1)) as ckpt,
        # Killed between the two, or set back, a training comes to steps again that are published.
        async_ckpt.Publisher(
            root / "weights", anchor_every=5, keep=4, on_rollback="retire", local=sys.platform == "linux"
        ) as publisher,
    ):
        start = ckpt.restore(state) or 0
        for step in range(start + 1, steps + 1):
            loss = take_step(model, optimizer, draw())
            if step % EVERY == 0:
                with async_ckpt.snapshot(state, guard=optimizer) as snap:
                    saved = ckpt.save(snap, step)
                    published = publisher.publish(snap["model"], version=step)
                told = {"logits": digest_of_logits(model), "loss": round(loss, 3)}
                saved.result()  # only to tell of it: a training does not wait
                report = published.result()
                tell("published", version=step, num_bytes=report.num_bytes, at=time.time(), **told)


def new_model() -> Any:
    """A Llama of 1.4 million parameters, whose tokens are bytes. It has learned nothing yet."""
    quiet: Any = hf_logging.set_verbosity_error
    quiet()
    config = LlamaConfig(
        vocab_size=BYTE_VALUES, hidden_size=160, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=256, bos_token_id=0, eos_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def take_step(model: Any, optimizer: torch.optim.Optimizer, text: torch.Tensor) -> float:
    loss = model(text, labels=text).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


@torch.no_grad()
def digest_of_logits(model: Any) -> str:
    """One hash over every bit of what the model says to the prompt: equal only for the very same weights."""
    logits = model(prompt_tokens()).logits
    return hashlib.sha256(logits.numpy().tobytes()).hexdigest()[:16]


def prompt_tokens() -> torch.Tensor:
    return torch.tensor([list(PROMPT.encode())])


def rank_and_world() -> tuple[int, int]:
    """From the variables that a launcher sets. Some leave them empty, which means that there is no launcher."""
    rank, world = (os.environ.get(name, "").strip() for name in ("RANK", "WORLD_SIZE"))
    if not rank or not world:
        return 0, 1
    try:
        numbers = int(rank), int(world)
    except ValueError:
        raise SystemExit(f"RANK={rank!r} and WORLD_SIZE={world!r} should be numbers; unset both") from None
    if not 0 <= numbers[0] < numbers[1]:
        raise SystemExit(f"RANK={rank} is not one of WORLD_SIZE={world} ranks; unset both")
    return numbers


def tell(event: str, **facts: object) -> None:
    print(json.dumps({"event": event, **facts}), flush=True)


if __name__ == "__main__":
    main()
