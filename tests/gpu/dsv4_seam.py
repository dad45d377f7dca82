"""SGLang's real dsv4 backend with the plugin's kernel in its seam, on a GPU, against the FP64 oracle. No server, no model.

    python -m tests.gpu.dsv4_seam --seconds 300 --out benchmarks/results/dsv4-seam-<machine>.json
    python -m tests.gpu.dsv4_seam --only "store kernel"
    python -m tests.gpu.dsv4_seam --dry                    without a GPU: tiny, in Triton's interpreter

`dsv4_rows.py` has the rows: SGLang's writers and its dequantiser compiled here, and attention through SGLang's forward pass,
eager and in graphs. Each is printed and written as it ends. Exits with 1 if a row is wrong, did not run, or did not see a fault.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks import record
from tests.gpu.environment import prepare


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=300.0, help="no row begins later, and the process ends a minute later")
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    parser.add_argument("--dry", action="store_true", help="on the CPU, tiny")
    args = parser.parse_args()
    if args.dry:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    began = time.monotonic()
    device = prepare()
    os.environ |= {"SGLANG_SPECVERIFY_SPARSE_MLA": "1", "SGLANG_SPECVERIFY_FP4_POOL": "1"}
    # SGLang decides when it is imported where it runs.
    from tests.backends import dsv4
    from tests.gpu import dsv4_rows

    names = [name for name in dsv4_rows.ROWS if args.only in name]
    command = f"python -m tests.gpu.dsv4_seam --seconds {args.seconds:g}" + " --dry" * args.dry
    rows: list[dict[str, Any]] = []

    def save() -> None:
        if args.out is not None:
            done = {row["name"] for row in rows}
            results = {"command": command, "device": device, "rows": rows, "not run": [n for n in names if n not in done]}
            record.write(args.out, results)

    # A kernel that hangs cannot be interrupted; what ran before it is written.
    limit = threading.Timer(args.seconds + 60, os._exit, [3])
    limit.daemon = True
    limit.start()
    prepare_sglang()
    if device == "cuda" and any(name.startswith("store kernel") for name in names):
        for problem in dsv4_rows.compile_store_kernels():  # the rows will say so too
            print(problem, flush=True)
        print(f"{time.monotonic() - began:5.0f} s  store kernels compiled", flush=True)
    with dsv4.published(device=device):
        for name in names:
            if time.monotonic() - began > args.seconds:
                break
            rows.append(one_row(name, device))
            row = rows[-1]
            said = "ok" if row["ok"] else "not here" if row["ok"] is None else "FAIL"
            print(f"{time.monotonic() - began:5.0f} s  {name:52} {said:8} {row['checks']:4} {row['reason'][:1500]}", flush=True)
            save()
    wrong = [row["name"] for row in rows if row["ok"] is False or (row["ok"] is None and device == "cuda")]
    wrong += [f"not run: {name}" for name in names if name not in {row["name"] for row in rows}]
    print("; ".join(wrong) or "all right", f"{time.monotonic() - began:.0f} s", flush=True)
    return int(bool(wrong) or not rows)


def prepare_sglang() -> None:
    """Hook what the flags ask for; where FlashMLA is not installed, put a module in its place, whose call is an error."""
    from sglang_specverify.door import sparse_mla as door
    from sglang_specverify.door.scheduler import _patch
    from tests.backends import dsv4

    door.install(_patch)
    try:
        import_module("sglang.kernels.ops.attention.flash_mla_interface")
    except ImportError as error:
        print(f"a stand-in for FlashMLA: {error}", flush=True)

        def attend(**_: Any) -> Any:
            raise AssertionError("FlashMLA was called, and is not installed")

        dsv4.stand_in(Forever(), attend)


class Forever:
    """Sets what a test would set for its time."""

    @staticmethod
    def setitem(mapping: Any, name: Any, value: Any) -> None:
        mapping[name] = value

    @staticmethod
    def setattr(owner: Any, name: str, value: Any) -> None:
        setattr(owner, name, value)


def one_row(name: str, device: str) -> dict[str, Any]:
    """Run a row; never raises."""
    from tests.gpu import dsv4_rows
    from tests.gpu.sparse_mla_calls import Checker

    c, at = Checker(device, "bf16"), time.monotonic()
    ok: bool | None = True
    try:
        with c.watching():
            dsv4_rows.ROWS[name](c)
        if name in dsv4_rows.READERS and (missing := c.missing_kernel()):
            c.problems.append(missing)
        if not c.checks:
            c.problems.append("nothing was checked")
    except dsv4_rows.NotHere as reason:
        ok, c.problems = None, [str(reason)]
    except Exception as error:  # the other rows go on
        c.problems.append(f"{type(error).__name__}: {error}"[:1500])
        print(traceback.format_exc()[-3000:], flush=True)
    ok = ok if ok is None else not c.problems
    found = {"name": name, "ok": ok, "reason": "; ".join(c.problems[:4]), "checks": c.checks, "kernels": dict(c.kernels)}
    return {**found, "seconds": round(time.monotonic() - at, 1)}


if __name__ == "__main__":
    raise SystemExit(main())
