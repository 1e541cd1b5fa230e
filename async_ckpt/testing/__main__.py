"""Run a command with a bundled S3 server on loopback: no account, no network. Its data is deleted at the end.

In: a command, after `--`. Out: its exit status. Knows nothing of: what the command does.

    python -m async_ckpt.testing [--bucket NAME] -- COMMAND ...

The command finds the server by AWS_ENDPOINT_URL and the keys in its environment, as every S3 client does.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from .servers import moto_server


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m async_ckpt.testing", description="Run a command with an S3 server on loopback."
    )
    parser.add_argument("--bucket", default="demo", help="a bucket to create for it")
    parser.add_argument("command", nargs="+", help="the command, behind --")
    arguments = parser.parse_args()
    with moto_server() as server:
        server.make_bucket(arguments.bucket)
        environment = {
            "AWS_ENDPOINT_URL": server.endpoint,
            "AWS_REGION": server.options["region"],
            "AWS_ACCESS_KEY_ID": server.options["access_key_id"],
            "AWS_SECRET_ACCESS_KEY": server.options["secret_access_key"],
        }
        inherited = {k: v for k, v in os.environ.items() if k not in ("AWS_SESSION_TOKEN", "AWS_PROFILE")}
        return subprocess.run(arguments.command, env=inherited | environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
