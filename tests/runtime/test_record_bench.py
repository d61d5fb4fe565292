"""`foregate bench record`: arms in turns, one ratio per round, and a trace that was really written."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest
from foregate.cli.main import main
from foregate.collect.errors import SettingError
from foregate.runtime.bench import record
from foregate.runtime.bench.machine import cpu_model, machine
from foregate.runtime.bench.record import RecordBench, bench
from foregate.runtime.clock import ManualClock


def test_arms_take_turns_and_each_round_gives_one_ratio(monkeypatch) -> None:
    clock, order = ManualClock(), []
    # seconds of each block: warm-up, then three rounds; the machine becomes ten times slower in the last
    plain, recorded = iter([7.0, 2.0, 2.0, 20.0]), iter([9.0, 2.1, 2.4, 22.0])

    def run(name: str, seconds) -> None:
        order.append(name)
        clock.advance(next(seconds))

    monkeypatch.setattr(record, "_plain", lambda model, pieces: run("plain", plain))
    monkeypatch.setattr(record, "_recorded", lambda *args: run("recorded", recorded))
    result = bench(RecordBench(rounds=3, batches=4, batch_size=2, tokens=8, device="cpu"), clock)
    assert order == ["recorded", "plain", "plain", "recorded", "recorded", "plain", "plain", "recorded"]
    assert result["overhead"] == pytest.approx(0.1)  # of 5, 20 and 10 %
    assert result["arms"]["plain"]["tokens_per_s"] == pytest.approx(4 * 2 * 8 / 2.0)
    assert result["arms"]["recorded"]["ms_per_batch"] == pytest.approx(600)
    assert result["arms"]["recorded"]["ms_per_batch_spread"] == pytest.approx([525, 5500])


def test_the_command_prints_arms_overhead_and_machine(capsys, monkeypatch) -> None:
    monkeypatch.setenv("FOREGATE_SMOKE", "1")
    words = ["bench", "record", "--batch-size", "2", "--tokens", "16", "--threads", "1", "--device", "cpu"]
    assert main([*words, "--json", "--scores"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert set(value["arms"]) == {"plain", "recorded"}
    assert all(arm["tokens_per_s"] > 0 for arm in value["arms"].values())
    assert {"overhead", "overhead_spread", "cpu_overhead"} <= set(value)
    assert value["machine"]["threads"] == 1
    assert main(words) == 0
    assert "overhead" in capsys.readouterr().out


def test_what_is_recorded_is_a_whole_trace(tmp_path, monkeypatch) -> None:
    from foregate.collect import writer
    from foregate.collect.checks import check_trace

    close, found = writer.TraceWriter.close, []

    def closed(self) -> None:
        close(self)
        found.append((list(check_trace(self.path)), self.statistics().tokens))

    monkeypatch.setattr(writer.TraceWriter, "close", closed)
    bench(RecordBench(rounds=1, batches=3, batch_size=2, tokens=10, device="cpu"))
    assert found == [([], 60)] * 2  # the warm-up's, and the round's


@pytest.mark.parametrize("name", ["batch_size", "tokens", "batches", "rounds", "threads"])
def test_settings_out_of_range(name, capsys) -> None:
    with pytest.raises(SettingError, match=f"{name} must be at least 1, got 0"):
        RecordBench(**{name: 0})
    assert main(["bench", "record", f"--{name}", "0"]) == 2
    assert "must be at least 1, got 0" in capsys.readouterr().err


def test_a_dtype_that_is_none() -> None:
    with pytest.raises(SettingError, match="dtype must be one of auto, float32, bfloat16, float16, got 'int3'"):
        RecordBench(dtype="int3")  # pyright: ignore[reportArgumentType]


def test_weights_are_of_the_dtype_asked_for() -> None:
    assert bench(RecordBench(rounds=1, batches=1, batch_size=1, tokens=8, dtype="float32"))["dtype"] == "float32"


def test_an_encoder_decoder_is_refused() -> None:
    with pytest.raises(SettingError, match="model must be a causal one, got foregate-mini-switch"):
        bench(RecordBench(model="foregate-mini-switch", device="cpu"))


def test_the_machine_is_told_without_names_of_hosts_or_folders() -> None:
    value = machine()
    assert {"cpu", "cores", "memory_gib", "threads", "torch", "transformers"} <= set(value)
    assert value["cores"] >= value["usable_cores"] >= 1
    assert str(Path.cwd()) not in json.dumps(value)
    assert platform.node() not in value.values()


def test_the_name_of_a_processor() -> None:
    assert cpu_model("processor\t: 0\nmodel name\t: Some  CPU @ 2 GHz\n\nmodel name\t: other\n") == "Some CPU @ 2 GHz"
    assert cpu_model("Hardware : x\nModel : Board 4\n") == "Board 4"
    assert cpu_model("") is None
