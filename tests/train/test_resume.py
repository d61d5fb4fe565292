"""A run that was stopped and resumed ends with the weights of one that was not, to the last bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from foregate.collect.errors import DataError, SettingError, TraceError
from foregate.collect.lock import WriterLock
from foregate.predictors.sru_attention import SruAttentionSettings
from foregate.train.data import TraceData
from foregate.train.export import data_of as data_again
from foregate.train.fit import FitSettings, fit
from foregate.train.module import NotANumber, PredictorModule
from foregate.train.starting_point import start_anew

SMALL = SruAttentionSettings(embedding=8, hidden=16, attention=8, window=8, dropout=0.3, forget=0.2, discount=0.5)
LONG = {"max_minutes": 600.0, "max_epochs": 1000}  # so that steps alone decide how far a run is


class Stopped(Exception):
    """Ends a run from outside."""


def data_of(trace) -> TraceData:
    return TraceData(trace, batch_tokens=128, chunk_tokens=16, context_tokens=4)


def weights(module: PredictorModule) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.network.state_dict().items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class Stoppable(PredictorModule):
    """Trains until a step, then is stopped in the middle of it."""

    stop: int | None = None

    def training_step(self, batch, batch_index):
        if self.global_step == self.stop:
            raise Stopped
        return super().training_step(batch, batch_index)


def run_until(trace, folder, settings: FitSettings, stop: int | None = None, **options) -> PredictorModule:
    """Train and give the module as it was at the end."""
    module = Stoppable(SMALL, learning_rate=0.01)
    module.stop = stop
    fit(data_of(trace), module, folder / "b", settings, run_dir=folder / "run", **options)
    return module


@pytest.fixture
def batches(trace) -> int:
    """Give the batches of an epoch."""
    return len(data_of(trace).train_dataloader())


@pytest.mark.parametrize("stops", [[5], [9], ["epoch"], ["epoch + 1"], [7, 13]])
def test_a_stopped_run_ends_as_if_it_had_not_been_stopped(stops, batches, trace, no_export, tmp_path):
    every = batches if "epoch" in str(stops[0]) else 3
    settings = FitSettings(max_steps=batches + 9, validate_steps=every, **LONG)
    assert batches > 4
    wanted = weights(run_until(trace, tmp_path / "whole", settings))
    for index, stop in enumerate(stops):
        step = {"epoch": batches, "epoch + 1": batches + 1}.get(stop, stop)
        with pytest.raises(Stopped):
            run_until(trace, tmp_path / "cut", settings, stop=step, resume=index > 0)
    resumed = run_until(trace, tmp_path / "cut", settings, resume=True)
    assert resumed.global_step == batches + 9
    assert equal(weights(resumed), wanted)
    other = run_until(trace, tmp_path / "other", FitSettings(max_steps=batches + 9, seed=1, **LONG))
    assert not equal(weights(other), wanted)


def test_a_resumed_run_takes_new_rates(trace, no_export, tmp_path):
    settings = FitSettings(max_steps=8, validate_steps=4, **LONG)
    with pytest.raises(Stopped):
        run_until(trace, tmp_path, settings, stop=5)
    module = PredictorModule(SMALL, learning_rate=0.001, weight_decay=0.0, final_share=0.99)
    fit(data_of(trace), module, tmp_path / "b", settings, run_dir=tmp_path / "run", resume=True)
    groups = module.trainer.optimizers[0].param_groups
    assert [group["weight_decay"] for group in groups] == [0.0, 0.0, 0.0]
    assert groups[1]["lr"] == pytest.approx(0.001 * 0.99)


@pytest.mark.parametrize("where", ["training", "validation"])
def test_a_loss_that_is_no_number_ends_the_run_and_spares_its_checkpoint(where, trace, no_export, tmp_path):
    module, losses = PredictorModule(SMALL), PredictorModule._losses
    settings = FitSettings(max_steps=8, validate_steps=2, **LONG)

    def spoiled(batch, found):
        value = losses(module, batch, found)
        late = module.global_step >= 5 and module.trainer.validating == (where == "validation")
        return {name: loss * float("nan") if late else loss for name, loss in value.items()}

    module._losses = spoiled  # pyright: ignore
    said = "of step 6 is nan" if where == "training" else "of validation after step 6 is nan"
    with pytest.raises(NotANumber, match=rf"{said}; make model\.learning_rate.*last\.ckpt is from before it") as found:
        fit(data_of(trace), module, tmp_path / "b", settings, run_dir=tmp_path / "run")
    assert str(found.value).count(". ") == 0
    kept = torch.load(tmp_path / "run" / "last.ckpt", weights_only=True)
    assert kept["global_step"] == 4
    assert all(
        torch.isfinite(value).all() for value in PredictorModule.load(tmp_path / "run" / "last.ckpt").parameters()
    )
    fit(data_of(trace), PredictorModule(SMALL), tmp_path / "b", settings, run_dir=tmp_path / "run", resume=True)


def test_another_run_is_not_resumed(trace, write, no_export, tmp_path):
    settings = FitSettings(max_steps=2, validate_steps=2, **LONG)
    run_until(trace, tmp_path, settings)
    other = SruAttentionSettings(embedding=8, hidden=32, attention=8, window=8)
    more = write(tmp_path / "more.npz", sequences=30)
    for data, module, text in (
        (data_of(trace), PredictorModule(other), r"--model\.network\.\w+ .* give the same"),
        (TraceData(trace, batch_tokens=99), PredictorModule(SMALL), r"--data\.chunk_tokens 16, .* 256; give the same"),
        (data_of(more), PredictorModule(SMALL), "is of a run on another trace"),
    ):
        with pytest.raises(SettingError, match=text):
            fit(data, module, tmp_path / "b", settings, run_dir=tmp_path / "run", resume=True)


def test_checkpoints_of_other_families_are_refused(trace, no_export, tmp_path):
    settings = FitSettings(max_steps=2, validate_steps=2, **LONG)
    run_until(trace, tmp_path, settings)
    last = tmp_path / "run" / "last.ckpt"
    kept = torch.load(last, weights_only=True)
    for change, text in (
        ({"spec": {**kept["foregate"]["spec"], "family": "crystal_ball"}}, "family must be one of .*crystal_ball"),
        ({"settings": {**kept["foregate"]["settings"], "hidden": 24}}, "size mismatch|Error.* in loading"),
        ({"settings": {"crystals": 3}}, "crystals"),
    ):
        torch.save({**kept, "foregate": {**kept["foregate"], **change}}, last)
        with pytest.raises(DataError, match=f"holds no network that this version of foregate builds .*{text}"):
            PredictorModule.load(last)
    torch.save({**kept, "foregate": {**kept["foregate"], "spec": {"family": "crystal_ball"}}}, last)
    with pytest.raises(SettingError, match="holds a crystal_ball network and the run is to train sru_attention"):
        run_until(trace, tmp_path, settings, resume=True)


def test_a_network_without_parameters_is_not_trained(trace, no_export, tmp_path, monkeypatch):
    monkeypatch.setattr(PredictorModule, "configure_optimizers", lambda *_: pytest.fail("trained"))
    module = PredictorModule(SMALL)
    start_anew(module, data_of(trace))
    frozen = module.network
    for part in frozen.modules():
        for name, value in list(part._parameters.items()):
            del part._parameters[name]
            part.register_buffer(name, None if value is None else value.detach())
    monkeypatch.setattr(SruAttentionSettings, "build", lambda *_: frozen)
    result = fit(data_of(trace), PredictorModule(SMALL), tmp_path / "b", run_dir=tmp_path / "run")
    assert result["steps"] == 0
    assert not np.any([True for _ in no_export[0].parameters()])
    assert (tmp_path / "run" / "last.ckpt").is_file()


def test_a_run_folder_has_one_run_at_a_time(trace, tmp_path):
    (tmp_path / "run").mkdir()
    lock = WriterLock(tmp_path / "run", 0)
    try:
        with pytest.raises(TraceError, match="being written by another process"):
            run_until(trace, tmp_path, FitSettings(max_steps=1, validate_steps=1, **LONG))
    finally:
        lock.release()
    run_until(trace, tmp_path, FitSettings(max_steps=1, validate_steps=1, **LONG))
    assert not list((tmp_path / "run").glob(".rank*")), "a run that ended holds nothing"


def test_nothing_is_opened_for_a_run_that_is_refused(trace, tmp_path):
    opened: list[int] = []

    def logger() -> None:
        opened.append(1)

    with pytest.raises(SettingError, match="nothing to resume"):
        run_until(trace, tmp_path, FitSettings(max_steps=1), resume=True, logger=logger)
    assert not opened
    assert not (tmp_path / "run").exists()
    run_until(trace, tmp_path, FitSettings(max_steps=1, validate_steps=1, **LONG), logger=logger)
    assert opened == [1]


def test_a_checkpoint_is_exported_with_its_own_trace_only(trace, write, tmp_path):
    run_until(trace, tmp_path, FitSettings(max_steps=1, validate_steps=1, **LONG))
    module = PredictorModule.load(tmp_path / "run" / "last.ckpt")
    assert data_again(module, trace).trace_path == trace
    other = write(tmp_path / "other.npz", sequences=24, seed=9)
    with pytest.raises(DataError, match="another trace than the checkpoint was trained on"):
        data_again(module, other)
