"""Expert ids and the MoE layers of a model. Knows nothing of tensors, files or traces.

MoE layer l: the l-th *sparse* layer of the model, encoder layers before decoder layers. DeepSeek-V2-Lite has 27
blocks, 1 of them dense, so l runs over 0..25. Routed experts only: shared experts are never cached or traced.
Flat index: (layer, expert) as one integer, layers in order, so that comparing flat indices compares (layer, expert).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

from .errors import SettingError
from .wording import counted

Stack = Literal["causal", "encoder", "decoder"]
STACKS: tuple[Stack, ...] = get_args(Stack)


class ExpertId(NamedTuple):
    """Name one routed expert."""

    layer: int
    """MoE-layer index, not block index."""
    expert: int
    """Logical expert id inside the layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeLayer:
    """Describe one MoE layer."""

    stack: Stack
    """Which stack of the model the layer stands in."""
    block: int
    """Index of its block inside that stack, dense blocks counted."""
    num_experts: int
    """Routed experts of the layer."""
    top_k: int
    """Experts that each token chooses."""

    def __post_init__(self) -> None:
        if self.stack not in STACKS:
            raise SettingError(f"stack must be one of {', '.join(STACKS)}, got {self.stack!r}.")
        if not 1 <= self.top_k <= self.num_experts:
            raise SettingError(
                f"top_k must lie in 1..{self.num_experts} (num_experts), got {self.top_k} in block {self.block}."
            )


@dataclass(frozen=True, kw_only=True)
class MoeTopology:
    """List the MoE layers of a model; layers may differ in size and top-k."""

    layers: tuple[MoeLayer, ...]
    """MoE layers in order, encoder before decoder."""
    hidden_size: int | None = None
    """Width of the residual stream; None where an imported trace does not know it."""
    expert_bytes: int | None = None
    """Bytes of one expert in the model's own dtype; None where unknown."""
    dense_bytes: int | None = None
    """Bytes of dense parameters that a token reads; None where unknown."""

    def __post_init__(self) -> None:
        if not self.layers:
            raise SettingError("A topology needs at least one MoE layer, got none.")

    @classmethod
    def uniform(
        cls, num_layers: int, num_experts: int, top_k: int, *, stack: Stack = "causal", **sizes: int | None
    ) -> MoeTopology:
        """Build a topology of equal layers, block i being MoE layer i."""
        layers = tuple(MoeLayer(stack=stack, block=i, num_experts=num_experts, top_k=top_k) for i in range(num_layers))
        return cls(layers=layers, **sizes)

    @property
    def num_layers(self) -> int:
        """MoE layers of all stacks."""
        return len(self.layers)

    @property
    def max_experts(self) -> int:
        """Experts of the largest layer: the E of dense [L, E] arrays."""
        return max(layer.num_experts for layer in self.layers)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Flat index of expert 0 of each layer, and the number of all experts at the end."""
        total, offsets = 0, [0]
        for layer in self.layers:
            total += layer.num_experts
            offsets.append(total)
        return tuple(offsets)

    @property
    def num_experts(self) -> int:
        """Routed experts of the whole model."""
        return self.offsets[-1]

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """Stacks that have MoE layers, in order."""
        return tuple(dict.fromkeys(layer.stack for layer in self.layers))

    def layers_of(self, stack: Stack) -> list[int]:
        """List the MoE-layer indices of a stack."""
        return [index for index, layer in enumerate(self.layers) if layer.stack == stack]

    def flat(self, layer: int, expert: int) -> int:
        """Give the flat index of an expert."""
        return self.offsets[layer] + expert

    @cached_property
    def ids(self) -> tuple[ExpertId, ...]:
        """Every expert in flat order."""
        return tuple(
            ExpertId(index, expert) for index, layer in enumerate(self.layers) for expert in range(layer.num_experts)
        )

    def __iter__(self) -> Iterator[ExpertId]:
        return iter(self.ids)

    def same_routing(self, other: MoeTopology) -> bool:
        """Say whether two topologies have the same layers, whatever their byte sizes."""
        return self.layers == other.layers

    def describe(self) -> str:
        """Describe the layers in a few words, for messages: '6 causal layers x 32 experts, top-4'."""
        parts = []
        for stack in self.stacks:
            chosen = [self.layers[i] for i in self.layers_of(stack)]
            experts = sorted({layer.num_experts for layer in chosen})
            top_k = sorted({layer.top_k for layer in chosen})
            parts.append(
                f"{counted(len(chosen), f'{stack} layer')} x {'/'.join(map(str, experts))} experts, "
                f"top-{'/'.join(map(str, top_k))}"
            )
        return "; ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Give the topology as plain JSON values."""
        return {
            "layers": [asdict(layer) for layer in self.layers],
            "hidden_size": self.hidden_size,
            "expert_bytes": self.expert_bytes,
            "dense_bytes": self.dense_bytes,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> MoeTopology:
        """Read what `to_json` gave.

        Raises:
            SettingError: if a layer is out of range or the value is no topology.
        """
        try:
            layers = tuple(MoeLayer(**layer) for layer in value["layers"])
            sizes = {name: value.get(name) for name in ("hidden_size", "expert_bytes", "dense_bytes")}
            numbers = [number for layer in layers for number in (layer.block, layer.num_experts, layer.top_k)]
            odd = [item for item in (*numbers, *sizes.values()) if not (item is None or isinstance(item, int))]
            if odd or None in numbers:
                raise TypeError(f"{str([*odd, None][0])[:80]!r} is no whole number")
        except (KeyError, TypeError, AttributeError) as error:
            raise SettingError(f"This is no topology ({error}); expected an object with a list 'layers'.") from error
        return cls(layers=layers, **sizes)
