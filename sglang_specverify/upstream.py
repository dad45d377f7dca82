"""Which SGLang this plugin was written against, asked without importing it."""

from __future__ import annotations

import importlib.metadata

from sglang_specverify.errors import SpecverifyError

#: Releases whose every method the plugin relies on was compared; nothing else is assumed to fit.
SUPPORTED = ("0.5.22", "0.5.23")
RANGE = " and ".join(SUPPORTED)
#: Those whose dsv4 backend imports FlashMLA's function at each call, where a later one keeps it as an attribute.
_WITHOUT_DSV4_SEAM = ("0.5.22",)


def installed_version() -> str | None:
    """The installed SGLang's version, or None where there is none."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def has_dsv4_seam(version: str | None) -> bool:
    """Whether the dsv4 backend of this SGLang calls FlashMLA through an attribute that a subclass can replace."""
    return version is not None and version.partition("+")[0] not in _WITHOUT_DSV4_SEAM


def check_version(version: str | None) -> None:
    """Refuse an SGLang that the plugin does not know.

    Args:
        version: `installed_version()`, or another version to judge. A local suffix ("+cu130") names
            a build of the same release and is ignored; a post release or a pre-release is another release.

    Raises:
        SpecverifyError: no SGLang, or one out of the supported range.
    """
    if version is None:
        raise SpecverifyError(
            f"SGLang is not installed here; this plugin supports {RANGE}",
            f"install sglang=={SUPPORTED[-1]} into the environment that has sglang-specverify",
        )
    if version.partition("+")[0] not in SUPPORTED:
        raise SpecverifyError(
            f"SGLang {version} is not supported: this plugin supports {RANGE}",
            f"install sglang=={SUPPORTED[-1]}, or a release of sglang-specverify for SGLang {version}",
        )
