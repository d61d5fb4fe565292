"""What a training epoch of the SRU predictor takes beside one of the LSTM predictor, equally wide. Knows no trainer.

Both arms see the same batches, in one process and in turns; each round gives one ratio, so that whatever else the
machine does meets both alike. CPU time, of all threads, is given beside the time that passed: it hardly depends on what
else runs. A step is forward, loss, backward, clipping and AdamW, as in training; validation and checkpoints are not
counted.
"""

# B batch, T tokens, L MoE layers, K experts per token

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...collect.errors import SettingError
from ...collect.smoke import smoke
from ...collect.topology import MoeLayer, MoeTopology, Stack
from ...predictors.base import PredictorSpec
from ...predictors.lstm_sparsemax import LstmSparsemaxSettings
from ...predictors.network import BatchNetwork, NetworkSettings
from ...predictors.sru_attention import SruAttentionSettings
from ..batch import Batch, Chunks
from ..data import TraceData
from ..losses import LOSSES
from ..module import many_hot

DRAWN = MoeTopology(layers=tuple(MoeLayer(stack="encoder", block=b, num_experts=32, top_k=1) for b in (1, 3)))
DRAWN_IDS = 8192
CLIP = 1.0


@dataclass(frozen=True, kw_only=True)
class EpochBench:
    """Measure how long an epoch of the SRU predictor takes beside one of the LSTM predictor, both a batch ahead."""

    trace: str | None = None
    """Trace whose sequences are trained on; drawn ones, about as long as SST-2's phrases, without it."""
    stack: Stack = "encoder"
    """Stack of the trace; its layers read both directions in an encoder."""
    hidden: int = 256
    """Width of SRU and LSTM layers, both directions together."""
    num_layers: int = 2
    """Layers of each."""
    batch_size: int = 64
    """Sequences of a batch."""
    batches: int = 24
    """Batches of an epoch at most."""
    rounds: int = 9
    """Rounds; each trains both arms for an epoch, and the arm that begins changes from round to round."""
    threads: int = 1
    """Threads of torch."""

    def __post_init__(self) -> None:
        for name in ("hidden", "num_layers", "batch_size", "batches", "rounds", "threads"):
            if getattr(self, name) < 1:
                raise SettingError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.stack == "causal":
            raise SettingError("stack must be encoder or decoder, which are predicted a batch ahead, got 'causal'.")


class Spent(NamedTuple):
    """Say what one epoch took."""

    seconds: float
    cpu_seconds: float
    """Of all threads of the process."""


def bench(
    settings: EpochBench, machine: dict[str, Any], now: Callable[[], float] = time.perf_counter
) -> dict[str, Any]:
    """Train both arms in turns and give medians, spread and the ratio: epoch of the SRU / epoch of the LSTM.

    Args:
        settings: what is measured.
        machine: what the result says of where it was made.
        now: seconds that have passed.

    Raises:
        TraceError, DataError: if the trace cannot be read or lacks the stack.
        SettingError: if a setting is none that the predictors have.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            batches, topology = _drawn(settings) if settings.trace is None else _recorded(settings)
            sru = SruAttentionSettings(link="softmax", hidden=settings.hidden, num_layers=settings.num_layers)
            lstm = LstmSparsemaxSettings(link="softmax", hidden=settings.hidden, num_layers=settings.num_layers)
            arms = {
                "sru": _Arm(sru, topology, settings.stack, batches),
                "lstm": _Arm(lstm, topology, settings.stack, batches),
            }
            spent = _in_turns(arms, smoke(settings.rounds, 2), now)
    finally:
        torch.set_num_threads(before)
    return _report(arms, spent, batches, machine)


def describe(result: dict[str, Any]) -> str:
    """Say the result in lines."""
    lines = [
        f"{name:<5} {arm['s_per_epoch']:>7.2f} s an epoch ({arm['s_per_epoch_spread'][0]:.2f} to "
        f"{arm['s_per_epoch_spread'][1]:.2f}), {arm['cpu_s_per_epoch']:.2f} s of CPU, {arm['parameters']:,} parameters"
        for name, arm in result["arms"].items()
    ]
    low, high = result["ratio_spread"]
    return "\n".join(
        [
            f"{result['sequences']} sequences, {result['tokens']} tokens, {result['batches']} batches an epoch",
            *lines,
            f"sru / lstm {result['ratio']:.3f} (middle half of {result['rounds']} rounds {low:.3f} to {high:.3f}), "
            f"{result['cpu_ratio']:.3f} in CPU time",
        ]
    )


class _Arm:
    """One predictor and its optimizer."""

    def __init__(self, settings: NetworkSettings, topology: MoeTopology, stack: Stack, batches: list[Batch]) -> None:
        ids = torch.cat([batch.ids[batch.mask] for batch in batches]).unique()
        known = ids[ids >= 0].numpy()
        spec = PredictorSpec(
            family=settings.family, horizon="batch", topology=topology, stack=stack, vocab_size=int(known.max()) + 1
        )
        network = settings.build(spec, known)
        assert isinstance(network, BatchNetwork)
        self.network, self.batches = network.train(), batches
        self.optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)

    def epoch(self) -> None:
        """Train for one."""
        for batch in self.batches:
            self._step(batch)

    def _step(self, batch: Batch) -> Tensor:
        network = self.network
        used = many_hot(batch.experts, network.spec.shape[1])
        loss = LOSSES[network.settings.link](network(batch.ids, batch.mask), used, network.exists_LE, batch.scored)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), CLIP)
        self.optimizer.step()
        return loss.detach()


def _recorded(settings: EpochBench) -> tuple[list[Batch], MoeTopology]:
    """Cut a trace's training sequences, in an order of their own, into batches."""
    assert settings.trace is not None
    data = TraceData(settings.trace, stack=settings.stack)
    data.setup()
    rows = data.rows["training"]
    chunks = Chunks(rows, chunk_tokens=512, context_tokens=0)
    order = np.random.default_rng(0).permutation(len(chunks))[: settings.batch_size * smoke(settings.batches, 2)]
    groups = [order[start : start + settings.batch_size] for start in range(0, len(order), settings.batch_size)]
    return [chunks.collate([chunks[int(index)] for index in group]) for group in groups], data.header.topology


def _drawn(settings: EpochBench) -> tuple[list[Batch], MoeTopology]:
    """Draw batches: median length 9, mean 12, as SST-2's phrases."""
    rng = np.random.default_rng(0)
    num_layers = DRAWN.num_layers
    batches = []
    for _ in range(smoke(settings.batches, 2)):
        lengths = np.clip(rng.lognormal(np.log(9), 0.75, settings.batch_size), 2, 60).astype(int)
        shape = (settings.batch_size, int(lengths.max()))
        mask = torch.from_numpy(np.arange(shape[1]) < lengths[:, None])
        experts = torch.from_numpy(rng.integers(0, DRAWN.max_experts, (*shape, num_layers, 1)).astype(np.int16))
        none = torch.full((settings.batch_size, num_layers, 1), -1, dtype=torch.int16)
        batches.append(
            Batch(
                ids=torch.from_numpy(rng.integers(0, DRAWN_IDS, shape)).masked_fill(~mask, -1),
                experts=experts.masked_fill(~mask[..., None, None], -1),
                before=none,
                after=none[:, None][:, :0],
                mask=mask,
                scored=mask,
                first=torch.ones(settings.batch_size, dtype=torch.bool),
            )
        )
    return batches, DRAWN


def _in_turns(arms: dict[str, _Arm], rounds: int, now: Callable[[], float]) -> dict[str, list[Spent]]:
    spent: dict[str, list[Spent]] = {name: [] for name in arms}
    names = list(arms)
    for index in range(rounds + 1):
        for name in names if index % 2 else names[::-1]:
            start, cpu_start = now(), time.process_time()
            arms[name].epoch()
            spent[name].append(Spent(now() - start, time.process_time() - cpu_start))
    return {name: values[1:] for name, values in spent.items()}  # the first round warms up


def _report(
    arms: dict[str, _Arm], spent: dict[str, list[Spent]], batches: list[Batch], machine: dict[str, Any]
) -> dict[str, Any]:
    found = {}
    for name, values in spent.items():
        seconds = [item.seconds for item in values]
        found[name] = {
            "s_per_epoch": statistics.median(seconds),
            "s_per_epoch_spread": [min(seconds), max(seconds)],
            "cpu_s_per_epoch": statistics.median(item.cpu_seconds for item in values),
            "parameters": sum(parameter.numel() for parameter in arms[name].network.parameters()),
        }
    pairs = list(zip(spent["sru"], spent["lstm"], strict=True))
    ratios = [sru.seconds / lstm.seconds for sru, lstm in pairs]
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {
        "arms": found,
        "ratio": statistics.median(ratios),
        "ratio_spread": [low, high],
        "cpu_ratio": statistics.median(sru.cpu_seconds / max(lstm.cpu_seconds, 1e-9) for sru, lstm in pairs),
        "rounds": len(ratios),
        "batches": len(batches),
        "sequences": sum(len(batch.ids) for batch in batches),
        "tokens": int(sum(batch.mask.sum() for batch in batches)),
        "machine": machine,
    }
