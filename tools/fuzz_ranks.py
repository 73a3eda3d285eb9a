"""Try random layouts of ranks for as long as is wanted: ``python tools/fuzz_ranks.py --layouts 300 --seed 1``.

Each case is a number. A failure prints its number, the case, and what is wrong; ``--case NUMBER`` runs it again.
"""

from __future__ import annotations

import argparse
import sys
import time

from layout_fuzz.case import grouped
from layout_fuzz.drawing import draw
from layout_fuzz.pool import Pool
from layout_fuzz.trying import attempt


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layouts", type=int, default=100, help="how many cases; with --minutes, at most so many")
    parser.add_argument("--seed", type=int, default=0, help="number of the first")
    parser.add_argument("--minutes", type=float, help="stop after so long")
    parser.add_argument("--case", type=int, help="run this one alone, and print it")
    parser.add_argument("--first", action="store_true", help="stop at the first failure")
    parser.add_argument("--verbose", action="store_true", help="a line for each case")
    options = parser.parse_args()
    seeds = range(options.seed, options.seed + options.layouts) if options.case is None else [options.case]
    began, failed, refused, tried = time.monotonic(), [], 0, 0
    with Pool() as pool:
        for seed in seeds:
            if options.minutes is not None and time.monotonic() - began > options.minutes * 60:
                break
            case, started = draw(seed), time.monotonic()
            if options.case is not None:
                print(case)
            verdict = attempt(pool, case)
            tried += 1
            refused += verdict.refused
            if verdict.faults:
                failed.append(seed)
                print(f"FAILED after {time.monotonic() - began:.1f} s: {grouped(case)}\n{case}")
                print("\n".join(f"  {fault}" for fault in verdict.faults[:12]), flush=True)
            elif options.verbose:
                print(f"{time.monotonic() - started:6.2f} s  {grouped(case)}"
                      f"{'  (torch refuses the model)' if verdict.refused else ''}", flush=True)
            if failed and options.first:
                break
    print(f"{tried} layouts from seed {options.seed}: {len(failed)} failed {failed or ''}, {refused} refused by torch, "
          f"{time.monotonic() - began:.0f} s, {pool.restarts} restarts")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
