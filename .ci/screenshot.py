"""Trains and saves a small model, restarts it once, and photographs the top of `async-ckpt page` as docs/page.png.

Run by hand when the page changes: `python .ci/screenshot.py`. It needs Chromium: `apt-get install chromium`.
"""

from __future__ import annotations

import base64
import contextlib
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "docs" / "page.png"
WIDTH, HEIGHT, SCALE = 900, 850, 1.5
SAVES_EVERY, SAVES, STARTS, PAUSE_SECONDS = 10, 30, 2, 3.0


def train() -> None:
    """One start of the training, which continues from the newest step."""
    import async_ckpt

    layers = [torch.nn.Linear(256, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 256)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer, "rng": async_ckpt.RngState()}
    keep = async_ckpt.Keep(last=3, best=("loss", "min", 2))
    with async_ckpt.AsyncCheckpointer("runs/demo", keep=keep, guard=optimizer) as ckpt:
        begin = (ckpt.restore(state) or 0) + 1
        for step in range(begin, begin + SAVES_EVERY * SAVES):
            batch = torch.randn(4, 256)
            loss = (model(batch) - batch.flip(1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % SAVES_EVERY == 0:
                ckpt.save(state, step, record={"loss": loss.item()})


def photograph(page: Path, profile: Path) -> None:
    from benchmarks.browser import MISSING, Chromium, opened, program

    if (found := program()) is None:
        sys.exit(MISSING)
    window = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": SCALE, "mobile": False}
    with Chromium(found, profile) as browser, opened(browser, page, width=WIDTH, height=HEIGHT) as shown:
        shown.ask("Emulation.setDeviceMetricsOverride", **window)
        shown.evaluate("new Promise((resolve) => setTimeout(resolve, 500))")  # the pictures are drawn at the new scale
        PICTURE.write_bytes(base64.b64decode(shown.ask("Page.captureScreenshot", format="png")["data"]))


def main() -> None:
    from async_ckpt.tools.command.main import status_of

    torch.set_num_threads(1)  # the training is small
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for start in range(STARTS):
            if start:
                time.sleep(PAUSE_SECONDS)  # a gap to be seen in the picture
            train()
        if status := status_of(["page", "runs/demo", "-o", "demo.html"]):
            sys.exit(status)
        photograph(Path("demo.html"), Path(folder, "profile"))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
