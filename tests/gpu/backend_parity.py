"""The plugin's backends on a GPU, eager and in CUDA graphs, against the FP64 reference.

    python -m tests.gpu.backend_parity            on a machine with a GPU and SGLang's own packages: under a minute
                                                  without FA4, which compiles at its first calls
    python -m tests.gpu.backend_parity --case tree

Each row: one mode over one base. An eager pass; a captured graph replayed with two sets of lengths and then with fewer requests;
and the same graph with `req_to_token` overwritten between its metadata and its layers. Errors are relative to the largest value
of a row's head. Without a GPU everything is tiny, runs in Triton's interpreter with stand-ins for FlashAttention and aiter, and
a replay is the same code again. Exits with 1 if a row fails.
"""

from __future__ import annotations

import argparse
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks import record
from tests.gpu.environment import prepare

COLUMNS = ("eager", "graph", "longer", "fewer", "rows lost")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", action="append", help="run the cases whose name has this in it; may be given again")
    parser.add_argument("--out", type=Path, help="result file to write")
    args, device = parser.parse_args(), prepare()
    # SGLang decides when it is imported where it runs.
    from tests.gpu import parity

    cases = [case for case in parity.cases(device) if args.case is None or any(name in case.name for name in args.case)]
    failed, begin, rows = 0, time.monotonic(), list[dict[str, Any]]()
    print(
        f"{'case':34} {'page':>4} {'cache':6} {'kernel':20}" + "".join(f"{name:>10}" for name in COLUMNS) + f"{'us':>9}  result"
    )
    for case in cases:
        case = case if device == "cuda" else case.tiny()
        text, problem, row = "ok", "", dict[str, Any]()
        try:
            row = parity.run(case, device)
            bound = parity.bound(case, row["kernel"])
            if any(not row[name] <= bound for name in COLUMNS if name in row):
                text = f"OFF by more than {bound:g}"
        except Exception as error:  # one row's failure leaves the others to run
            text, problem = f"FAIL {type(error).__name__}", traceback.format_exc()
        failed += text != "ok"
        cells = "".join(f"{row[name]:10.2g}" if name in row else f"{'-':>10}" for name in COLUMNS)
        head = f"{case.name:34} {case.page_size:4} {case.cache_name:6} {row.get('kernel', '-'):20}"
        print(f"{head}{cells}{row.get('us', float('nan')):9.1f}  {text}", flush=True)
        if problem:
            print(problem, flush=True)
        rows.append({"case": case.name, "page_size": case.page_size, "cache": case.cache_name, **row, "result": text})
        if args.out is not None:
            left = [other.name for other in cases[len(rows) :]]
            results = {"command": "python -m tests.gpu.backend_parity", "device": device, "rows": rows, "not run": left}
            record.write(args.out, results)
    print(f"{failed} of {len(cases)} failed; {time.monotonic() - begin:.0f} s on {device}")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
