"""Settings: each bad value is refused in one sentence, sizes are read as people write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
from foregate.collect.errors import SettingError
from foregate.collect.topology import MoeLayer, MoeTopology
from foregate.runtime import config as module
from foregate.runtime.config import RuntimeConfig, available_bytes, parse_bytes

TOPOLOGY = MoeTopology.uniform(4, 25, 3)  # 100 experts
BLOCK = 4096


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"slots": 4, "budget": "1GiB"}, "Give slots or budget, not both; got slots=4 and budget=1GiB"),
        ({"slots": 0}, r"slots must be a share in \(0, 1\] or a whole number of at least 2, got 0"),
        ({"slots": -0.5}, "slots must be .* got -0.5"),
        ({"slots": 2.5}, "slots must be .* got 2.5"),
        ({"slots": float("nan")}, "slots must be .* got nan"),
        ({"slots": float("inf")}, "slots must be .* got inf"),
        ({"slots": "25%"}, "slots must be .* got '25%'"),
        ({"budget": "much"}, "'much' is no number of bytes; give one such as 1048576, 512MiB or 2GiB"),
        ({"budget": 0}, "0 is no number of bytes"),
        ({"mode": "fast"}, "mode must be one of off, observe, enforce, auto, got 'fast'"),
        ({"reader": "mmap"}, "reader must be one of auto, direct, preadv, seek, got 'mmap'"),
        ({"threads": 0}, "threads must be at least 1 and at most 64, got 0"),
        ({"threads": 100_000}, "threads must be .* got 100000"),
        ({"chunk_kib": 0}, "chunk_kib must be a positive multiple of 4, got 0"),
        ({"chunk_kib": 6}, "chunk_kib must be a positive multiple of 4, got 6"),
        ({"prefetch_threshold": 1.0}, r"prefetch_threshold must lie in \[0, 1\), got 1.0"),
        ({"prefetch_threshold": float("nan")}, "prefetch_threshold must lie"),
        ({"probation": -0.1}, r"probation must lie in \[0, 1\), got -0.1"),
    ],
)
def test_bad_values_are_refused_in_one_sentence(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message) as refusal:
        RuntimeConfig(**settings)
    assert str(refusal.value).endswith(".")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("settings", "held"),
    [
        ({"slots": 0.25}, 25),
        ({"slots": 0.29}, 29),  # 0.29 * 100 is 28.999999999999996
        ({"slots": 0.255}, 25),
        ({"slots": 1}, 100),
        ({"slots": 1.0}, 100),
        ({"slots": 7}, 7),
        ({"slots": 7.0}, 7),
        ({"slots": 500}, 100),
        ({"budget": 30 * BLOCK}, 29),  # the thirtieth is for experts that pass through
        ({"budget": "120KiB"}, 29),
        ({"budget": 100 * BLOCK}, 100),
        ({"budget": 99 * BLOCK}, 98),
        ({"budget": "1TB"}, 100),
    ],
)
def test_slots_and_budgets(settings: dict[str, Any], held: int) -> None:
    assert RuntimeConfig(**settings).num_slots(TOPOLOGY, BLOCK) == held


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"slots": 2}, "slots 2 holds 2 experts of 4096 bytes, but one token needs 3 of a layer at once"),
        ({"slots": 0.02}, "slots 0.02 holds 2 experts"),
        ({"budget": 3 * BLOCK}, "budget 12288 holds 2 experts .* give budget=16384 or slots=3 at least"),
        ({"budget": 1}, "budget 1 holds 0 experts"),
    ],
)
def test_less_than_one_token_needs_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        RuntimeConfig(**settings).num_slots(TOPOLOGY, BLOCK)


def test_the_least_that_is_offered_is_accepted() -> None:
    for settings in ({"slots": 3}, {"budget": 4 * BLOCK}):
        assert RuntimeConfig(**settings).num_slots(TOPOLOGY, BLOCK) == 3
    top_1 = MoeTopology.uniform(2, 8, 1)
    with pytest.raises(SettingError, match="slots=2 at least"):  # slots=1 would mean all of them
        RuntimeConfig(slots=0.01).num_slots(top_1, BLOCK)
    assert RuntimeConfig(slots=0.07).num_slots(top_1, BLOCK) == 1


def test_the_widest_layer_counts() -> None:
    narrow = MoeLayer(stack="causal", block=0, num_experts=8, top_k=1)
    wide = MoeLayer(stack="causal", block=1, num_experts=8, top_k=5)
    with pytest.raises(SettingError, match="needs 5"):
        RuntimeConfig(slots=4).num_slots(MoeTopology(layers=(narrow, wide)), BLOCK)


def test_half_of_the_memory_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_bytes", lambda: 62 * BLOCK)
    assert RuntimeConfig().num_slots(TOPOLOGY, BLOCK) == 30
    monkeypatch.setattr(module, "available_bytes", lambda: 4 * BLOCK)
    with pytest.raises(SettingError, match="half of the available memory holds 1 experts"):
        RuntimeConfig().num_slots(TOPOLOGY, BLOCK)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (1048576, 1 << 20),
        ("1_048_576", 1 << 20),
        ("512MiB", 512 << 20),
        ("512 mib", 512 << 20),
        ("1.5GB", 1_500_000_000),
        ("2G", 2 << 30),
        ("4k", 4096),
        ("10B", 10),
        ("1e6", 1_000_000),
    ],
)
def test_bytes_as_people_write_them(text: int | str, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "GiB", "-1", "0", "1.5 XB", "1 GiB 2", "nan", "inf", "1e999", "five"])
def test_what_is_no_number_of_bytes(text: str) -> None:
    with pytest.raises(SettingError, match="is no number of bytes"):
        parse_bytes(text)


def test_a_control_group_bounds_what_is_available(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = psutil.virtual_memory().available
    assert 0 < available_bytes() <= machine * 1.5

    files = {"memory.max": "1000000", "memory.current": "400000"}
    monkeypatch.setattr(Path, "read_text", lambda path, *args, **kwargs: files[path.name])
    monkeypatch.setattr(module.psutil, "virtual_memory", lambda: type("Memory", (), {"available": 10**9}))
    files |= {"memory.limit_in_bytes": "max", "memory.usage_in_bytes": "0"}
    assert available_bytes() == 600_000
    files["memory.max"] = "max"
    assert available_bytes() == 10**9
    files |= {"memory.max": "100", "memory.current": "400"}
    assert available_bytes() == 0
