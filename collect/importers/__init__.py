"""Importers: what other tools recorded, as a trace or a load table. One file per format, and a registry.

Source: a file, or a folder of files of one format. Row: what the source counts by: a line of a log, a token of an
array, a layer's counts of a batch. Every row that was read is either kept or dropped for a named reason, and the report
says how many. Worked example: a log of 18,818 rows of one layer, 16,384 of them a warm-up, gives 2,434 tokens.
"""

from __future__ import annotations

from typing import Literal, get_args

from .contract import Importer
from .mixtral_text import MixtralText
from .moe_beyond_csv import MoeBeyondCsv
from .npz_layout import NpzLayout
from .olmoe_logits import OlmoeLogits
from .sglang_dump import SglangDump
from .speculative_jsonl import SpeculativeJsonl
from .switch_counts import SwitchCounts
from .vllm_by_layer import VllmByLayer
from .vllm_jsonl import VllmJsonl
from .vllm_routed_experts import VllmRoutedExperts

FormatName = Literal[
    "mixtral-text",
    "moe-beyond-csv",
    "npz",
    "olmoe-logits",
    "sglang-dump",
    "speculative-moe-jsonl",
    "switch-counts",
    "vllm-jsonl",
    "vllm-jsonl-by-layer",
    "vllm-routed-experts",
]

MEMBERS: tuple[type[Importer], ...] = (
    MixtralText,
    MoeBeyondCsv,
    NpzLayout,
    OlmoeLogits,
    SglangDump,
    SpeculativeJsonl,
    SwitchCounts,
    VllmJsonl,
    VllmByLayer,
    VllmRoutedExperts,
)
IMPORTERS: dict[str, Importer] = {member.name: member() for member in MEMBERS}
assert set(IMPORTERS) == set(get_args(FormatName))
