"""Four gloo processes: one is killed during a save.

One process imports torch and forks the ranks.
"""

import json
import os
import signal
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

# torch.optim imports it at its first use, which takes a second.
import torch._dynamo
import torch.distributed as dist
from torch import nn

from mp_optim import OptimizerConfig, checkpoint, get_megatron_optimizer
from mp_optim.checkpoint import writing
from mp_optim.process_groups import missing_ranks
from mp_optim.process_groups.agreement import job_timeout

warnings.filterwarnings("ignore")
TIMEOUT, GONE, BUSY = timedelta(seconds=77), 3, 1
PATIENCE = missing_ranks._PATIENCE = 5.0  # The busy rank takes less than this.


def heard(work: Any) -> dict[str, Any]:
    begun = time.monotonic()
    try:
        work()
    except Exception as error:
        return {"said": f"{type(error).__name__}: {error}", "seconds": time.monotonic() - begun}
    return {"said": "nothing was raised", "seconds": time.monotonic() - begun}


def run(folder: Path, rank: int) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4, timeout=TIMEOUT
    )
    torch.set_num_threads(1)
    model = nn.ParameterDict({name: nn.Parameter(torch.ones(100)) for name in "abcd"})
    held = model, get_megatron_optimizer(OptimizerConfig(lr=1e-3), model)
    checkpoint.save(folder / "saved", *held, extra={"n": 1})
    write = writing.Writing.write

    def slow(self: Any) -> Any:
        if rank == GONE:
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3 if rank == BUSY else 0)  # The other ranks have raised before this time.
        return write(self)

    writing.Writing.write = slow
    result = {
        "timeout": job_timeout().total_seconds(),
        "background": heard(
            lambda: checkpoint.save(folder / "saved", *held, asynchronous=True).wait()
        ),
    }
    writing.Writing.write = write
    result["first save"] = heard(lambda: checkpoint.save(folder / "saved", *held))
    result["load"] = heard(lambda: checkpoint.load(folder / "saved", *held))
    (folder / f"rank{rank}.json").write_text(json.dumps(result))
    os._exit(0)


def start(folder: Path, rank: int) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            run(folder, rank)
        finally:
            os._exit(1)
    return pid


def main(folder: Path) -> None:
    ranks = [start(folder, rank) for rank in range(4)]
    ended = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
    expected = [-signal.SIGKILL if rank == GONE else 0 for rank in range(4)]
    assert ended == expected, f"exit status by rank: {ended}"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
