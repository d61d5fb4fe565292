"""The training loop's view of a predictor: teacher-forced loss, optimizer, schedule, recall on validation sequences.

Knows networks by their contract (batch, token or layer horizon), no family. Its checkpoints hold tensors and plain
values only, so that they load with weights_only=True.
"""

# B batch, T tokens, L MoE layers, E experts, K experts per token

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch
from torch import Tensor

from ..collect.errors import DataError, SettingError
from ..collect.topology import MoeTopology, Stack
from ..collect.trace import SequenceRouting
from ..predictors.base import PredictorSpec
from ..predictors.metrics import RecallMeter, ranks
from ..predictors.network import BatchNetwork, LayerNetwork, Network, NetworkSettings, TokenNetwork
from ..predictors.registry import default_settings, settings_from_json
from ..predictors.rows import RoutingStatistics
from .data import Batch
from .losses import LOSSES, Distillation, discounted_uses, distill_loss, distillation, reuse_loss
from .schedule import factor, parameter_groups, progress, renew_rates

KEY = "foregate"  # our entry in a Lightning checkpoint


class NotANumber(DataError):
    """Stop training whose loss is no number any more, before a checkpoint of it is kept."""


class _Predicted(NamedTuple):
    """What a network said of a batch, [B, T, L, E] each."""

    routing: Tensor
    """Logits at the network's own horizon."""
    used: Tensor
    """1 where the token used the expert."""
    token: Tensor | None = None
    """Logits of the token horizon, where the own one is another."""
    reuse: Tensor | None = None
    """Logits of the tokens after it."""


class PredictorModule(L.LightningModule):
    """Train one network.

    Args:
        network: family and sizes; where not given, the stack decides: `registry.default_settings`.
        learning_rate: highest learning rate; the family's own where not given.
        weight_decay: decay of matrices, the family's own where not given; vectors and embeddings have none.
        lookup_share: share of the learning rate at which embeddings and skip connections learn.
        warmup_share: share of the run in which the learning rate rises; a cosine falls afterwards.
        final_share: share of the learning rate that is left at the end.
        reuse_weight: weight of the reuse head's loss beside that of the routing, where the network has one.
    """

    def __init__(
        self,
        network: NetworkSettings | None = None,
        learning_rate: float | None = None,
        weight_decay: float | None = None,
        lookup_share: float = 0.3,
        warmup_share: float = 0.03,
        final_share: float = 0.02,
        reuse_weight: float = 1.0,
    ) -> None:
        super().__init__()
        for name, value in (
            ("learning_rate", learning_rate),
            ("weight_decay", weight_decay),
            ("lookup_share", lookup_share),
            ("reuse_weight", reuse_weight),
        ):
            if value is not None and value < 0:
                raise SettingError(f"{name} must not be negative, got {value}.")
        for name, value in (("warmup_share", warmup_share), ("final_share", final_share)):
            if not 0 <= value < 1:
                raise SettingError(f"{name} must lie in [0, 1), got {value}.")
        self.given_rates = {
            "learning_rate": learning_rate,
            "weight_decay": weight_decay,
            "lookup_share": lookup_share,
            "warmup_share": warmup_share,
            "final_share": final_share,
            "reuse_weight": reuse_weight,
        }
        self._settings = network
        self.seed = 0  # of what each step draws
        self.data_settings: dict[str, Any] = {}  # where training data came from, kept in checkpoints for the export
        self.sizes: dict[str, list[int]] = {}  # sequences and tokens of each part of it
        self.seen = np.zeros(0, np.int64)  # fingerprints of sequences that a bundle it started from was trained on
        self.meter: RecallMeter | None = None
        self._network: Network | None = None

    def settle(self, stack: Stack, topology: MoeTopology) -> None:
        """Choose the family by the stack, where none was given."""
        if self._settings is None:
            top_k = max(topology.layers[i].top_k for i in topology.layers_of(stack))
            self._settings = default_settings(stack, top_k)

    @property
    def network_settings(self) -> NetworkSettings:
        """Family and sizes, once they were given or settled."""
        assert self._settings is not None, "settle() first"
        return self._settings

    @property
    def rates(self) -> dict[str, float]:
        """The arguments of `__init__` that are numbers."""
        settings = self.network_settings
        return {name: getattr(settings, name) if value is None else value for name, value in self.given_rates.items()}

    @property
    def distillation(self) -> Distillation | None:
        """What is learned from the routers' scores."""
        return distillation(self.network_settings)

    @property
    def network(self) -> Network:
        """The network, once `build` or `load` made it."""
        assert self._network is not None, "build() first"
        return self._network

    def build(
        self,
        spec: PredictorSpec,
        known_ids: np.ndarray,
        statistics: RoutingStatistics | None = None,
        rows: Sequence[SequenceRouting] = (),
    ) -> None:
        """Make the network for a spec; with the statistics of rows, it learns from both what needs no gradients."""
        self._network = self.network_settings.build(spec, known_ids)
        self._known_ids = torch.as_tensor(known_ids, dtype=torch.int64)
        if statistics is not None:
            self._network.learn(rows, statistics)

    def _predict(self, batch: Batch, stride: int) -> _Predicted:
        """Run the network over a batch, fed the true past; `stride` is that of the layer horizon."""
        network, used = self.network, many_hot(batch.experts, self.network.spec.shape[1])
        if isinstance(network, BatchNetwork):
            return _Predicted(network(batch.ids, batch.mask), used)
        assert isinstance(network, TokenNetwork)
        before = many_hot(batch.before, network.spec.shape[1])
        previous = torch.cat([before[:, None], used[:, :-1]], dim=1)
        start = network.start(len(used))
        if isinstance(network, LayerNetwork):
            logits, layer, _ = network.layers(batch.ids, previous, used, start, stride)
            return _Predicted(layer, used, logits.routing, logits.reuse)
        logits, _ = network(batch.ids, previous, start)
        return _Predicted(logits.routing, used, None, logits.reuse)

    def _losses(self, batch: Batch, found: _Predicted) -> dict[str, Tensor]:
        """Give the loss of each head by name: `routing`, and `token`, `reuse` and `distill` where they are wanted."""
        exists, routing = self.network.exists_LE, LOSSES[self.network.settings.link]
        losses = {"routing": routing(found.routing, found.used, exists, batch.scored)}
        if found.token is not None:
            losses["token"] = routing(found.token, found.used, exists, batch.scored)
        if found.reuse is not None:
            assert isinstance(self.network, TokenNetwork)
            after = many_hot(batch.after, self.network.spec.shape[1])
            uses = discounted_uses(found.used, after, self.network.discount)
            losses["reuse"] = self.rates["reuse_weight"] * reuse_loss(found.reuse, uses, exists, batch.scored)
        if self.distillation is not None and batch.scores is not None:
            top, weight = self.distillation
            losses["distill"] = weight * distill_loss(found.routing, batch.scores, exists, batch.scored, top)
        return losses

    def training_step(self, batch: Batch, batch_index: int) -> Tensor:
        """Give the loss of a batch."""
        # each step draws from a seed of its own, so that a resumed run draws what an uninterrupted one does
        drawn = np.random.SeedSequence([self.seed, self.global_step, self.global_rank])
        torch.manual_seed(int(drawn.generate_state(1, np.uint64)[0]) >> 1)
        reach = self.network.reach if isinstance(self.network, LayerNetwork) else 1
        stride = int(torch.randint(1, reach + 1, ()))
        losses = self._losses(batch, self._predict(batch, stride))
        loss = torch.stack(list(losses.values())).sum()
        self._check(losses, f"of step {self.global_step + 1}")
        shared: dict[str, Any] = {"batch_size": len(batch.ids), "sync_dist": self.trainer.world_size > 1}
        self.log("loss", loss, prog_bar=True, **shared)
        if len(losses) > 1:
            self.log_dict({f"loss_{name}": value for name, value in losses.items()}, **shared)
        return loss

    def _check(self, losses: Mapping[str, Tensor], when: str) -> None:
        for name, value in losses.items():
            if not bool(torch.isfinite(value)):
                raise NotANumber(
                    f"The loss ({name}) {when} is {value.item()}; make model.learning_rate, which is "
                    f"{self.rates['learning_rate']:g}, smaller, or run foregate validate on the trace."
                )

    def on_validation_epoch_start(self) -> None:
        """Start measuring."""
        self.meter = RecallMeter(self.network.spec.shape[1])

    def validation_step(self, batch: Batch, batch_index: int) -> None:
        """Rank the true experts of a batch."""
        assert self.meter is not None
        found = self._predict(batch, stride=1)
        losses = self._losses(batch, found)
        self._check(losses, f"of validation after step {self.global_step}")
        for name, value in losses.items():
            shared = self.trainer.world_size > 1
            self.log(f"validation_loss_{name}", value, batch_size=len(batch.ids), sync_dist=shared)
        scores = self.network.probabilities(found.routing).float().cpu().numpy()
        experts, scored = batch.experts.cpu().numpy(), batch.scored.cpu().numpy().copy()
        scored[batch.first.cpu().numpy(), 0] = False
        if (
            found.token is not None and experts.shape[2] > 1
        ):  # of the layer horizon: no layer stands before the first, as `scoring` has it
            experts = np.where(np.arange(experts.shape[2])[:, None] == 0, -1, experts)
        for index in range(len(scores)):
            kept = scored[index]
            self.meter.add_ranks(ranks(scores[index][kept], experts[index][kept]))

    def on_validation_epoch_end(self) -> None:
        """Log recall when naming each layer's own top-k, over the sequences of all ranks."""
        assert self.meter is not None
        if self.trainer.world_size > 1:
            counts = torch.from_numpy(np.sum(self.meter.counts, axis=0)).to(self.device)
            torch.distributed.all_reduce(counts)
            self.meter.counts = [counts.cpu().numpy()]
        self.log("validation_recall", self.meter.recall([int(k) for k in self.network.top_k_L]), prog_bar=True)

    def configure_optimizers(self) -> Any:
        """Give AdamW and a schedule that follows `progress`, so that any limit ends with a small learning rate."""
        optimizer = torch.optim.AdamW(parameter_groups(self.named_parameters(), self.rates))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: factor(progress(self.trainer), self.rates))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what rebuilds the network, as plain values."""
        spec = self.network.spec
        checkpoint[KEY] = {
            "settings": self.network_settings.to_json(),
            "rates": self.rates,
            "spec": spec.to_json(),
            "known_ids": self._known_ids,
            "data": self.data_settings,
            "sizes": self.sizes,
            "seen": torch.from_numpy(self.seen),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on with this module's rates, whatever the checkpoint's were."""
        renew_rates(checkpoint, checkpoint[KEY]["rates"], parameter_groups([], self.rates))

    @classmethod
    def load(cls, path: str | Path) -> PredictorModule:
        """Rebuild a module from a checkpoint.

        Raises:
            DataError: if the file is missing or no checkpoint of foregate, or of a family that is not the one it names.
        """
        stored, weights = read_checkpoint(path)
        try:
            spec = PredictorSpec.from_json(stored["spec"])
            module = cls(settings_from_json(spec.family, stored["settings"]), **stored["rates"])
            module.build(spec, stored["known_ids"].numpy())
            module.load_state_dict(weights)
            module.data_settings, module.sizes = stored["data"], stored["sizes"]
            module.seen = stored["seen"].numpy()
        except (SettingError, RuntimeError, TypeError, KeyError) as error:
            reason = str(error).splitlines()[0].rstrip(".:")
            raise DataError(
                f"{path} holds no network that this version of foregate builds ({reason}); train it again."
            ) from error
        return module


def read_checkpoint(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Give what a checkpoint says of its module, and the weights.

    Raises:
        DataError: if the file is missing or no checkpoint of foregate.
    """
    try:
        checkpoint = torch.load(Path(path), map_location="cpu", weights_only=True)
        return checkpoint[KEY], checkpoint["state_dict"]
    except Exception as error:  # what torch.load raises depends on what the file holds instead
        raise DataError(
            f"{path} is no checkpoint of foregate train ({type(error).__name__}); give foregate export another .ckpt "
            "file of its run, or leave --resume out to train anew."
        ) from error


def many_hot(experts: Tensor, num_experts: int) -> Tensor:
    """Give float32 [..., E]: 1 where the token uses the expert, from ids [..., K] with -1 for none."""
    ids = experts.long()
    out = torch.zeros(*ids.shape[:-1], num_experts + 1, device=ids.device)
    out.scatter_(-1, torch.where(ids < 0, num_experts, ids), 1.0)
    return out[..., :num_experts]
