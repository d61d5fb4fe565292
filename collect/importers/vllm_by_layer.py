"""vLLM logs of one layer per run, read together: `vllm-jsonl-by-layer`.

Whether row n of one run is the token of row n of another cannot be seen in such logs: they hold no token ids, and
`req_id` is always the same. In the runs of Qwen1.5-MoE that this was tried on, layers 8, 12, 18 and 23 correlate best
row by row, but layer 0 correlates best with the *next* row of each of them. So runs are never joined: every run's
forwards are sequences of their own, in which the layers that the run did not log are -1.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .vllm_jsonl import VllmJsonl, logged_layers


class VllmByLayer(VllmJsonl):
    """Read several files that logged different layers."""

    name = "vllm-jsonl-by-layer"
    example = "files of vllm-jsonl, each of another layer"

    def claims_together(self, paths: Sequence[Path]) -> bool:
        """Say whether files logged different layers."""
        return len({str(logged_layers(path)) for path in paths}) > 1
