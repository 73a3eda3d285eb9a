"""Random layouts of ranks against one process: the first cases of ``python tests/lab layouts``, and
faults that the fuzzer must report."""

import dataclasses
import math

import pytest

from lab.layout_fuzz.case import Case, Disagreement, Layer, Layout, Param, grouped
from lab.layout_fuzz.drawing import draw
from lab.layout_fuzz.pool import Pool
from lab.layout_fuzz.trying import Verdict, attempt

ADAM = Case(
    0,
    "processes",
    "adam",
    "bf16",
    (Layer("blocks.0", (Param("w", (300,)), Param("b", (6,)))),),
    (Layout("copies", (("dp", 2),)),),
    streams=2,
)


@pytest.fixture(scope="module")
def pool():
    with Pool() as pool:
        yield pool


NIGHTLY = [pytest.param(first, marks=pytest.mark.slow) for first in (30, 40)]


@pytest.mark.parametrize("first", [0, 10, 20, *NIGHTLY])
def test_random_rank_layouts_train_like_one_process(pool, first):
    """Cases combine rules, dtypes, ZeRO, FSDP2, tensor, expert and pipeline parallelism,
    placements, checkpoints, bad gradients and disagreeing ranks. The command
    ``python tests/lab layouts --case NUMBER`` repeats a case."""
    for case in map(draw, range(first, first + 10)):
        verdict = attempt(pool, case)
        assert not verdict.faults, "\n".join((grouped(case), repr(case), *verdict.faults))


@pytest.mark.parametrize(
    ("rule", "precision", "fraction"),
    [("lamb", "fp32", 0.5), ("adam", "bf16", 0.5), ("adam", "bf16-remainder", 0.0)],
)
def test_megatron_4623_fsdp2_trains_like_one_process(pool, rule, precision, fraction):
    layout = Layout("fsdp", (("dp", 2),), fraction)
    layers = (Layer("blocks.0", (Param("w", (16, 24)), Param("b", (6,)))),)
    case = ADAM.with_(rule=rule, precision=precision, layers=layers, layouts=(layout,), clip=1.0)
    assert attempt(pool, case) == Verdict()


@pytest.mark.parametrize(
    "settings",
    [
        {"data_parallel_sharding_strategy": "optim"},
        {"data_parallel_sharding_strategy": "optim_grads"},
        {"data_parallel_sharding_strategy": "no_shard"},
        {"use_layer_wise_distributed_optimizer": True},
    ],
    ids=str,
)
def test_sharding_trains_tensor_parallel_params_split_by_any_dimension(pool, settings):
    """Megatron's ``partition_dim`` is a dimension of the parameter, not of the flat shard of a
    rank."""
    layers = tuple(
        Layer(f"blocks.{dim}", (Param("w", (40, 20, 8), splits=dim),)) for dim in range(3)
    )
    case = Case(
        0,
        "threads",
        "adam",
        "bf16",
        layers,
        (Layout("copies", (("dp", 2), ("tp", 2)), settings=tuple(settings.items())),),
        streams=2,
    )
    assert attempt(pool, case) == Verdict()


@pytest.mark.parametrize("what", ["lr", "clip_grad", "factors"])
@pytest.mark.parametrize(
    "mesh", [(("dp_replicate", 2), ("dp_shard", 2)), (("dp", 2), ("tp", 2))], ids=str
)
def test_replicated_ranks_are_named_when_their_settings_differ(pool, mesh, what):
    layer = Layer("blocks.0", (Param("w", (16, 24), splits=0), Param("b", (16,))))
    odd = Disagreement(what, 3, 1 if what in ("lr", "factors") else -1)
    case = ADAM.with_(
        layers=(layer,),
        layouts=(Layout("fsdp", mesh),),
        streams=4,
        clip=1.0,
        scaled=(1,) if what == "factors" else (),
        disagreement=odd,
    )
    assert attempt(pool, case) == Verdict()


@pytest.mark.parametrize("kind", ["fsdp", "copies"])
def test_remainders_saved_by_one_process_load_into_sharded_params(pool, kind):
    layouts = (Layout("alone"), Layout(kind, (("dp", 2),)))
    case = ADAM.with_(
        world="threads", precision="bf16-remainder", layouts=layouts, steps=3, change=2
    )
    assert attempt(pool, case) == Verdict()


@pytest.mark.parametrize("precision", ["bf16-fp16", "bf16-8bit"])
def test_blockwise_momentum_loads_on_a_rank_that_owns_no_row_of_a_matrix(pool, precision):
    layout = Layout(
        "copies", (("dp", 2),), settings=(("use_layer_wise_distributed_optimizer", True),)
    )
    case = ADAM.with_(
        world="threads",
        rule="muon",
        precision=precision,
        layouts=(Layout("alone"), layout),
        change=2,
        layers=(Layer("blocks.0", (Param("w", (16, 24)), Param("b", (8, 6)))),),
    )
    assert attempt(pool, case) == Verdict()


def test_layout_fuzzer_draws_equal_cases_for_equal_case_numbers():
    cases = [draw(number) for number in range(300)]
    assert cases == [draw(number) for number in range(300)]
    assert eval(repr(cases[7]).replace("inf", "math.inf"), {**globals(), "math": math}) == cases[7]
    assert {case.world for case in cases} == {"threads", "processes"}
    assert {layout.kind for case in cases for layout in case.layouts} == {
        "alone",
        "copies",
        "fsdp",
        "placed",
    }


@pytest.mark.parametrize(("world", "rule"), [("threads", "adam"), ("processes", "sgd")])
def test_layout_fuzzer_reports_a_learning_rate_off_by_one_bit(pool, world, rule, monkeypatch):
    from lab.layout_fuzz import alone

    case = ADAM.with_(world=world, rule=rule)
    assert not attempt(pool, case).faults
    config_of = alone.config_of
    monkeypatch.setattr(
        alone,
        "config_of",
        lambda *given: dataclasses.replace(config_of(*given), lr=2.0**-6 * (1 + 2.0**-22)),
    )
    assert any("differ" in fault for fault in attempt(pool, case).faults)


@pytest.mark.parametrize(("what", "message"), [("dies", "exit status -6"), ("sleeps", "Timeout")])
def test_layout_fuzzer_reports_a_dead_or_hanging_rank_and_continues(what, message):
    with Pool(short_timeout=2.0) as fragile:
        assert not attempt(fragile, ADAM).faults
        patience, fragile.patience = fragile.patience, 4.0
        faults = attempt(fragile, ADAM.with_(disagreement=Disagreement(what, 1, 1))).faults
        assert len(faults) == 1 and message in faults[0] and "1]" in faults[0]
        assert fragile.restarts == 1
        fragile.patience = patience
        assert not attempt(fragile, ADAM).faults
