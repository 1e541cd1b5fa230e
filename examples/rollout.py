"""A rollout engine: it generates, and takes over new weights between two generations, without a restart.

In: POSTs of a sidecar, each with a folder and a version. Out: one line of JSON per event on stdout. Knows nothing of: the training.

    python -m examples.rollout  # says its URL
    async-ckpt follow demo_out/rollout/weights --into demo_out/rollout/model --post URL
"""

from __future__ import annotations

import argparse
import json
import queue
import threading
import time
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from examples.train_rollout import PROMPT, digest_of_logits, new_model, prompt_tokens, tell

NUM_TOKENS = 40
# Versions to load, each with a future for the answer.
Asked = queue.SimpleQueue[tuple[Path, int, "Future[None]"]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--until", type=int, help="the version to end with; without it, it goes on")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model, asked = new_model(), Asked()
    with serving(asked) as server:
        tell("ready", url=f"http://127.0.0.1:{server.server_address[1]}")
        version = None
        while version is None or version != arguments.until:
            version = take_over(model, asked) or version
            generate(model)
        server.shutdown()


def take_over(model: Any, asked: Asked) -> int | None:
    """Load the version that the sidecar asks for, if it asks for one. Its folder stays as it is until the answer."""
    try:
        folder, version, answer = asked.get_nowait()
    except queue.Empty:
        return None
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)  # tied weights are in it once
    logits = digest_of_logits(model)
    tell("swapped", version=version, at=time.time(), logits=logits, text=PROMPT + generate(model))
    answer.set_result(None)
    return version


def serving(asked: Asked) -> ThreadingHTTPServer:
    """A server on a thread, which answers a POST when the version has been loaded."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer: Future[None] = Future()
            asked.put((Path(body["folder"]), body["version"], answer))
            answer.result()
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = False  # the last answer is sent before the end
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@torch.no_grad()
def generate(model: Any) -> str:
    """What the model goes on with, the likeliest byte at a time."""
    made = model.generate(
        prompt_tokens(), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return bytes(made[0, len(PROMPT) :].tolist()).decode(errors="replace")


if __name__ == "__main__":
    main()
