"""Expert kernels: one contract over the products, and a choice that holds on inputs the probes did not have."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from foregate.collect import tiny_models
from foregate.collect.architectures import expert_tensors, find_moe_modules
from foregate.collect.tiny_models import special
from foregate.runtime import kernels
from foregate.runtime.blocks import fill, layout_of, views
from foregate.runtime.kernels import PRODUCTS, Kernel, choose_kernel, expert_rows, grouped_product, loop_product
from transformers.integrations.moe import grouped_mm_experts_forward

FUSED = sorted(set(tiny_models.FORMS) - set(special.FAMILIES))
DTYPES = [torch.float32, torch.bfloat16]


def experts_module(name: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """Give the first experts module of a tiny model."""
    model = tiny_models.build(name, **overrides).to(dtype)
    return model.get_submodule(find_moe_modules(model)[0].name)


def slots_of(module: Any) -> list[dict[str, torch.Tensor]]:
    """Copy every expert into aligned memory of its own, as slots are."""
    layout = layout_of(expert_tensors(module, "fused", 0))
    found = []
    for expert in range(module.num_experts):
        slot = torch.empty(layout.nbytes, dtype=torch.uint8).numpy().data
        fill(slot, layout, expert_tensors(module, "fused", expert))
        found.append(views(slot, layout))
    return found


def chosen(module: Any) -> Kernel:
    return choose_kernel(module, layout_of(expert_tensors(module, "fused", 0)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("name", sorted(PRODUCTS))
def test_product(name: str, rows: int, transposed: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    x_MI = torch.randn(rows, 16, generator=generator).to(dtype)
    weight = torch.randn(16, 24, generator=generator).to(dtype)
    found = PRODUCTS[name](x_MI, weight if transposed else weight.t().contiguous(), transposed)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), x_MI.double() @ weight.double(), rtol=2e-2, atol=5e-2)
    assert found.is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FUSED)
def test_the_chosen_kernel_gives_the_resident_model_s_bits(name: str, dtype: torch.dtype) -> None:
    module = experts_module(name, dtype)
    kernel, slots = chosen(module), slots_of(module)
    generator = torch.Generator().manual_seed(9)
    for num_tokens in (1, 2, 3, 7, 17, 51):
        first = slots[0]["gate_up_proj" if module.has_gate else "up_proj"]
        x_TH = torch.randn(num_tokens, first.shape[0 if module.is_transposed else 1], generator=generator).to(dtype)
        ids_T1 = torch.randint(0, module.num_experts, (num_tokens, 1), generator=generator)
        ids_S, perm = torch.sort(ids_T1[:, 0])
        with torch.no_grad():
            expected = grouped_mm_experts_forward(module, x_TH, ids_T1, torch.ones(num_tokens, 1, dtype=dtype))
            for expert in ids_S.unique().tolist():
                where = torch.where(ids_S == expert)[0]
                rows = slice(int(where[0]), int(where[-1]) + 1)
                found = expert_rows(module, slots[expert], x_TH[perm], rows, kernel)
                found = module.post_expert_norm(found) if module.has_post_expert_norm else found
                assert torch.equal(found, expected[perm[rows]])


def test_the_choice_is_logged_with_its_reason_and_leaves_no_trace(caplog: pytest.LogCaptureFixture) -> None:
    module = experts_module("qwen3_moe")
    before, state = {name: value.clone() for name, value in module.named_parameters()}, torch.random.get_rng_state()
    with caplog.at_level(logging.INFO, logger=kernels.__name__):
        kernel = chosen(module)
    assert kernel.name == "loop"
    assert caplog.messages == [f"expert kernel loop, row gate: {kernel.reason}"]
    assert kernel.reason == "equal to grouped_mm bit for bit on 6 probes (torch.float32, 8192 bytes)"
    assert torch.equal(state, torch.random.get_rng_state())
    assert module.num_experts == 8
    assert all(torch.equal(before[name], value) for name, value in module.named_parameters())


def test_a_product_with_other_bits_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def sloppy(x_MI: torch.Tensor, weight: torch.Tensor, transposed: bool) -> torch.Tensor:
        return loop_product(x_MI, weight, transposed) * (1 + 1e-6)

    monkeypatch.setattr(kernels, "PRODUCTS", {"sloppy": sloppy, "grouped": grouped_product})
    assert chosen(experts_module("qwen3_moe")).name == "grouped"


def test_where_nothing_agrees_the_resident_model_s_own_is_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernels, "PRODUCTS", {"sloppy": lambda *args: loop_product(*args) * (1 + 1e-6)})
    with caplog.at_level(logging.WARNING, logger=kernels.__name__):
        kernel = chosen(experts_module("qwen3_moe"))
    assert (kernel.name, kernel.product) == ("grouped", grouped_product)
    assert "no product gave the probes' bits" in caplog.text


def test_where_grouped_mm_does_not_run_the_loop_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    module = experts_module("qwen3_moe", torch.bfloat16, moe_intermediate_size=17)
    with caplog.at_level(logging.WARNING, logger=kernels.__name__):
        kernel = chosen(module)
    assert (kernel.name, kernel.product) == ("loop", loop_product)
    assert "grouped_mm does not run on this layout" in caplog.text
