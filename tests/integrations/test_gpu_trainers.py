"""The Trainer of Transformers, and accelerate, on a GPU: trainings go on bit for bit, under FSDP2 and fp16, too."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

SUPPORT = Path(__file__).parent.parent / "support"

# One process, as torchrun would start it: accelerate takes FSDP on accelerators of several processes, or of one like this.
_TRAINER = """
kind, folder, resume, options, fsdp = sys.argv[1], sys.argv[2], sys.argv[3] or None, json.loads(sys.argv[4]), sys.argv[5]
from trainers import *
from transformers import Trainer
options = {"use_cpu": False, **options}
if fsdp:
    wrapped = {"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"], "state_dict_type": fsdp}
    options |= {"fsdp": True, "fsdp_config": wrapped}
trainer = trainer_of({"Trainer": Trainer, "Files": Files, "Archives": Archives}[kind], folder, model=untied, **options)
trainer.train(resume_from_checkpoint=resume)
print(json.dumps(losses(trainer)))
"""
_ACCELERATE = """
layout, folder, load, precision, fsdp = sys.argv[1:]
from accelerate import FullyShardedDataParallelPlugin
from accelerated import *
plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False)
options = {"mixed_precision": precision, "fsdp_plugin": plugin if fsdp else None}
training = Training(folder, dropout=0.1, on=options)
with AsyncState(training.accelerator, layout) as state:
    if load:
        state.load_state(load)
    losses = training.run(STEPS - training.counted.number, None if load else state.save_state)
print(json.dumps(losses))
"""


def ran(script: str, *arguments: Any) -> Any:
    """What a training has printed last."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path])}
    environment |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} | (ranks if arguments[-1] else {})
    head = "import json, sys, warnings\nimport torch\nwarnings.simplefilter('ignore')\n"
    head += "torch.use_deterministic_algorithms(True, warn_only=True)\n"
    command = [sys.executable, "-c", head + textwrap.dedent(script), *map(str, arguments)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.parametrize("options", [{}, {"fp16": True}, {"bf16": True}], ids=["float", "fp16", "bf16"])
@pytest.mark.parametrize("kind", ["Files", "Archives"])
def test_a_trainer_goes_on_bit_for_bit(tmp_path, kind, options):
    pytest.importorskip("transformers", reason="Transformers is not installed")
    plain = ran(_TRAINER, "Trainer", tmp_path / "plain", "", json.dumps(options), "")
    assert ran(_TRAINER, kind, tmp_path / "ours", "", json.dumps(options), "") == plain
    folder = tmp_path / "ours" / "checkpoint-4"
    assert ran(_TRAINER, kind, tmp_path / "again", folder, json.dumps(options), "") == plain
    if kind == "Files":
        assert ran(_TRAINER, "Trainer", tmp_path / "back", folder, json.dumps(options), "") == plain


@pytest.mark.parametrize("form", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
@pytest.mark.parametrize("kind", ["Files", "Archives"])
def test_a_trainer_under_fsdp2_goes_on_bit_for_bit(tmp_path, kind, form):
    pytest.importorskip("transformers", reason="Transformers is not installed")
    whole = ran(_TRAINER, kind, tmp_path / "ours", "", "{}", form)
    assert ran(_TRAINER, kind, tmp_path / "again", tmp_path / "ours" / "checkpoint-4", "{}", form) == whole


@pytest.mark.parametrize(
    ("layout", "precision", "fsdp"),
    [("archive", "no", ""), ("accelerate", "no", ""), ("archive", "fp16", ""), ("archive", "no", "fsdp")],
)
def test_accelerate_goes_on_bit_for_bit(tmp_path, layout, precision, fsdp):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    whole = ran(_ACCELERATE, layout, tmp_path / "ours", "", precision, fsdp)
    folder = tmp_path / "ours" / "checkpoints" / "checkpoint_1"
    assert ran(_ACCELERATE, layout, tmp_path / "again", folder, precision, fsdp) == whole[4:]
