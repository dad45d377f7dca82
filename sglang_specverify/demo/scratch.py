"""The directory that a server takes for its TMPDIR, so that the files of its sockets, which SGLang leaves behind, go with it."""

from __future__ import annotations

import os
import tempfile

from sglang_specverify.errors import SpecverifyError

#: Bytes that the path of a unix socket may have, `sun_path` without its final zero.
LONGEST_SOCKET = 107
#: Bytes that a server adds to its TMPDIR. Its queues' `/tmp########` is shorter than what multiprocessing and
#: the exchange of GPU memory add.
SOCKET_BELOW = max(len("/pymp-########/listener-########"), len("/sgl_ar_fd_########/rank_##.sock"))
SYSTEMS_TEMPORARY = "/tmp"


def new() -> str:
    """A new directory.

    In the system's own temporary directory where TMPDIR is so long that a socket in it would have no valid path.

    Raises:
        SpecverifyError: neither will do.
    """
    own = tempfile.gettempdir()
    room = LONGEST_SOCKET - SOCKET_BELOW - len("/sv-########")
    if len(os.fsencode(own)) <= room:
        return tempfile.mkdtemp(prefix="sv-", dir=own)
    try:
        return tempfile.mkdtemp(prefix="sv-", dir=SYSTEMS_TEMPORARY)
    except OSError as error:
        raise SpecverifyError(
            f"the temporary directory {own} is too long for the sockets of a server, and in its place {SYSTEMS_TEMPORARY} "
            f"cannot be used: {error.strerror}",
            f"set TMPDIR to a directory whose path has {room} bytes or fewer",
        ) from None
