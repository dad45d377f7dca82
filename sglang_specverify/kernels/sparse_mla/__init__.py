"""DeepSeek-V4.1 sparse MLA decode on plain tensors: cache formats, quantiser, kernel, oracle. This package knows no engine."""

from __future__ import annotations
