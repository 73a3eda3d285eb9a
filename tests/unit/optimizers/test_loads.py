"""Loads of state dicts from before the first step and from torch, and refused calls."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mp_optim
from mp_optim import checkpoint
from mp_optim.apps.convert import from_torch, import_state
from support.models import same_bits

RULES = ["AdamW", "Adam", "LAMB", "Lion", "SGD", "Muon"]
Named = list[tuple[str, nn.Parameter]]


def named(*names: str) -> Named:
    return [(name, nn.Parameter(torch.ones(3, 2))) for name in names]


def stepped(optimizer: Any, steps: int = 1) -> Any:
    for _ in range(steps):
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.full_like(param, 0.5)
        optimizer.step()
    return optimizer


def two_groups(rule: str, first: str, second: str, lrs: tuple[Any, Any]) -> Any:
    pairs = zip(named(first, second), lrs, strict=True)
    return getattr(mp_optim, rule)([{"params": [pair], "lr": lr} for pair, lr in pairs])


def rates(optimizer: Any) -> dict[str, float]:
    return {g["param_names"][0]: float(g["lr"]) for g in optimizer.param_groups}


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("rule", RULES)
def test_load_copies_settings_by_param_name_from_an_unstepped_state_dict(rule, steps):
    tensors = torch.tensor(0.1), torch.tensor(0.5)
    saved = two_groups(rule, "a", "b", tensors).state_dict()
    others = [stepped(two_groups(rule, "b", "a", (0.5, 0.1)), steps) for _ in range(2)]
    for other in others:
        other.load_state_dict(saved)
        assert rates(other) == pytest.approx({"a": 0.1, "b": 0.5})
    with torch.no_grad():
        for tensor in (*tensors, others[0].param_groups[0]["lr"]):
            tensor.fill_(7.0)
    assert rates(others[1]) == pytest.approx({"a": 0.1, "b": 0.5})


@pytest.mark.parametrize(
    ("dtype", "place"),
    [(torch.float32, {}), (torch.bfloat16, {"offload": 1.0, "offload_mode": "overlap"})],
)
@pytest.mark.parametrize("rule", RULES)
def test_load_of_an_unstepped_state_dict_resets_training_exactly(rule, dtype, place):
    def run(tries: bool) -> list[Tensor]:
        torch.manual_seed(0)
        layer = nn.Linear(4, 4).to(dtype)
        optimizer = getattr(mp_optim, rule)(layer.named_parameters(), lr=0.1, **place)
        held = optimizer.param_groups

        def train() -> None:
            optimizer.zero_grad()
            layer(torch.ones(2, 4).to(dtype)).square().mean().backward()
            optimizer.step()

        if tries:
            start = copy.deepcopy((layer.state_dict(), optimizer.state_dict()))
            optimizer.param_groups[0]["lr"] = 0.3
            train()
            train()
            layer.load_state_dict(start[0])
            optimizer.load_state_dict(start[1])
            assert optimizer.state_dict()["state"] == {}
            assert optimizer.last_step is None and optimizer.param_groups is held
        train()
        train()
        state = optimizer.state_dict()["state"].values()
        tensors = [value.clone() for slot in state for value in slot.values()]
        return [*tensors, *(param.detach().clone() for param in layer.parameters())]

    assert all(map(same_bits, run(True), run(False)))


@pytest.mark.parametrize(
    ("state_dict", "message"),
    [
        ({"param_groups": []}, r"'state'\] is NoneType"),
        ({"state": {}, "param_groups": {}}, r"'param_groups'\] is dict"),
        ([], "state_dict is a list; pass a dict"),
        ({"state": {}, "param_groups": [{"lr": 1.0}]}, "no list 'params'"),
    ],
)
@pytest.mark.parametrize("steps", [0, 1])
def test_load_refuses_values_that_are_no_state_dict(state_dict, message, steps):
    with pytest.raises(ValueError, match=message):
        stepped(mp_optim.AdamW(named("a")), steps).load_state_dict(state_dict)


@pytest.mark.parametrize(
    "settings", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}]
)
def test_sgd_continues_like_torch_sgd_from_its_state_dict(settings):
    here, there = named("w"), named("w")
    theirs = stepped(torch.optim.SGD(there, lr=0.1, **settings), 3)
    with torch.no_grad():
        here[0][1].copy_(there[0][1])
    ours = mp_optim.SGD(here, lr=0.5, **settings)
    ours.load_state_dict(theirs.state_dict())
    for _ in range(3):
        stepped(ours)
        stepped(theirs)
        torch.testing.assert_close(here[0][1], there[0][1], rtol=1e-6, atol=1e-7)


def test_adamw_continues_from_imported_torch_adamw_state():
    pair = [("w", nn.Parameter(torch.ones(3, 2).bfloat16()))]
    theirs = stepped(torch.optim.AdamW(pair, lr=0.1), 3)
    ours = mp_optim.AdamW(pair, lr=0.1)
    with pytest.raises(ValueError, match=r"import_state\(optimizer, from_torch"):
        ours.load_state_dict(theirs.state_dict())
    import_state(ours, from_torch(theirs.state_dict(), ["w"]), main_from_model=True)
    assert float(ours.state[pair[0][1]]["step"]) == 3.0
    assert stepped(ours).last_step.success


def test_load_accepts_a_none_momentum_buffer_of_older_torch():
    there = stepped(torch.optim.SGD(named("w"), lr=0.1)).state_dict()
    ours = mp_optim.SGD(named("w"), lr=0.5)
    ours.load_state_dict({**there, "state": {0: {"momentum_buffer": None}}})
    assert float(ours.state[ours.param_groups[0]["params"][0]]["step"]) == 1.0


@pytest.mark.parametrize("from_inside", [True, False])
def test_optimizer_refuses_calls_from_a_thread_or_signal_during_a_step(from_inside, monkeypatch):
    optimizer = stepped(mp_optim.AdamW(named("a"), lr=0.1))
    saved, raised = copy.deepcopy(optimizer.state_dict()), []

    def look() -> None:
        uses: list[Callable[[], Any]] = [optimizer.state_dict]
        if not from_inside:
            uses += [optimizer.step, lambda: optimizer.load_state_dict(saved)]
        for use in uses:
            with pytest.raises(RuntimeError) as caught:
                use()
            raised.append(caught)

    inner = optimizer.stack.executor

    def carry_out(planned: Any, original: Any = inner.carry_out) -> None:
        if from_inside:
            look()
        else:
            thread = threading.Thread(target=look)
            thread.start()
            thread.join()
        original(planned)

    monkeypatch.setattr(inner, "carry_out", carry_out)
    stepped(optimizer)
    monkeypatch.undo()
    who = "this thread" if from_inside else "another thread"
    assert len(raised) == (1 if from_inside else 3)
    for caught in raised:
        assert caught.type is RuntimeError and who in str(caught.value)
    stepped(optimizer)
    assert float(optimizer.state_dict()["state"][0]["step"]) == 3.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_refused_load_changes_no_state_when_a_parameter_is_frozen(dtype):
    pairs = [(name, nn.Parameter(torch.ones(6, 4, dtype=dtype))) for name in "ab"]
    saved = copy.deepcopy(stepped(mp_optim.AdamW(pairs, lr=0.01)).state_dict())
    frozen, trained = (param for _, param in pairs)
    frozen.requires_grad_(False)
    frozen.grad = None
    optimizer = mp_optim.AdamW(pairs, lr=0.01)
    trained.grad = torch.ones_like(trained)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    assert [*before["state"]] == [1]
    for index, key in ((0, "exp_avg"), (1, "exp_avg_sq")):
        wrong = copy.deepcopy(saved)
        wrong["state"][index][key] = torch.zeros(5)
        with pytest.raises(ValueError, match=f"{'ab'[index]}.{key}: saved shape"):
            optimizer.load_state_dict(wrong)
        now = optimizer.state_dict()["state"]
        assert [*now] == [1]
        assert all(same_bits(now[1][key], value) for key, value in before["state"][1].items())
    optimizer.load_state_dict(saved)
    assert [*optimizer.state_dict()["state"]] == [0, 1]


def test_save_refuses_a_path_that_is_a_file_and_keeps_the_file(tmp_path):
    path = tmp_path / "saved"
    path.write_text("mine")
    with pytest.raises(FileExistsError, match="saved is a file, but a checkpoint is a"):
        checkpoint.save(path, nn.Linear(2, 2), None)
    assert path.read_text() == "mine"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.filterwarnings("ignore:float16 parameters are stepped without")
def test_step_without_a_grad_scaler_ignores_the_scale_of_an_earlier_step(dtype):
    def run(scales: bool) -> list[Tensor]:
        param = nn.Parameter(torch.ones(4, dtype=dtype))
        optimizer = mp_optim.SGD([("w", param)], lr=0.125)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=scales)
        scaler.scale(param.float().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        ends = [param.detach().clone()]
        optimizer.zero_grad()
        param.float().sum().backward()
        optimizer.step()
        return [*ends, param.detach().clone()]

    found, expected = run(True), run(False)
    assert all(map(same_bits, found, expected)) and float(expected[1][0]) == 0.75
