"""What only a machine with an accelerator can show."""

import pytest
import torch
from models import DTYPES, TinyMoE, config_for, is_expert, same_bits, tokens_of

from mp_optim import FusedAdam, get_megatron_optimizer

pytestmark = pytest.mark.gpu


def run(precision, fraction, rule="adam", steps=50, **settings):
    torch.use_deterministic_algorithms(True)
    model = TinyMoE(DTYPES[precision]).cuda()
    optimizer = get_megatron_optimizer(config_for(precision, fraction, optimizer=rule, **settings), model,
                                       expert_predicate=is_expert)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(tokens_of(step).cuda())
        optimizer.scale_loss(loss).backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {n: p.detach().cpu() for n, p in model.named_parameters()}, optimizer


@pytest.mark.parametrize("rule", ["adam", "lamb", "sgd"])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_fractions_give_the_same_bits_on_a_gpu(precision, rule):
    expected = run(precision, 0.0, rule)
    assert expected[0][-1] < expected[0][0]
    for fraction, overlap in ((0.3, False), (0.5, True), (1.0, True), (1.0, False)):
        losses, params, _ = run(precision, fraction, rule, overlap_cpu_optimizer_d2h_h2d=overlap)
        assert losses == expected[0]
        assert all(same_bits(params[n], p) for n, p in expected[1].items())


def test_one_gradient_stream_gives_the_same_bits_on_cpu_and_gpu():
    weights = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in (1, 1000, 300_001)]
    results = []
    for device in ("cpu", "cuda"):
        params = [torch.nn.Parameter(w.to(device, copy=True)) for w in weights]
        optimizer = FusedAdam(params, lr=1e-2, weight_decay=0.1)
        for step in range(20):
            for p in params:
                p.grad = torch.randn(p.numel(), generator=torch.Generator().manual_seed(step)).to(device)
            optimizer.step()
        results.append([p.detach().cpu() for p in params])
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


def test_host_memory_is_pinned_and_the_gpu_holds_no_main_params():
    torch.cuda.empty_cache()
    model = torch.nn.Linear(4096, 4096, bias=False).bfloat16().cuda()
    before = torch.cuda.memory_allocated()
    config = config_for("bf16", 1.0, overlap_cpu_optimizer_d2h_h2d=True)
    optimizer = get_megatron_optimizer(config, model)
    optimizer.init_state()
    assert torch.cuda.memory_allocated() - before < 1 << 20
    assert all(main.is_pinned() for _, main in optimizer.named_main_params())


def test_offload_to_cpu_empties_the_accelerator():
    _, _, optimizer = run("bf16", 0.5, steps=1)
    before = {k: v.clone() for s in optimizer.state_dict()["state"].values() for k, v in s.items()}
    optimizer.offload_to_cpu()
    assert all(v.device.type == "cpu" for s in optimizer.state_dict()["state"].values() for v in s.values())
    with pytest.raises(RuntimeError, match="restore_from_cpu"):
        optimizer.step()
    optimizer.restore_from_cpu()
    after = {k: v for s in optimizer.state_dict()["state"].values() for k, v in s.items()}
    assert all(same_bits(before[k].cpu(), after[k].cpu()) and before[k].device == after[k].device for k in before)
