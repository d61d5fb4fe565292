"""Topologies: order, flat indices, JSON, and what is refused."""

from __future__ import annotations

import pytest
from foregate.collect.errors import SettingError
from foregate.collect.topology import ExpertId, MoeLayer, MoeTopology


def test_flat_indices_follow_layer_and_expert(topology) -> None:
    assert topology.offsets == (0, 8, 14, 18)
    assert topology.num_experts == len(topology.ids) == 18
    assert topology.max_experts == 8
    assert list(topology) == sorted(topology.ids)
    for index, (layer, expert) in enumerate(topology):
        assert topology.flat(layer, expert) == index
    assert topology.ids[9] == ExpertId(1, 1)


def test_json_round_trip(topology) -> None:
    assert MoeTopology.from_json(topology.to_json()) == topology
    for value in ({}, {"layers": [{}]}, {"layers": 5}, None, {"layers": [{"stack": "causal", "block": 0, "wrong": 1}]}):
        with pytest.raises(SettingError, match="This is no topology"):
            MoeTopology.from_json(value)  # type: ignore[arg-type]


def test_description_and_comparison(topology) -> None:
    assert topology.describe() == "3 causal layers x 4/6/8 experts, top-1/2/3"
    other = MoeTopology(layers=topology.layers)
    assert other != topology
    assert other.same_routing(topology)
    assert not MoeTopology.uniform(3, 8, 2).same_routing(topology)
    pair = MoeTopology(
        layers=(
            MoeLayer(stack="encoder", block=1, num_experts=4, top_k=1),
            MoeLayer(stack="decoder", block=1, num_experts=4, top_k=1),
        )
    )
    assert pair.stacks == ("encoder", "decoder")
    assert pair.layers_of("decoder") == [1]
    assert pair.describe() == "1 encoder layer x 4 experts, top-1; 1 decoder layer x 4 experts, top-1"


def test_values_out_of_range_are_refused() -> None:
    with pytest.raises(SettingError, match="stack must be one of causal, encoder, decoder, got 'sideways'"):
        MoeLayer(stack="sideways", block=0, num_experts=4, top_k=1)  # type: ignore[arg-type]
    for top_k in (0, 5):
        with pytest.raises(SettingError, match=rf"top_k must lie in 1\.\.4 \(num_experts\), got {top_k} in block 2"):
            MoeLayer(stack="causal", block=2, num_experts=4, top_k=top_k)
    with pytest.raises(SettingError, match="at least one MoE layer"):
        MoeTopology(layers=())
