"""A family of its user's own, registered as the README says: recorded, packed, run and verified."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from foregate.collect import kinds, tiny_models
from foregate.collect.architectures import find_moe_modules
from foregate.collect.errors import ModelError, SettingError
from foregate.collect.kinds.fused import FusedKind
from foregate.collect.recorder import RoutingRecorder
from foregate.runtime import layers
from foregate.runtime.layers import register_family
from foregate.runtime.layers.loop import LoopLayer
from foregate.runtime.pack import pack
from foregate.runtime.verify import verify
from torch import nn
from transformers.models.qwen3_moe import modeling_qwen3_moe


class TeamExperts(nn.Module):
    """Experts of a form of their own: squared ReLU without a gate, in a plain loop."""

    def __init__(self, config) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        width, hidden = config.moe_intermediate_size, config.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(self.num_experts, 2 * width, hidden))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, hidden, 2 * width))

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            place, token = torch.where(ids.t() == expert)
            if len(token):
                part = F.linear(hidden[token], self.gate_up_proj[expert]).relu().square()
                part = F.linear(part, self.down_proj[expert]) * weights[token, place, None]
                out.index_add_(0, token, part.to(out.dtype))
        return out


class TeamKind(FusedKind):
    """Stacked parameters, called with (hidden, ids, weights)."""

    name = "team"

    def matches(self, module: nn.Module) -> bool:
        return type(module).__name__ == "TeamExperts"


class TeamLayer(LoopLayer):
    """One expert on its rows, with the module's own operations."""

    kind = "team"

    def expert_rows(self, tensors, x_MH: torch.Tensor) -> torch.Tensor:
        return F.linear(F.linear(x_MH, tensors["gate_up_proj"]).relu().square(), tensors["down_proj"])


@pytest.fixture(autouse=True)
def _team(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Qwen3-MoE be built with the other experts; registries are as before afterwards."""
    monkeypatch.setattr(modeling_qwen3_moe, "Qwen3MoeExperts", TeamExperts)
    monkeypatch.setattr(kinds, "KINDS", dict(kinds.KINDS))
    monkeypatch.setattr(layers, "LAYERS", dict(layers.LAYERS))


def test_it_is_refused_before_and_its_parts_are_named() -> None:
    with pytest.raises(ModelError, match=r"TeamExperts.*routers: Qwen3MoeTopKRouter"):
        find_moe_modules(tiny_models.build("qwen3_moe"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_recorded_packed_and_verified(dtype, tmp_path) -> None:
    register_family(TeamKind(), TeamLayer)
    model = tiny_models.build("qwen3_moe").to(dtype=dtype)
    with torch.no_grad(), RoutingRecorder(model, scores=True) as recorder:
        model(input_ids=torch.arange(4, 14)[None])
        assert [layer.experts.shape for layer in recorder.take()] == [(10, 3), (10, 3)]
    model.save_pretrained(tmp_path / "model")
    pack(tmp_path / "model", tmp_path / "store")
    for reference in (None, tmp_path / "model"):
        report = verify(tmp_path / "store", tokens=6, slots=4, reference=reference)
        assert report.identical, report.describe()
        assert report.misses > report.slots


def test_a_family_without_a_layer_is_recorded_only(tmp_path) -> None:
    register_family(TeamKind())
    model = tiny_models.build("qwen3_moe")
    assert find_moe_modules(model)[0].kind == "team"
    model.save_pretrained(tmp_path / "model")
    pack(tmp_path / "model", tmp_path / "store")
    with pytest.raises(ModelError, match="can be recorded but not offloaded"):
        verify(tmp_path / "store", tokens=2)


def test_kind_and_layer_must_agree() -> None:
    class Other(TeamLayer):
        kind = "other"

    with pytest.raises(SettingError, match="layer must be of the kind 'team', got one of 'other'"):
        register_family(TeamKind(), Other)
    assert "team" not in kinds.KINDS
