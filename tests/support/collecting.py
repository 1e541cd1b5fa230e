"""A data set whose every item is drawn behind a garbage collection, in whichever process draws it."""

import gc
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset


class Collecting(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        gc.collect()
        return index


def epochs(context: str, num_epochs: int = 2) -> Iterator[list[Any]]:
    """The batches of each epoch, by two workers that are started anew."""
    for _ in range(num_epochs):
        loader = DataLoader(Collecting(), batch_size=2, num_workers=2, multiprocessing_context=context)
        yield [batch.tolist() for batch in loader]


def draw(context: str) -> None:
    for batches in epochs(context):
        assert sorted(index for batch in batches for index in batch) == [*range(8)]
