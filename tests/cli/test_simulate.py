"""`foregate simulate`: its JSON beside the reference counts, its table, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foregate.cli.main import main
from foregate.collect.topology import MoeTopology
from foregate.collect.trace import SequenceRouting, TraceHeader
from foregate.collect.writer import TraceWriter
from foregate.runtime.policies.registry import SIMULATED


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Give a file of 12 sequences, 6 layers of 8 experts, top-2; five tokens of each are the prompt."""
    random = np.random.default_rng(0)
    liked = random.integers(0, 8, (12, 6))
    experts = np.stack([liked.repeat(20, axis=0), random.integers(0, 8, (240, 6))], axis=-1)
    experts[..., 1] = np.where(experts[..., 0] == experts[..., 1], (experts[..., 1] + 1) % 8, experts[..., 1])
    path = tmp_path / "trace.npz"
    prompts = np.full(12, 5)
    np.savez(path, experts=experts.astype(np.uint8), offsets=np.arange(0, 241, 20), prompt_len=prompts)
    return str(path)


def simulated(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["simulate", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["simulate", *arguments]) in (1, 2)
    out, err = capsys.readouterr()
    assert out == ""
    lines = [line for line in err.splitlines() if line.startswith("foregate simulate: ")]
    assert len(lines) == 1
    return lines[0]


def test_one_capacity_gives_one_object(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = simulated(capsys, trace, "--sequences", "4", "--capacity", "0.25", "--policies", "lru,lfu,belady")
    assert (report["tokens"], report["capacity"], report["accesses"]) == (80, 12, 80 * 12)
    assert list(report["policies"]) == ["lru", "lfu", "belady"]
    lru, belady = report["policies"]["lru"], report["policies"]["belady"]
    assert lru["miss_rate"] == lru["misses"] / report["accesses"]
    assert (lru["recovered_share"], belady["recovered_share"]) == (0.0, 1.0)
    assert len(lru["layer_miss_rates"]) == 6
    assert lru["time_per_token_s"] is None
    assert report["times_missing"] == "a machine (--hardware), the bytes of an expert, the dense part"
    assert report["static_fitted_on"] is None


def test_several_capacities_give_a_list(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    reports = simulated(
        capsys, trace, "--capacity", "0.25,30%", "--capacity", "1,48,100%,0.25", "--policies", "lru", "--as", "prefill"
    )
    assert [report["capacity"] for report in reports] == [12, 14, 1, 48]
    misses = [report["policies"]["lru"]["misses"] for report in reports]
    assert misses[2] >= misses[0] >= misses[1] >= misses[3]
    assert {report["events"] for report in reports} == {12 * 6}


def test_by_default_every_policy_is_replayed_and_static_is_fitted_elsewhere(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    some = simulated(capsys, trace, "--sequences", "5")
    assert tuple(some["policies"]) == SIMULATED
    assert some["static_fitted_on"] == "5 sequences of the trace that are not replayed"
    assert simulated(capsys, trace, "--sequences", "8")["static_fitted_on"].startswith("4 sequences")
    whole = simulated(capsys, trace)
    assert whole["sequences"] == 12
    assert whole["static_fitted_on"] == "the first 20% of the replayed events, which are replayed too"
    told = simulated(capsys, trace, "--sequences", "5", "--fit", trace)
    assert told["static_fitted_on"] == f"the trace {trace}"
    assert told["policies"]["lru"] == some["policies"]["lru"]
    assert told["policies"]["static"] != some["policies"]["static"]


def test_as_recorded_prompts_are_prefills(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    events = {how: simulated(capsys, trace, "--as", how)["events"] for how in ("decode", "prefill", "recorded")}
    assert events == {"decode": 240 * 6, "prefill": 12 * 6, "recorded": 12 * (1 + 15) * 6}


def test_times_come_with_a_machine_and_sizes(trace: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sizes = ["--expert-mib", "8", "--dense-ms", "3"]
    fast, slow = (simulated(capsys, trace, "--hardware", name, *sizes) for name in ("h200", "pcie3"))
    for name in SIMULATED:
        row, slower = fast["policies"][name], slow["policies"][name]
        assert 0 < row["prefetched_time_per_token_s"] <= row["time_per_token_s"] < slower["time_per_token_s"]
        assert row["measured_over_limit"] >= 1
        assert row["bytes_per_token"] == row["misses"] * 8 * 2**20 / 240
    assert fast["times_missing"] is None
    assert fast["hardware"]["link"] == "PCIe 5.0 x16"
    lacking = simulated(capsys, trace, "--hardware", "h200", "--expert-mib", "8")
    assert lacking["times_missing"] == "the dense part"
    assert lacking["policies"]["lru"]["time_per_token_s"] is None


def test_a_trace_that_knows_its_sizes_needs_only_a_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    topology = MoeTopology.uniform(2, 4, 1, expert_bytes=1 << 20, dense_bytes=1 << 20)
    rows = [SequenceRouting(sequence=str(i), experts=np.array([[i % 4, 1], [3, i % 4]], np.int16)) for i in range(3)]
    with TraceWriter(tmp_path / "trace", TraceHeader(topology=topology)) as writer:
        for row in rows:
            writer.write(row)
    report = simulated(capsys, str(tmp_path / "trace"), "--capacity", "2", "--hardware", "cpu2")
    assert report["policies"]["lru"]["time_per_token_s"] > 0


def test_the_table_says_the_same(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [trace, "--hardware", "disk", "--expert-mib", "8", "--dense-ms", "3", "--capacity", "12,24"]
    reports = simulated(capsys, *arguments)
    assert main(["simulate", *arguments]) == 0
    text = capsys.readouterr().out
    for report in reports:
        for row in report["policies"].values():
            assert str(row["misses"]) in text
            assert f"{1e3 * row['time_per_token_s']:.3f}" in text
    assert "static is fitted on the first 20%" in text
    assert main(["simulate", trace, "--hardware", "disk", "--policies", "lru"]) == 0
    assert "No times without the bytes of an expert, the dense part" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--capacity", "0"], "or a whole number in 1..48, got 0"),
        (["--capacity", "49"], "or a whole number in 1..48, got 49"),
        (["--capacity", "1.5"], "or a whole number in 1..48, got 1.5"),
        (["--capacity", "half"], "a share such as 0.25 or 25%, got 'half'"),
        (["--capacity", ","], "a share such as 0.25 or 25%, got nothing"),
        (["--capacity", "nan"], "got 'nan'"),
        (["--capacity", "5%%"], "got '5%%'"),
        (["--capacity", "101%"], "capacity must be at most 100%, got '101%'"),
        (["--capacity", "1e9"], "or a whole number in 1..48, got 1000000000"),
        (["--seed", "-1"], "seed must be at least 0, got -1"),
        (["--expert-mib", "1e308"], "expert_bytes must be a number in 1e-09..1e+15, got"),
        (["--dense-ms", "1e308"], "dense_s must be a number in 1e-09..1e+15, or 0, got 1e+305"),
        (["--policies", "lru,beladi"], "random, belady, got 'beladi'; did you mean 'belady'?"),
        (["--policies", ""], "policies must name at least one of lru, lfu"),
        (["--sequences", "0"], "sequences must be at least 1, got 0"),
        (["--as", "batch"], "--as must be one of decode, prefill, recorded, got 'batch'."),
        (["--hardware", "rtx309"], "or a file of foregate bench hardware, got 'rtx309'; did you mean 'rtx3090'?"),
        (["--expert-mib", "0"], "expert-mib must be above 0, got 0"),
        (["--dense-ms", "-1"], "dense-ms must be at least 0, got -1"),
        (["--fit", "absent.npz"], "absent.npz"),
    ],
)
def test_bad_input_is_one_sentence(
    arguments: list[str], sentence: str, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sentence in refused(capsys, trace, *arguments)


def test_a_trace_of_nothing_and_one_of_another_model_are_refused(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    header = TraceHeader(topology=MoeTopology.uniform(2, 4, 1))
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "trace.json").write_text(json.dumps(header.to_json()), encoding="utf-8")
    assert "has no token with an expert" in refused(capsys, str(tmp_path / "empty"))
    assert "give a trace of the same model to --fit" in refused(capsys, trace, "--fit", str(tmp_path / "empty"))


def test_the_reference_counts(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(shared / "traces" / "gpt-oss-20b_mixed.npz")
    reports = simulated(
        capsys, path, "--sequences", "20", "--capacity", "0.125,0.25", "--as", "decode", "--policies", "lru,belady"
    )
    found = [(r["capacity"], r["accesses"], *(p["misses"] for p in r["policies"].values())) for r in reports]
    assert found == [(96, 805_920, 431_052, 287_678), (192, 805_920, 289_640, 134_012)]


def test_a_narrow_terminal_cuts_no_name(
    trace: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    machine = ("--hardware", "rtx3090", "--expert-mib", "1", "--dense-ms", "1")
    assert main(["simulate", trace, *machine]) == 0
    out = capsys.readouterr().out
    assert all(f" {name} " in out for name in (*SIMULATED, "ms/token, prefetched"))
