"""Megatron-LM #4623: DTensor parameters, on a two-process gloo mesh with FSDP2."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import build, tokens_of
from torch.distributed.tensor import DTensor, Partial

from mp_optim.precision.sharded import shard_groups_of

HERE = Path(__file__).parent


@pytest.mark.parametrize("rule, fraction", [("adam", 0.0), ("adam", 0.5), ("adam", 1.0), ("lamb", 0.5)])
def test_megatron_4623_fsdp2_trains_like_one_process(tmp_path, rule, fraction):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
               str(HERE / "fsdp_worker.py"), rule, str(fraction), str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{HERE}:{HERE.parents[2]}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    sharded = torch.load(tmp_path / "result.pt", weights_only=True)

    model, optimizer = build("fp32", fraction, optimizer=rule)
    for step in range(4):
        optimizer.zero_grad()
        loss = model(tokens_of(step))
        loss.backward()
        norm = optimizer.step().grad_norm
        assert sharded["norms"][step] == pytest.approx(norm, rel=1e-6)
        assert sharded["losses"][step] == pytest.approx(loss.item(), rel=1e-6)
    for name, param in model.named_parameters():
        # FSDP2 averages two equal gradients, which is exact; what is left is the order of the norm's additions.
        torch.testing.assert_close(sharded["params"][name], param.detach(), rtol=0, atol=1e-2 * 1e-4)


def test_partial_parameters_are_refused(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        param = DTensor.from_local(torch.ones(2), mesh, [Partial()])
        with pytest.raises(ValueError, match=r"w: placements .*redistribute"):
            shard_groups_of("w", param)
    finally:
        torch.distributed.destroy_process_group()
