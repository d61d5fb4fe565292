"""Which recurrence SRU layers run on, with a fake of the package; and the package itself on a CPU where asked for."""

from __future__ import annotations

import logging
import os
import sys
import types

import pytest
import torch
from foregate.predictors import sru, sru_kernel
from foregate.predictors.sru import SruLayer, _by_torch, _Plain
from foregate.predictors.sru_kernel import Kernel, choose_kernel
from torch import nn

CPU = torch.device("cpu")


class Cell(nn.Module):
    """Stands in for SRUCell: same parameters, same call, computed by the twin; counts its calls and may be wrong."""

    calls = 0
    error = 0.0

    def __init__(self, input_size: int, hidden_size: int, bidirectional: bool = False) -> None:
        super().__init__()
        self.inner = _Plain(input_size, hidden_size, bidirectional=bidirectional)
        for name, value in [*self.inner.named_parameters(), *self.inner.named_buffers()]:
            setattr(self, name, value)

    def forward(self, x, c0, mask_pad=None):
        Cell.calls += 1
        weights = {name: getattr(self, name) for name in ("weight", "weight_c", "bias", "scale_x")}
        mask = None if mask_pad is None else ~mask_pad
        hidden, cell = torch.func.functional_call(self.inner, weights, (x, c0, mask))
        return hidden + Cell.error, cell


class Cuda:
    """A device that says it is CUDA, so that the choice can be made without one."""

    type = "cuda"

    def __str__(self) -> str:
        return "cuda"


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    choose_kernel.cache_clear()
    sru_kernel._template.cache_clear()
    monkeypatch.setattr(Cell, "calls", 0)
    monkeypatch.setattr(Cell, "error", 0.0)
    yield
    choose_kernel.cache_clear()
    sru_kernel._template.cache_clear()


def choose(monkeypatch, module: object) -> Kernel | None:
    """Choose for CUDA with a package that is `module`, tried on the CPU."""
    tried = sru_kernel._difference
    monkeypatch.setitem(sys.modules, "sru", module)
    monkeypatch.setattr(sru_kernel, "_difference", lambda kernel, twin, device: tried(kernel, twin, CPU))
    return choose_kernel(Cuda(), _by_torch)  # pyright: ignore[reportArgumentType]


def test_a_cpu_never_imports_the_package(monkeypatch):
    monkeypatch.setattr(sru_kernel, "import_cell", lambda: pytest.fail("imported"))
    assert choose_kernel(CPU, _by_torch) is None
    SruLayer(4, 4)(torch.randn(3, 2, 4))


def test_cuda_takes_the_package_that_agrees(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    kernel = choose(monkeypatch, types.SimpleNamespace(SRUCell=Cell))
    assert kernel == Kernel(Cell)
    assert Cell.calls == 1
    assert "the kernel of the sru package, on cuda" in caplog.text


@pytest.mark.parametrize(
    ("error", "module", "said"),
    [
        (0.0, None, "since the sru package does not run on cuda (import of sru halted"),
        (
            0.0,
            types.SimpleNamespace(SRUCell=lambda *args, **kwargs: 1 / 0),
            "does not run on cuda (division by zero)",
        ),
        (0.01, types.SimpleNamespace(SRUCell=Cell), "since the sru package differs by 0."),
        (float("nan"), types.SimpleNamespace(SRUCell=Cell), "since the sru package differs by nan on cuda"),
    ],
    ids=["absent", "broken", "wrong", "nan"],
)
def test_cuda_falls_back_and_says_why(monkeypatch, caplog, error, module, said):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(Cell, "error", error)
    assert choose(monkeypatch, module) is None
    assert said in caplog.text


def test_a_layer_runs_the_chosen_kernel_with_its_own_parameters(monkeypatch):
    torch.manual_seed(0)
    layer, x = SruLayer(5, 4, bidirectional=True), torch.randn(6, 3, 5)
    mask = torch.arange(6)[:, None] < torch.tensor([6, 3, 1])
    wanted = layer(x, None, mask)
    gradients = torch.autograd.grad(sum(part.square().sum() for part in wanted), list(layer.parameters()))
    before = torch.random.get_rng_state()
    monkeypatch.setattr(sru, "choose_kernel", lambda device, twin: Kernel(Cell))
    given = layer(x, None, mask)
    assert Cell.calls == 1
    torch.testing.assert_close(torch.random.get_rng_state(), before, atol=0, rtol=0)
    torch.testing.assert_close(given, wanted)
    found = torch.autograd.grad(sum(part.square().sum() for part in given), list(layer.parameters()))
    torch.testing.assert_close(found, gradients)
    torch.testing.assert_close(layer(x, torch.ones(3, 8))[1], layer.run(x, torch.ones(3, 8))[1])
    assert list(layer.state_dict()) == ["weight", "weight_c", "bias", "scale_x"]


def test_exports_are_computed_by_the_twin(monkeypatch):
    monkeypatch.setattr(sru, "choose_kernel", lambda device, twin: Kernel(Cell))
    layer, x = SruLayer(4, 4), torch.randn(5, 2, 4)
    wanted = layer.run(x)
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), wanted)
    assert Cell.calls == 0


@pytest.mark.skipif(
    os.environ.get("FOREGATE_TEST_SRU") != "1", reason="importing sru compiles for 30 s; set FOREGATE_TEST_SRU=1"
)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("input_size", [4, 8, 5])
def test_the_package_equals_the_twin_in_values_and_gradients(input_size, bidirectional):
    kernel = Kernel(sru_kernel.import_cell())
    assert sru_kernel._difference(kernel, _by_torch, CPU) < 1e-5
    torch.manual_seed(0)
    layer = SruLayer(input_size, 4, bidirectional=bidirectional)
    x, c0 = torch.randn(6, 3, input_size), torch.randn(3, layer.output_size)
    mask = torch.arange(6)[:, None] < torch.tensor([6, 3, 1])
    sizes, weights = (input_size, 4, bidirectional), {**dict(layer.named_parameters()), "scale_x": layer.scale_x}
    wanted, given = layer.run(x, c0, mask), kernel.run(sizes, weights, x, c0, mask)
    torch.testing.assert_close(given, wanted, atol=1e-5, rtol=0)
    leaves = list(layer.parameters())
    theirs, ours = (torch.autograd.grad(sum(part.sin().sum() for part in out), leaves) for out in (given, wanted))
    torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=1e-5)
