"""The entry point of group `sglang.srt.plugins`. SGLang calls `register` once in each of its processes.

It is light: it adds the command-line choice and the resolution hooks and, in a process that holds SGLang's
scheduler, the factories. No kernel, no Triton and no GPU module is imported here.
"""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger(__name__)


def register() -> None:
    """Make `--attention-backend specverify` known to this process. Idempotent.

    With a SGLang outside the supported range nothing is touched; asking for the plugin is then an error
    that names the range.
    """
    from sglang_specverify import upstream
    from sglang_specverify.door import resolution
    from sglang_specverify.errors import SpecverifyError

    if getattr(register, "_done", False):
        return
    problem = None
    try:
        upstream.check_version(upstream.installed_version())
    except SpecverifyError as error:
        problem = error
    try:
        resolution.add_choice()
        resolution.register_hooks(problem)
    except ImportError:
        # A SGLang so old that it has no such steps: its parser will not know the name.
        if problem is None:
            raise
        logger.error("specverify: error: %s", problem)
        return
    if problem is None and "sglang.srt.managers.scheduler" in sys.modules:
        from sglang_specverify.door import scheduler

        scheduler.install()
    register._done = True  # type: ignore[attr-defined]
