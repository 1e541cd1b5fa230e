"""Staging for torch.distributed.checkpoint.async_save from a device: on the simulation, and with `-m gpu` on a CUDA device."""

from __future__ import annotations

from contextlib import closing

import torch
from states import MIB

from async_ckpt.integrations.dcp import PinnedStager


def test_on_a_device_it_is_ordered_between_what_training_does_before_and_after(accelerator):
    tensor = torch.zeros(MIB // 4, device=accelerator.kind)
    with closing(PinnedStager()) as stager:
        with accelerator.ahead():
            tensor.fill_(3)
            staged = stager.stage({"w": tensor})
            tensor.fill_(-1)
        found = staged.result(60)["w"]
        assert found.device.type == "cpu"
        assert bool((found == 3).all())
