"""What an import may be told that its source does not say. Knows no formats."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import SettingError


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportConfig:
    """Import what another tool recorded, as a trace or, where it counted only, as a load table."""

    source: str
    """File, or folder of files of one format."""
    out: str
    """Folder to write, which must not exist yet."""
    format: str = ""
    """Name of the format; empty: found from the files themselves."""
    experts: int | None = None
    """Routed experts of each layer; by default 1 + the largest id in the source."""
    top_k: int | None = None
    """Experts that each token chooses, where the source does not say it; else what it must have."""
    blocks: list[int] | None = None
    """Block index of each MoE layer, as [1,2,3]; by default as the source numbers them."""
    model: str = ""
    """Name of the model; by default as the source says."""
    tokenizer: str = ""
    """Tokenizer folder or name, for formats that hold tokens as text; without it they get no token ids."""

    def __post_init__(self) -> None:
        for name in ("experts", "top_k"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SettingError(f"{name} must be at least 1, got {value}.")
        if self.experts is not None and self.experts > 2**15:
            raise SettingError(f"experts must be at most {2**15}, since ids are stored as int16, got {self.experts}.")
        blocks = self.blocks
        if blocks is not None and (not blocks or blocks[0] < 0 or sorted(set(blocks)) != blocks):
            raise SettingError(f"blocks must be rising numbers from 0 on, got {blocks}.")
