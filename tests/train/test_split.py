"""Groups are dealt out whole, each part gets some, and the same names always go the same way."""

from __future__ import annotations

import pytest
from foregate.collect.errors import DataError, SettingError
from foregate.train.split import SplitSettings, split_groups
from hypothesis import given
from hypothesis import strategies as st


@given(st.lists(st.text(max_size=3), min_size=3, max_size=60, unique=True), st.integers(0, 99), st.floats(0.01, 0.6))
def test_each_group_has_one_part_and_each_part_a_group(groups, seed, share):
    settings = SplitSettings(seed=seed, test_share=share)
    parts = split_groups([*groups, *groups], settings)
    assert set(parts) == set(groups)
    assert set(parts.values()) == {"training", "validation", "test"}
    assert parts == split_groups(reversed(groups), settings)
    wanted = share * len(groups)
    assert abs(sum(part == "test" for part in parts.values()) - wanted) <= 1


def test_seed_and_order_matter():
    names = [str(index) for index in range(40)]
    one, two = (split_groups(names, SplitSettings(seed=seed)) for seed in (0, 1))
    assert one != two
    by_file = split_groups(names, SplitSettings(order="file"))
    assert [name for name in names if by_file[name] == "test"] == names[32:]


def test_too_few_groups_are_refused():
    with pytest.raises(DataError, match=r"at least 3 groups.*got 2"):
        split_groups(["a", "b", "a"], SplitSettings())


@pytest.mark.parametrize(
    "settings",
    [{"test_share": 0}, {"validation_share": 1.0}, {"test_share": 0.6, "validation_share": 0.4}, {"order": "x"}],
)
def test_bad_settings_are_refused(settings):
    with pytest.raises(SettingError, match=next(iter(settings))):
        SplitSettings(**settings)
