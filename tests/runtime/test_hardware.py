"""Hardware profiles: the packaged ones, what is refused, and the benchmark that measures one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from foregate.collect.errors import DataError, SettingError
from foregate.configs import FOLDER, config_names
from foregate.runtime.bench import hardware as bench_hardware
from foregate.runtime.bench.hardware import HardwareBench, bench, describe, fit_line
from foregate.runtime.hardware import HardwareProfile, load_profile

NAMES = config_names("hardware")
VALUES: dict[str, Any] = {
    "name": "n",
    "link": "l",
    "link_gb_per_s": 2.0,
    "link_latency_us": 0,
    "memory_gb_per_s": 10.0,
    "compute_tflop_per_s": 0.5,
    "event_overhead_us": 3.0,
    "cores": 2,
}


def written(path: Path, values: object) -> Path:
    file = path / "profile.yaml"
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    return file


def test_the_promised_machines_are_packaged() -> None:
    assert {"disk", "cpu2", "pcie3", "pcie4", "pcie5", "rtx3090", "a100", "h200"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_packaged_profile_is_read_and_gives_the_source_of_every_figure(name: str) -> None:
    path = FOLDER / "hardware" / f"{name}.yaml"
    profile = load_profile(path)
    assert profile.name == name
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# "), "the first line says what machine it is"
    for index, line in enumerate(lines):
        if line.split(":")[0].rsplit("_", 2)[-1] in ("s", "us"):
            assert lines[index - 1].startswith("# "), f"{line} has no source"


def test_seconds_by_hand() -> None:
    profile = HardwareProfile(**{**VALUES, "link_latency_us": 10})
    assert profile.block_s(2e9) == pytest.approx(1.00001)
    assert profile.compute_s(1e10, 1e11) == 1.0  # bytes take longer
    assert profile.compute_s(1e9, 1e12) == 2.0  # operations do


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([], "is no hardware profile; it needs the keys name, link"),
        ({**VALUES, "link_gb_per_sec": 1}, "no key 'link_gb_per_sec'; did you mean 'link_gb_per_s'"),
        ({**VALUES, "colour": 1}, "no key 'colour'; legal are name, link"),
        ({key: value for key, value in VALUES.items() if key != "cores"}, "lacks 'cores'"),
        ({**VALUES, "memory_gb_per_s": 0}, "memory_gb_per_s must be a number in 1e-09..1e+15, got 0"),
        ({**VALUES, "link_latency_us": -1}, "link_latency_us must be a number in 1e-09..1e+15, or 0, got -1"),
        ({**VALUES, "compute_tflop_per_s": "fast"}, "compute_tflop_per_s must be a number in 1e-09..1e+15, got fast"),
        (
            {**VALUES, "compute_tflop_per_s": float("inf")},
            "compute_tflop_per_s must be a number in 1e-09..1e+15, got inf",
        ),
        ({**VALUES, "memory_gb_per_s": 1e-320}, "memory_gb_per_s must be a number in 1e-09..1e+15, got 1e-320"),
        ({**VALUES, "link_gb_per_s": 10**400}, "link_gb_per_s must be a number in 1e-09..1e+15, got 1000"),
        ({**VALUES, "name": float("nan")}, "name must be a text, got nan"),
        ({**VALUES, "link": 4}, "link must be a text, got 4"),
        ({**VALUES, "cores": True}, "cores must be a number in 1e-09..1e+15, got True"),
    ],
)
def test_a_damaged_profile_is_refused(values: object, reason: str, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"profile\.yaml") as caught:
        load_profile(written(tmp_path, values))
    assert reason in str(caught.value)


@pytest.mark.parametrize("text", ["a: [", "!!python/object/apply:os.getcwd []", "\x00", "[" * 3000])
def test_what_is_no_plain_yaml_is_refused_and_nothing_of_it_is_run(text: str, tmp_path: Path) -> None:
    file = tmp_path / "profile.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(SettingError, match=r"profile\.yaml is no readable YAML file"):
        load_profile(file)
    with pytest.raises(SettingError, match=r"absent\.yaml is no readable YAML file"):
        load_profile(tmp_path / "absent.yaml")


def test_a_line_is_fitted_with_equal_relative_errors() -> None:
    points = [(nbytes, 1e-4 + nbytes / 2e9) for nbytes in (1 << 18, 1 << 20, 1 << 24)]
    assert fit_line(points) == pytest.approx((1e-4, 2e9))
    assert fit_line([(1000, 2.0)]) == (0.0, 500.0)
    assert fit_line([(1000, 1.0), (2000, 4.0)]) == (0.0, 750.0)  # no latency is below 0: the mean of 1000 and 500


def test_this_machine_is_measured_and_the_profile_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREGATE_SMOKE", "1")
    monkeypatch.setattr(bench_hardware, "BLOCK_KIB", (16, 64, 1 << 20))  # the last is larger than the file
    out = tmp_path / "here.yaml"
    settings = HardwareBench(out=str(out), folder=str(tmp_path), name="here: mine", file_mib=2, rounds=1)
    result = bench(settings)
    assert load_profile(out).to_json() == result["profile"]
    assert set(result["arms"]) == {"read_16_kib", "read_64_kib"}
    assert result["machine"]["cores"] >= result["profile"]["cores"] >= 1
    assert all(arm["gb_per_s"] > 0 for arm in result["arms"].values())
    assert [path.name for path in tmp_path.iterdir()] == ["here.yaml"], "the temporary file is gone"
    text = describe(result)
    assert "GB/s" in text
    assert text.endswith("here.yaml")


def test_impossible_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="rounds must be at least 1"):
        HardwareBench(rounds=0)
    with pytest.raises(SettingError, match="is no folder; give --out in one that exists"):
        HardwareBench(out=str(tmp_path / "absent" / "profile.yaml"))
    with pytest.raises(DataError, match="give --folder on the disk"):
        bench(HardwareBench(folder=str(tmp_path / "absent")))


@pytest.mark.parametrize("out", [".", "", "/"])
def test_a_profile_is_not_written_over_a_folder(out: str) -> None:
    with pytest.raises(SettingError, match="is a folder; give --out the name of a file"):
        HardwareBench(out=out)
