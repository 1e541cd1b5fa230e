"""Archives of several ranks of which one lies, in thousands of ways that nobody thought of."""

import json
from collections import OrderedDict, deque
from random import Random
from typing import Any

import numpy as np
import torch
from archives import assemble, little_memory, parsed_index, read_index
from fake_ranks import distributed, standing_at
from matrix_slices import numbered
from rank_archives import load_all, restore_at, write_all
from slices import some
from test_corrupt_lies import mutate
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from async_ckpt import CheckpointError
from async_ckpt.core.format import tar
from async_ckpt.core.state.skeletons import UnknownChoiceError

LIES = some(range(4000), 3)
WAYS: list[dict[str, Any]] = [
    {},
    {"per_rank": ["own"]},
    {"per_rank": ["own"], "from_ranks": {"own": 1}},
    {"per_rank": ["m.w", "t"]},
    {"select": "m"},
]


# What the caller has asked for and cannot have.
TOLD = [
    (KeyError, "matches nothing"),
    (UnknownChoiceError, "from_ranks"),
    (ValueError, "m.w has a separate value for each rank"),
]


def state_of_rank(rank: int) -> dict[Any, Any]:
    mesh = init_device_mesh("cpu", (2,))
    tied = numbered((4,))
    return {
        "m": {
            "w": distributed(numbered((7, 3)), mesh, [Shard(0)]),
            "b": tied,
            "tied": tied,
            "blob": bytes(5000),
            "array": np.arange(3),
        },
        "o": OrderedDict(nn.BatchNorm1d(2).state_dict()),
        "own": {"seed": rank, "t": torch.tensor([rank])},
        "t": (1, deque([rank], 3), [1.5, {2}]),
        (1, "a"): 2**70,
    }


def live_of_rank(rank: int) -> dict[Any, Any]:
    with torch.no_grad():
        live = state_of_rank(rank)
        live["m"]["b"] = torch.zeros(4)
        del live["m"]["tied"]
        return live


def test_one_index_changed_at_random_is_refused_or_does_no_harm(tmp_path):
    """No other error, no memory, no code."""
    paths = write_all(tmp_path, 2, state_of_rank)
    refused = 0
    honest = [(path, path.read_bytes(), json.dumps(read_index(path)), parsed_index(path)) for path in paths]
    with standing_at(1, 2), little_memory():
        for number in LIES:
            random = Random(number)
            path, whole, told, index = honest[number % 2]
            raw = json.loads(told)
            mutate(raw["skeleton"] if random.random() < 0.5 else raw, random)
            begin, end = index.members[0].data.offset - tar.BLOCK, index.digests.data.offset - tar.BLOCK
            path.write_bytes(assemble(json.dumps(raw).encode(), whole[begin:end]))
            how = random.choice(WAYS)
            try:
                if random.random() < 2 / 3:
                    load_all(paths, **how)
                else:
                    restore_at(1, 2, paths, live_of_rank(1), strict=False, **how)
            except CheckpointError:
                refused += 1
            except Exception as error:
                if not any(type(error) is kind and words in str(error) for kind, words in TOLD):
                    raise AssertionError(f"{error!r} from {how} of {json.dumps(raw)}") from error
            path.write_bytes(whole)
    assert refused > len(LIES) / 4
