"""Kernels refuse tensor lists with different sizes."""

from dataclasses import replace

import pytest
import torch

from mp_optim.core import CachedTensorList
from mp_optim.kernels import choose_backend
from mp_optim.kernels.kernel_args import AdamScalars
from mp_optim.kernels.triton import triton_backend
from support.kernel_cases import GROUP, KEYS, Case, lists_of
from support.kernels import NEED_KERNELS

NAMES = [
    pytest.param("native", marks=NEED_KERNELS),
    pytest.param(
        "triton", marks=pytest.mark.skipif(triton_backend()[0] is None, reason="no Triton")
    ),
]
CASES = {
    "FP32": Case(),
    "compact": Case(
        rest=torch.int16, moments=(torch.uint8, torch.uint8), average=torch.bfloat16, noisy=True
    ),
}
SIZES = [300, 1, 700]
OPEN = ("main", "grad", "output")


def backend_of(name):
    if name == "triton":
        return triton_backend()[0]
    return choose_backend("native", torch.device("cpu"))[0]


def columns_of(lists):
    return {"main": lists.main, "grad": lists.grad, "output": lists.output, **lists.state}


def sliced(tensor):
    tensor.data = tensor.data[:-1]


def given_back(tensor):
    tensor.untyped_storage().resize_(0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", CASES)
@pytest.mark.parametrize("trouble", [sliced, given_back])
def test_kernels_refuse_lists_with_a_shorter_or_freed_tensor(name, form, trouble):
    backend, scalars = backend_of(name), AdamScalars.at(GROUP, 2)
    for column in columns_of(lists_of(1, SIZES, KEYS["adam"], CASES[form])):
        lists = lists_of(1, SIZES, KEYS["adam"], CASES[form])
        known = {each: CachedTensorList(getattr(lists, each)) for each in OPEN}
        for tensors in known.values():
            assert tensors.dtypes and tensors.sizes
        lists = replace(lists, **known)
        trouble(columns_of(lists)[column][2])
        before = [t.clone() for each in columns_of(lists).values() for t in each[:2]]
        with pytest.raises(ValueError, match=r"tensor 2 of 3 in column"):
            backend.step("adam", lists, scalars, 0.5)
        after = [t for each in columns_of(lists).values() for t in each[:2]]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), column


@pytest.mark.parametrize("name", NAMES)
def test_sum_of_squares_refuses_a_gradient_of_another_size(name):
    grads = CachedTensorList([torch.ones(8), torch.ones(64)])
    params = CachedTensorList([torch.ones(8), torch.ones(32)])
    with pytest.raises(ValueError, match=r"tensor 1 of 2 in column 'grad'.*64 elements"):
        vars(grads).update(sizes=params.sizes, devices=params.devices)
        backend_of(name).sum_of_squares(grads)
