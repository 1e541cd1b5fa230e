"""The names of dtypes: torch's own, and numpy's descriptions of theirs.

In: dtypes, or names from an untrusted file. Out: names, or dtypes. Knows nothing of: tensors, values.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Final

import torch

from ..spec import Json

# No dtype has as many fields. numpy takes minutes to make a dtype of a few megabytes of nested fields.
_MAX_FIELDS: Final = 10_000


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a torch dtype, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The torch dtype of that name; raises ValueError when this torch has none."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"this version of torch has no dtype {name!r:.50}; install a newer one to load it")
    return dtype


def is_describable(dtype: Any) -> bool:
    """True if arrays of this dtype are stored as their bytes: it has no Python objects, and not too many fields."""
    return not dtype.hasobject and _num_fields(dtype) <= _MAX_FIELDS


def numpy_dtype(descr: Json) -> Any:
    """The dtype of a .npy description. Raises ValueError for one with Python objects."""
    import numpy

    dtype = numpy.lib.format.descr_to_dtype(_tuples(descr, itertools.count()))
    if dtype.hasobject:
        raise ValueError("a numpy array of Python objects outside of objects.pt")
    return dtype


def _num_fields(dtype: Any) -> int:
    """The number of fields of a structured dtype, including nested fields and gaps."""
    if dtype.subdtype is not None:
        return _num_fields(dtype.subdtype[0])
    return sum(2 + _num_fields(dtype.fields[name][0]) for name in dtype.names or ())


def _tuples(descr: Json, fields: Iterator[int]) -> Any:
    """The description of a structured dtype with its tuples, which JSON made lists. `fields` counts its fields."""
    if isinstance(descr, str):
        if len(descr) > 1000:
            raise ValueError(f"the dtype {descr:.50}… is too long")
        return descr
    tuples = []
    for name, inner, *shape in descr:
        if next(fields) > _MAX_FIELDS:
            raise ValueError(f"a dtype of more than {_MAX_FIELDS:,} fields")
        tuples.append((tuple(name) if isinstance(name, list) else name, _tuples(inner, fields), *map(tuple, shape)))
    return tuples
