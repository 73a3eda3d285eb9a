"""A process that carries checks out, forked by the runner's server.

What it finds goes to a file, line by line, so that a check that ends the process is known by the
line that is missing.
"""

from __future__ import annotations

import datetime
import json
import os
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from mp_optim.conform.kit import CHECKS, Make, Nonconformance, NotApplicable, Refused
from mp_optim.conform.subject import Subject

PASSES, FAILS, REFUSES, OTHER = STATUSES = ("passes", "FAILS", "refuses", "does not apply")
_LONGEST = 400
_PATIENCE = datetime.timedelta(seconds=20)


def outcome_of(name: str, make: Make) -> tuple[str, str]:
    """Carry out one check: its status, and what was found."""
    try:
        CHECKS[name].function(make)
    except Nonconformance as finding:
        return FAILS, str(finding)
    except Refused as said:
        return REFUSES, str(said)[:_LONGEST]
    except NotApplicable as why:
        return OTHER, str(why)
    except Exception as error:
        text = " ".join(str(error).split())[:_LONGEST]
        return FAILS, f"raised {type(error).__name__}: {text}"
    return PASSES, ""


@dataclass(frozen=True)
class Work:
    """What one process is to do: the same on all ranks but for its number.

    Attributes:
        subject: who is checked.
        names: of the checks.
        ranks: how many processes carry them out together.
        report: the file that findings go to, of all ranks.
        log: the file that everything else goes to.
    """

    subject: Subject
    names: tuple[str, ...]
    ranks: int
    report: Path
    log: Path


def carry_out(work: Work, rank: int) -> None:
    """Carry checks out; the process ends with it."""
    output = os.open(work.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for number in (1, 2):
        os.dup2(output, number)
    warnings.simplefilter("ignore")
    if work.ranks > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(work.ranks))
        store = f"file://{work.report}.store"
        dist.init_process_group("gloo", store, timeout=_PATIENCE, rank=rank, world_size=work.ranks)
    make = work.subject.maker()
    with work.report.open("a", buffering=1) as report:
        for name in work.names:
            report.write(json.dumps({"rank": rank, "begun": name}) + "\n")
            start = time.monotonic()
            status, message = outcome_of(name, make)
            found = {"rank": rank, "name": name, "status": status, "message": message}
            found["seconds"] = time.monotonic() - start
            report.write(json.dumps(found) + "\n")
            if work.ranks > 1:
                if status != PASSES:
                    break  # the other ranks may wait for this one, which lets them go
                dist.barrier()
    os._exit(0)  # what the optimizer left running is not waited for
