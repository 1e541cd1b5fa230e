"""A training by the Trainer of Transformers, whose checkpoints are written in the background; run again, it goes on.

In: a folder, and how many steps. Out: checkpoints there, and one line of JSON per event. Knows nothing of: the files.

    python -m examples.train_trainer runs/trainer --steps 40
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from async_ckpt.integrations.transformers import make_async


class Told(TrainerCallback):
    """Prints losses, and the figures of saves, as lines of JSON."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:  # noqa: ARG002
        print(json.dumps({"step": state.global_step, **logs}), flush=True)


def texts(number: int = 64) -> list[dict[str, torch.Tensor]]:
    """Tokens that the model can learn: each follows from the one before."""
    starts = torch.arange(number) % 61
    rows = [(start + torch.arange(32)) % 61 for start in starts]
    return [{"input_ids": row, "labels": row} for row in rows]


def tiny_model() -> GPT2LMHeadModel:
    config = GPT2Config(n_layer=2, n_head=2, n_embd=64, vocab_size=64, n_positions=32, bos_token_id=62, eos_token_id=63)
    return GPT2LMHeadModel(config)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-steps", type=int, default=10)
    parser.add_argument("--layout", choices=["transformers", "archive"], default="transformers")
    given = parser.parse_args(arguments)
    set_seed(0)
    trainer = Trainer(
        model=tiny_model(),
        args=TrainingArguments(
            given.folder,
            max_steps=given.steps,
            save_steps=given.save_steps,
            save_total_limit=2,
            logging_steps=1,
            lr_scheduler_type="constant",
            learning_rate=1e-3,
            disable_tqdm=True,
            report_to=[],
            use_cpu=True,
        ),
        train_dataset=texts(),
        callbacks=[Told()],
    )
    make_async(trainer, given.layout)  # the line that makes checkpoints asynchronous
    newest = get_last_checkpoint(given.folder) if os.path.isdir(given.folder) else None  # type: ignore[no-untyped-call]
    trainer.train(resume_from_checkpoint=newest)


if __name__ == "__main__":
    main(sys.argv[1:])
