"""Choice of the backend: proofs, ``auto``, named backends, refusals."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from mp_optim import OptimizerConfig, get_megatron_optimizer
from mp_optim.kernels import choose_backend, forget, multi_tensor, proof_of, selection
from mp_optim.kernels.reference import ReferenceBackend
from mp_optim.rules.fused import FusedAdam
from support.standins.gpu import Gpu

CPU = torch.device("cpu")
LIBRARIES = ("apex", "transformer_engine")


@pytest.fixture
def accelerator(standins: Gpu, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    tried = selection.candidates(torch.device("cuda"))
    monkeypatch.setattr(selection, "candidates", lambda device: tried)
    monkeypatch.setitem(sys.modules, "mp_optim.kernels.triton", None)
    forget()
    return standins


def install(monkeypatch: pytest.MonkeyPatch, name: str, module: Any) -> None:
    monkeypatch.setitem(sys.modules, name, module)
    forget()


def test_auto_skips_backends_that_differ_from_the_bits_of_reference(accelerator):
    backend, why = choose_backend("auto", CPU)
    assert backend.name == "reference"
    for name in (*LIBRARIES, "torch"):
        assert (
            f"not {name}: {proof_of(name, CPU).reason} (choose fused_backend={name!r} to use it)"
            in why
        )
    model = nn.Linear(4, 4).bfloat16()
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1, bf16=True), model)
    assert "choose fused_backend='apex' to use it" in str(optimizer.describe())


def test_auto_chooses_the_first_backend_with_bits_of_reference(accelerator, monkeypatch):
    class Exact(ReferenceBackend):
        name = "triton"

    found = ModuleType("mp_optim.kernels.triton")
    found.triton_backend = lambda: (Exact(), "a test")  # type: ignore[attr-defined]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for library in LIBRARIES:  # Their import takes seconds, and neither has the bits of reference.
        monkeypatch.setitem(sys.modules, f"mp_optim.kernels.{library}", None)
    install(monkeypatch, "mp_optim.kernels.triton", found)
    backend, why = choose_backend("auto", CPU)
    assert isinstance(backend, Exact) and "not " not in why
    assert choose_backend("triton", CPU)[1] == "fused_backend='triton'"
    found.triton_backend = lambda: (None, "ImportError: no triton")  # type: ignore[attr-defined]
    forget()
    assert proof_of("triton", CPU).reason == "ImportError: no triton"


def test_backend_candidates_start_with_native_on_the_host_and_triton_on_cuda():
    assert selection.candidates(CPU)[0] == "native"
    assert selection.candidates(torch.device("cuda")) == (
        "triton",
        "apex",
        "transformer_engine",
        "torch",
        "reference",
    )


def test_backend_selection_refuses_a_slightly_wrong_backend(accelerator, monkeypatch):
    library = sys.modules["amp_C"]
    right = library.multi_tensor_adam
    monkeypatch.setattr(
        library,
        "multi_tensor_adam",
        lambda chunk, flag, lists, lr, *rest: right(chunk, flag, lists, lr * 1.001, *rest),
    )
    forget()
    proof = proof_of("apex", CPU)
    assert not proof.usable
    assert proof.reason.startswith("wrong: a first step differs from reference by")
    with pytest.raises(ValueError, match="fused_backend='apex' is not available: wrong"):
        choose_backend("apex", CPU)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            ModuleNotFoundError("No module named 'amp_C'", name="amp_C"),
            "apex with its CUDA extensions is not installed",
        ),
        (
            ModuleNotFoundError("No module named 'x'", name="x"),
            "cannot be loaded: ModuleNotFoundError: No module named",
        ),
        (OSError("libnccl.so.2: cannot open"), "cannot be loaded: OSError: libnccl.so.2"),
        (
            RuntimeError("cudnn shared object not found."),
            "cannot be loaded: RuntimeError: cudnn shared object not found.",
        ),
    ],
)
def test_auto_chooses_reference_when_installed_libraries_are_broken(
    accelerator, monkeypatch, error, words
):
    """Megatron itself catches only ImportError, so a broken Transformer Engine crashes Megatron."""
    real = selection.importlib.import_module

    def broken(name: str) -> Any:
        if name in ("amp_C", "transformer_engine.pytorch"):
            raise error
        return real(name)

    monkeypatch.setattr(selection.importlib, "import_module", broken)
    forget()
    assert words in proof_of("apex", CPU).reason
    assert choose_backend("auto", CPU)[0].name == "reference"
    with pytest.raises(ValueError, match="fused_backend='apex' is not available"):
        FusedAdam([torch.zeros(3)], backend="apex")
    with pytest.raises(ValueError, match="fused_backend='transformer_engine' is not available"):
        get_megatron_optimizer(
            OptimizerConfig(lr=0.1, fused_backend="transformer_engine"), nn.Linear(2, 2)
        )


def test_backend_self_test_quotes_the_error_when_an_apex_kernel_raises(accelerator, monkeypatch):
    def fails(*_: Any) -> None:
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device")

    monkeypatch.setattr(sys.modules["amp_C"], "multi_tensor_adam", fails)
    forget()
    assert (
        "fails a first step: RuntimeError: CUDA error: no kernel image"
        in proof_of("apex", CPU).reason
    )


@pytest.mark.parametrize("name", LIBRARIES)
def test_describe_prints_the_deviation_of_the_chosen_backend_from_reference(standins, name):
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1, fused_backend=name), nn.Linear(4, 4))
    text = str(optimizer.describe())
    assert f"{name} (fused_backend={name!r}; differs from reference by" in text
    assert "reference)" in text


def test_choose_backend_refuses_apex_without_a_gpu(standins, monkeypatch):
    monkeypatch.setattr(multi_tensor, "KERNEL_DEVICE", "cuda")
    forget()
    if not torch.cuda.is_available():
        with pytest.raises(
            ValueError, match="its kernels run on cuda, not on cpu; torch finds no CUDA device"
        ):
            choose_backend("apex", CPU)


def test_choose_backend_falls_back_to_reference_on_a_device_without_apex_kernels(
    standins, monkeypatch
):
    accelerator = torch.device("meta")  # stands for a device without apex kernels
    chosen, why = None, ""
    chosen, why = choose_backend("apex", accelerator)
    assert chosen.name == "reference"
    assert why == "apex kernels run on cpu; apex has other bits, so placement shows in the results"


APEX = {"fused_backend": "apex", "use_precision_aware_optimizer": True}
TE = {**APEX, "fused_backend": "transformer_engine"}
BF16 = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
CODES = {"exp_avg_dtype": "uint8", "exp_avg_sq_dtype": "uint8"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"optimizer": "lion", "fused_backend": "apex"}, "has no kernels for optimizer='lion'"),
        ({"optimizer": "lamb", "fused_backend": "transformer_engine"}, "of ['adam', 'sgd']"),
        ({**APEX, "bf16": True}, "fused_backend='apex' keeps main params in float32"),
        ({**APEX, "exp_avg_dtype": "bf16"}, "fused_backend='apex' keeps moments in torch.float32"),
        ({**TE, "exp_avg_sq_dtype": "bf16"}, "keeps moments in torch.float32, or both"),
        ({**TE, **CODES}, "exp_avg_dtype=torch.uint8"),
        ({**TE, "bf16": True, "param_remainder_bits": 8}, "param_remainder_bits=8"),
        ({**TE, "bf16": True, **BF16, "stochastic_rounding": True}, "stochastic_rounding=True"),
    ],
)
def test_config_refuses_rules_and_state_formats_that_a_backend_lacks(settings, words):
    with pytest.raises(ValueError) as caught:
        OptimizerConfig(lr=0.1, **settings)
    assert words in str(caught.value)


def test_fused_adam_refuses_transformer_engine_without_remainder_kernels(standins, monkeypatch):
    library = sys.modules["transformer_engine_torch"]
    monkeypatch.delattr(library, "multi_tensor_adam_param_remainder")
    forget()
    with pytest.raises(ValueError, match="16-bit remainders; install a newer version"):
        FusedAdam([torch.zeros(3)], backend="transformer_engine")
