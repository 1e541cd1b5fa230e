"""Models of Transformers that are spread over ranks by a `tp_plan`: saved in a loop of one's own, not by the Trainer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_worlds import Worlds

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import LlamaConfig, LlamaForCausalLM

WARM = ("trainers",)


@pytest.fixture
def llama(tmp_path) -> Path:
    torch.manual_seed(3)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    tokens = {"vocab_size": 64, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **shape, **tokens)).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


_LOOP = """
import async_ckpt
from trainers import *
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({llama!r}, tp_plan="auto")
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
state, losses = {{"model": model, "optimizer": optimizer}}, []
with async_ckpt.AsyncCheckpointer({folder!r}) as checkpointer:
    begin = checkpointer.restore(state, step={resumed}) if {resumed} else 0
    for step in range(begin, 4):
        rows = torch.stack([row["input_ids"] for row in sequences()[4 * step : 4 * step + 4]])
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if not {resumed}:
            checkpointer.save(state, step=step + 1)
here.tell({{"losses": losses, "spread": any(type(one).__name__ == "DTensor" for one in model.parameters())}})
"""


def ran(worlds: Worlds, size: int, llama: Path, folder: Path, resumed: int = 0) -> list[Any]:
    told = [
        end.told[-1] for end in worlds.run(size, _LOOP.format(llama=str(llama), folder=str(folder), resumed=resumed))
    ]
    assert [one["spread"] for one in told] == [size > 1] * size
    return [one["losses"] for one in told]


def test_a_model_with_a_tp_plan_is_resumed_bit_for_bit_also_without_one(worlds, llama, tmp_path):
    whole = ran(worlds, 2, llama, tmp_path / "run")
    assert ran(worlds, 2, llama, tmp_path / "run", resumed=2) == [losses[2:] for losses in whole]
    (alone,) = ran(worlds, 1, llama, tmp_path / "run", resumed=2)
    assert alone == pytest.approx(whole[0][2:], rel=1e-5)


_REFUSED = """
from trainers import *
from accelerate import ParallelismConfig
from transformers import AutoModelForCausalLM, Trainer
from async_ckpt.integrations.transformers import make_async
ParallelismConfig._validate_accelerator = lambda *_: None  # accelerate refuses it on processors itself
model = AutoModelForCausalLM.from_pretrained({llama!r}, tp_plan="auto")
# Of such a model, the Trainer saves no optimizer.
trainer = trainer_of(Trainer, {folder!r}, model=lambda: model, save_only_model=True)
try:
    make_async(trainer)
except NotImplementedError as error:
    here.tell(str(error))
"""


def test_the_trainer_refuses_a_model_with_a_tp_plan(worlds, llama, tmp_path):
    why = "a model with a tp_plan is not supported; save it by an AsyncCheckpointer in a loop of your own"
    for end in worlds.run(2, _REFUSED.format(llama=str(llama), folder=str(tmp_path / "run"))):
        assert end.told == [why]
