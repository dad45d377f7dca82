"""Which kernel serves which call, decided by pure functions that can be asked why.

`route.py` holds the table of kernels, `base.py` the choice of SGLang's backend underneath, `facts.py`
what either may know. `model.py`, `layers.py` and `server.py` describe a model and a server line
without running one.
"""

from sglang_specverify.routing.base import (
    PLUGIN,
    BaseDecision,
    ModelFacts,
    Rejected,
    check_request,
    check_server,
    choose_base,
)
from sglang_specverify.routing.facts import CallFacts, LayerFacts, LayerKind, Mode, ServerFacts
from sglang_specverify.routing.route import CLAIMED, ROUTES, STOCK, Decision, Route, decide, require

__all__ = [
    "CLAIMED",
    "PLUGIN",
    "ROUTES",
    "STOCK",
    "BaseDecision",
    "CallFacts",
    "Decision",
    "LayerFacts",
    "LayerKind",
    "Mode",
    "ModelFacts",
    "Rejected",
    "Route",
    "ServerFacts",
    "check_request",
    "check_server",
    "choose_base",
    "decide",
    "require",
]
