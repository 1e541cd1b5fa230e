"""An SFTP server on loopback for one folder and one user, by asyncssh.

In: a folder, the file of its host key. Out: its port, one line on standard output; it ends with standard input.
Knows nothing of: async_ckpt.
"""

import asyncio
import os
import sys

import asyncssh


class _Server(asyncssh.SSHServer):
    def begin_auth(self, username: str) -> bool:
        return False  # no password: it listens on loopback alone


async def main(folder: str) -> None:
    def serve(channel: asyncssh.SSHServerChannel) -> asyncssh.SFTPServer:
        return asyncssh.SFTPServer(channel, chroot=os.fsencode(folder))

    listener = await asyncssh.listen(
        "127.0.0.1", 0, server_factory=_Server, server_host_keys=[asyncssh.generate_private_key("ssh-ed25519")],
        sftp_factory=serve,
    )  # fmt: skip
    print(f"sftp://127.0.0.1:{listener.get_port()}", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
