"""The table of families: every row is tried again, and what is printed and written is the table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from foregate.cli.main import main
from foregate.collect import tiny_models
from foregate.collect.errors import ModelError, SettingError
from foregate.collect.families import moe_families
from foregate.runtime import families, family_check
from foregate.runtime.families import FamilyRow, chosen_families, counts, family_table, to_markdown
from foregate.runtime.family_check import check_family

TABLE = {row.model_type: row for row in family_table()}
PAGE = Path(__file__).parents[2] / "docs" / "families.md"


@pytest.mark.parametrize("name", sorted(tiny_models.FAMILIES))
def test_every_row_is_what_a_check_finds(name: str, tmp_path: Path) -> None:
    assert check_family(name, tmp_path) == TABLE[name]
    assert list(tmp_path.iterdir()) == []


def test_every_family_is_recorded_and_nearly_every_one_offloaded() -> None:
    number = counts(TABLE.values())
    assert set(TABLE) == set(moe_families())
    assert number["record"] == len(TABLE) >= 74
    assert number["offload"] >= 72
    assert number["verify"] >= 72
    assert all(row.reason for row in TABLE.values() if not row.validated)


def test_the_page_is_the_table() -> None:
    """Write it anew with `foregate families --write docs/families.md`."""
    assert PAGE.read_text(encoding="utf-8") == to_markdown(family_table(), families.installed_version())


def test_the_table_was_made_with_the_installed_version() -> None:
    assert families.table_version() == families.installed_version()


def test_the_program_prints_rows_and_writes_files(tmp_path: Path, capsys) -> None:
    assert main(["families", "--only", "nllb-moe", "qwen3_moe", "--json", "--write", str(tmp_path / "rows.json")]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["model_type"] for row in rows] == ["nllb_moe", "qwen3_moe"]
    assert set(rows[0]) == {"model_type", "record", "offload", "verify", "reason"}
    assert json.loads((tmp_path / "rows.json").read_text())["families"] == rows
    assert main(["families", "--write", str(tmp_path / "page.md")]) == 0
    assert "74 families" in capsys.readouterr().out
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8")
    assert main(["families", "--only", "bert"]) == 2
    assert main(["families", "--write", str(tmp_path / "page.xlsx")]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.md", "rows.json"]


def test_a_check_that_differs_from_the_table_fails(monkeypatch, capsys) -> None:
    row = FamilyRow(model_type="qwen3_moe", record="validated", offload="unsupported", verify="unsupported", reason="x")
    monkeypatch.setattr(family_check, "check_family", lambda name: row)
    assert main(["families", "--check", "--only", "qwen3_moe", "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out) == [row.to_json()]
    assert "qwen3_moe differs from the table: now validated/unsupported/unsupported (x)" in err


def test_a_new_family_is_a_row_that_nobody_validated(monkeypatch) -> None:
    monkeypatch.setattr(families, "moe_families", lambda: ("qwen3_moe", "qwen9_moe"))
    known, new = family_table()
    assert known.validated
    assert not new.validated
    assert "nobody has tried it" in new.reason
    assert chosen_families([]) == ["qwen3_moe", "qwen9_moe"]
    assert "no tiny model" in check_family("qwen9_moe").reason


def test_unknown_types_are_refused() -> None:
    with pytest.raises(SettingError, match="got 'gpt-9'"):
        chosen_families(["gpt-9"])


@pytest.mark.parametrize("what", ["record", "pack", "bits", "routing"])
def test_what_goes_wrong_is_the_rows_reason(what: str, monkeypatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise ModelError("as intended.")

    if what == "record":
        monkeypatch.setattr(family_check, "Passes", fail)
    elif what == "pack":
        monkeypatch.setattr(family_check, "pack", fail)
    elif what == "routing":
        genuine = family_check._routing
        monkeypatch.setattr(family_check, "_routing", lambda model: genuine(model)[: 1 + hasattr(model, "foregate")])
    else:
        genuine_verify = family_check.verify

        def differ(*args: object, **kwargs: object) -> object:
            report = genuine_verify(*args, **kwargs)
            object.__setattr__(report, "identical", False)
            return report

        monkeypatch.setattr(family_check, "verify", differ)
    row = check_family("qwen3_moe")
    assert row.offload == row.verify == "unsupported"
    assert row.record == ("unsupported" if what == "record" else "validated")
    assert row.reason.startswith("record: as intended" if what == "record" else "offload: ")


def test_threads_are_given_back() -> None:
    before = torch.get_num_threads()
    check_family("qwen3_moe")
    assert torch.get_num_threads() == before
