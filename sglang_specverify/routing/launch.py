"""How a server is started, as far as that would lose the plugin on the way to the process that serves. Pure."""

from __future__ import annotations

from sglang_specverify.errors import SpecverifyError
from sglang_specverify.routing.options import ServerLine


def check_launch(line: ServerLine) -> None:
    """`check_start` for a server line."""
    check_start(ray="--use-ray" in line.switches, grpc=bool({"--grpc-mode", "--smg-grpc-mode"} & line.switches))


def check_start(*, ray: bool, grpc: bool) -> None:
    """Refuse what would lose the plugin, or the handshake that shows it.

    Raises:
        SpecverifyError: `--use-ray`, or a server of gRPC alone.
    """
    if ray:
        raise SpecverifyError(
            "--use-ray: SGLang's Ray actors load no plugin, so they would serve the stock backend",
            "leave --use-ray out",
        )
    if grpc:
        raise SpecverifyError(
            "gRPC mode starts its schedulers by itself, and no handshake would show whether they hold the plugin",
            "serve over HTTP; --grpc-port beside it is fine",
        )
