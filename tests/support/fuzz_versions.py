"""Published versions that were damaged, or made to do harm: a pull has the weights that were published, or is a CheckpointError.

`python tests/support/fuzz_versions.py 5000` pulls so many hostile versions, `--seed 7` begins elsewhere; `--bits` flips every bit
of two indices. `tests/weights/publishing/test_versions_that_lie.py` tries some of both. A scenario is a function of its number.
"""

import argparse
import copy
import json
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from slices import some

from async_ckpt import CheckpointError, Publisher, Subscriber
from async_ckpt.weights.delta import INDEX, folder_of, seal

SHAPES = {"embed.weight": (6, 4), "layer.weight": (4, 4), "layer.bias": (4,), "norm": (3,)}
ODD: list[Any] = [
    None, True, 0, -1, 2**70, 1e308, "", "x", "000001", "../../etc/passwd", "/etc/passwd", ".weight_sync/state.json", "a\0b",
    "\ud800", "C:\\x", "model.safetensors", "xor", "overwrite", "zstd", "0" * 32, [], {}, [[]], {"a": {}}, "sub/x.safetensors",
    "x" * 5000, INDEX, "config.json",
]  # fmt: skip


class Model(torch.nn.Module):
    """Tensors of the names and shapes that are published."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(6, 4)
        self.layer = torch.nn.Linear(4, 4)
        self.norm = torch.nn.Parameter(torch.zeros(3))


class Stage:
    """A root with an anchor and two deltas, and a folder that has the first of these, to be copied for each try."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.root, self.local = folder, folder / "root", folder / "local"
        state = {name: torch.randn(shape) for name, shape in SHAPES.items()}
        self.were: dict[int, dict[str, torch.Tensor]] = {}
        config = folder / "config"
        config.mkdir()
        (config / "config.json").write_text('{"model_type": "none"}')
        with Publisher(self.root) as publisher:
            for version in (1, 2, 3):
                self.were[version] = {name: tensor.clone() for name, tensor in state.items()}
                publisher.publish(state, version, config).result()
                for tensor in state.values():
                    tensor.view(-1)[version % 3] += 1
        Subscriber(self.root).pull(self.local, 1)
        self.outside = folder / "outside.safetensors"
        shutil.copyfile(self.local / "model.safetensors", self.outside)
        self._sentinel = self.outside.read_bytes()

    def fresh(self) -> Path:
        """A copy of the root; copies of before are gone."""
        shutil.rmtree(self.folder / "try", ignore_errors=True)
        shutil.copytree(self.root, self.folder / "try" / "root", symlinks=True)
        shutil.copytree(self.local, self.folder / "try" / "local")
        return self.folder / "try" / "root"

    def outcomes(self, root: Path, version: int | None) -> Iterator[str]:
        """How pulls end: into a folder that has the first version, into a new one, and into a module."""
        for into in (root.with_name("local"), root.with_name("new"), Model()):
            before = self._weights_in(into)
            yield self._outcome(root, into, before, version)

    def _outcome(self, root: Path, into: Any, before: Any, version: int | None) -> str:
        try:
            report = Subscriber(root).pull(into, version)
        except CheckpointError as error:
            found = self._weights_in(into)
            known = [before, *self.were.values()]
            return type(error).__name__ if any(_same(found, one) for one in known) else "harmed"
        except Exception as error:
            return f"raw {error!r:.200}"
        else:
            wanted = self.were.get(report.version)
            return "right" if wanted is not None and _same(self._weights_in(into), wanted) else "silent"
        finally:
            if self.outside.read_bytes() != self._sentinel or {*os.listdir(self.folder / "try")} - {
                "root", "local", "new",
            }:  # fmt: skip
                raise AssertionError("something outside of the folder has changed")

    def _weights_in(self, into: Any) -> dict[str, torch.Tensor] | None:
        if isinstance(into, torch.nn.Module):
            return {name: tensor.clone() for name, tensor in into.state_dict().items()}
        path = into / "model.safetensors"
        return load_file(path) if path.exists() else None


def _same(found: Any, wanted: Any) -> bool:
    if found is None or wanted is None:
        return found is wanted
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


# --- every bit ----------------------------------------------------------------------------------------------------


def flip_bits(stage: Stage, one_in: int = 1, *, by_others: bool = False) -> Counter[str]:
    """The outcomes of flipping each bit of the indices of an anchor and of a delta, one in `one_in`, with a publisher's mark in the root and
    without; or of indices that others have written.
    """
    counts: Counter[str] = Counter()
    for version in (1, 2):
        root = stage.fresh()
        for number in (1, 2, 3):
            if by_others:
                _as_others(root / folder_of(number) / INDEX)
        if by_others:
            (root / "publisher.json").unlink()
        path = root / folder_of(version) / INDEX
        data = path.read_bytes()
        for at in some(range(8 * len(data)), one_in):
            flipped = bytearray(data)
            flipped[at // 8] ^= 1 << at % 8
            path.write_bytes(flipped)
            shutil.rmtree(root.with_name("new"), ignore_errors=True)
            shutil.rmtree(root.with_name("local"))
            shutil.copytree(stage.local, root.with_name("local"))
            for outcome in stage.outcomes(root, version):
                counts[outcome] += 1
                if outcome in ("silent", "harmed") or outcome.startswith("raw"):
                    print(f"{outcome}: bit {at} of version {version}: {bytes(flipped)!r:.300}")
    return counts


def _as_others(path: Path) -> None:
    told = json.loads(path.read_text())
    told["metadata"].pop("async_ckpt")
    path.write_text(json.dumps(told))


# --- hostile versions ---------------------------------------------------------------------------------------------


def run(numbers: range, *, seed: int = 0, says: bool = False) -> Counter[str]:
    """The outcomes of so many hostile versions."""
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        stage = Stage(Path(folder))
        for number in numbers:
            draw = random.Random(f"{seed}/{number}")
            root = stage.fresh()
            what = harm(draw, root)
            for outcome in stage.outcomes(root, draw.choice([None, 1, 2, 3])):
                counts[outcome] += 1
                if outcome in ("silent", "harmed") or outcome.startswith("raw"):
                    print(f"{outcome}: scenario {number}: {what}")
            if says and number % 500 == 499:
                print(number + 1, dict(counts), flush=True)
    return counts


def harm(draw: random.Random, root: Path) -> str:
    """Change a root as somebody would who wants to see a pull go wrong; what was done."""
    done = []
    if draw.random() < 0.2:
        (root / "publisher.json").unlink()
        done.append("no publisher.json")
    for _ in range(draw.choice([1, 1, 2, 3])):
        folder = root / folder_of(draw.choice([1, 2, 2, 3]))
        how = draw.choice([harm_index, harm_index, harm_index, harm_header, harm_file])
        done.append(f"{folder.name}: {how(draw, folder)}")
    return "; ".join(done)


def harm_index(draw: random.Random, folder: Path) -> str:
    path = folder / INDEX
    try:
        told = json.loads(path.read_bytes() if path.is_file() else b"")
    except (ValueError, RecursionError):
        return "no index left"
    done = [mutated(draw, told) for _ in range(draw.choice([1, 1, 2, 4]))]
    if draw.random() < 0.1:
        told = draw.choice([[], {}, None, {"weight_map": {}}, {"metadata": {}}, [told], {"weight_map": told}])
        done.append("replaced")
    data = json.dumps(told).encode()
    ours = told.get("metadata") if isinstance(told, dict) else None
    ours = ours.get("async_ckpt") if isinstance(ours, dict) else None
    if isinstance(ours, dict) and "digest" in ours and draw.random() < 0.6:
        ours["digest"] = "0" * 32
        data = json.dumps(told).encode()
        if data.count(b'"digest": "' + b"0" * 32 + b'"') == 1:
            data = seal(data)
            done.append("sealed again")
    path.write_bytes(data)
    return ", ".join(done)


def mutated(draw: random.Random, told: Any) -> str:
    """Change one place of a tree of JSON."""
    places = list(_places(told))
    if not places:
        return "nothing"
    holder, key = draw.choice(places)
    how = draw.choice(["drop", "odd", "rename", "swap", "nest", "copy"])
    if how == "drop":
        del holder[key]
    elif how == "odd":
        holder[key] = copy.deepcopy(draw.choice(ODD))
    elif how == "rename" and isinstance(holder, dict):
        holder[draw.choice([f"{key}x", "metadata", "weight_map", "async_ckpt", "\ud800", "delta_encoding"])] = (
            holder.pop(key)
        )
    elif how == "nest":
        holder[key] = {"a": holder[key]}
    else:
        other, at = draw.choice(places)
        mine, theirs = copy.deepcopy(holder[key]), copy.deepcopy(other[at])
        holder[key] = theirs
        if how == "swap" and at in other if isinstance(other, dict) else how == "swap" and at < len(other):
            other[at] = mine
    return f"{how} {key!r:.40}"


def _places(told: Any) -> Iterator[tuple[Any, Any]]:
    inner = told.items() if isinstance(told, dict) else enumerate(told) if isinstance(told, list) else ()
    for key, value in list(inner):
        yield told, key
        yield from _places(value)


def harm_header(draw: random.Random, folder: Path) -> str:
    """Change what a file of tensors says of them; never so that the same bytes are another model's."""
    path = _weights(draw, folder)
    if path is None:
        return "no weights left"
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    try:
        told = json.loads(data[8:begin])
    except (ValueError, RecursionError):
        return "no header left"
    done = mutated(draw, told)
    head = json.dumps(told).encode()
    length = draw.choice([len(head), len(head), len(head), len(head) + 8, 2**40, 0])
    path.write_bytes(length.to_bytes(8, "little") + head + data[begin:])
    return f"header of {path.name}: {done}"


def harm_file(draw: random.Random, folder: Path) -> str:
    paths = [path for path in sorted(folder.iterdir()) if path.is_file()]
    if not paths:
        return "nothing left"
    path = draw.choice(paths)
    how = draw.choice(["delete", "cut", "extend", "flip", "other", "folder", "link", "empty", "pipe"])
    if how == "cut":
        os.truncate(path, draw.randrange(path.stat().st_size + 1))
    elif how == "extend":
        with path.open("ab") as file:
            file.write(draw.randbytes(draw.choice([1, 8, 100])))
    elif how == "flip" and path.stat().st_size:
        data = bytearray(path.read_bytes())
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "other":
        shutil.copyfile(draw.choice(paths), path.with_name("x"))
        os.replace(path.with_name("x"), path)
    else:
        path.unlink()
        if how == "folder":
            path.mkdir()
        elif how == "link":
            path.symlink_to(draw.choice(["/nowhere", path.name, *map(str, paths)]))
        elif how == "pipe":
            os.mkfifo(path)
    return f"{how} {path.name}"


def _weights(draw: random.Random, folder: Path) -> Path | None:
    found = [path for path in sorted(folder.glob("*.safetensors")) if path.is_file() and path.stat().st_size > 8]
    return draw.choice(found) if found else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("number", type=int, nargs="?", default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bits", action="store_true", help="flip every bit of two indices instead")
    arguments = parser.parse_args()
    if arguments.bits:
        with tempfile.TemporaryDirectory() as folder:
            counts = Counter[str]()
            for by_others in (False, True):
                (inner := Path(folder) / f"{by_others}").mkdir()
                found = flip_bits(Stage(inner), by_others=by_others)
                print("indices of others" if by_others else "indices of a Publisher", dict(found))
                counts += found
    else:
        counts = run(range(arguments.number), seed=arguments.seed, says=True)
    print(dict(counts))
    return 1 if wrong(counts) else 0


def wrong(counts: Counter[str]) -> dict[str, int]:
    """The outcomes that must not be."""
    return {what: n for what, n in counts.items() if what in ("silent", "harmed") or what.startswith("raw")}


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
