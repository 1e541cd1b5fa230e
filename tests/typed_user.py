"""What a user's script may look like: `make check` has mypy --strict look at it."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import async_ckpt


def train(root: Path) -> list[int]:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer, "rng": async_ckpt.RngState()}
    place = async_ckpt.Place(root / "far", keep=async_ckpt.Keep(last=3))
    with async_ckpt.AsyncCheckpointer(
        [root / "a", place], keep=2, guard=optimizer, due=async_ckpt.Due(every=2, overhead=0.01, mtbf="measured")
    ) as ckpt:
        start: int | None = ckpt.restore(state)
        for step in range(0 if start is None else start + 1, 6):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            if ckpt.should_save(step):
                handle: async_ckpt.SaveHandle = ckpt.save(state, step, record={"loss": 0.5})
                handle.add_done_callback(lambda done: print(done.result()))
        best: int = ckpt.best("loss", mode="min")
        numbers: dict[str, float] = ckpt.metrics("ckpt/")
        stalls: list[float] = [event["stall_seconds"] for event in ckpt.history() if event["kind"] == "save"]
        trained: float = ckpt.history().goodput().shares["trained"]
        print(best, len(numbers), stalls, trained, ckpt.interval().seconds)
        ckpt.wait()
        return ckpt.steps()


async def once(path: Path) -> async_ckpt.SaveReport:
    return await async_ckpt.save({"w": torch.ones(3)}, path)


def read(snap: async_ckpt.HeldSnapshot, path: str) -> async_ckpt.SaveHandle:
    return async_ckpt.save(snap, path)


def publish(model: torch.nn.Module, root: str) -> dict[str, float]:
    with async_ckpt.Publisher(root, encoding="overwrite", acknowledged=lambda: None) as publisher:
        handle: async_ckpt.SaveHandle = publisher.publish(model, version=3)
        print(handle.result(), publisher.versions())
    with async_ckpt.Subscriber(async_ckpt.Place(root)) as subscriber:
        for version in subscriber.watch(poll_seconds=0.5):
            report: async_ckpt.PullReport = subscriber.pull(model, version)
            return report.as_dict("weights/")
    return {}


save = async_ckpt.wrap(torch.save)


@async_ckpt.wrap(destination="path")
def save_text(text: str, path: Path) -> None:
    path.write_text(text)


if TYPE_CHECKING:  # a slip of the pen is found: these ignores would be errors if they were not needed
    async_ckpt.sav({}, "x.tar")  # type: ignore[attr-defined]
    async_ckpt.NoSuchError()  # type: ignore[attr-defined]


def expected(error: Exception) -> bool:
    return isinstance(error, async_ckpt.ClosedError | async_ckpt.StateMismatchError)


if __name__ == "__main__":
    print(train(Path("runs")))
    report = asyncio.run(once(Path("x.tar")))
    print(report.num_bytes, report.bandwidth > 0, report.as_dict("a/")["a/num_bytes"])
    save({"w": torch.ones(3)}, "x.pt").result()
    with async_ckpt.snapshot({"w": torch.ones(3)}) as snap:
        read(snap, "y.tar").result(timeout=60)
        save_text("y", Path("y.txt")).result(timeout=60)
        print(snap["w"].sum())
    with async_ckpt.pack("z.tar") as folder:
        (folder / "a").write_text("b")
    print(folder.handle.result())
    with async_ckpt.unpack("z.tar") as inner:
        print(list(inner.iterdir()))
    print(async_ckpt.verify("x.tar"))
    sizes: dict[str, int] = async_ckpt.inspect("x.tar").entries
    print(sizes, len(async_ckpt.history("runs/a")))
    try:
        async_ckpt.load("nothing")
    except async_ckpt.NotCommittedError as error:
        print(error.path, error)
