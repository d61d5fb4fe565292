"""What notes of an import forbid: no number that rests on it is given, in values, terminal or page."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foregate.collect.errors import TraceError
from foregate.collect.notes import Note
from foregate.collect.sequence import SequenceRouting
from foregate.collect.topology import MoeTopology
from foregate.collect.trace import Trace, TraceHeader
from foregate.runtime.assessment.assess import AssessConfig, assess
from foregate.runtime.assessment.limits import Limits
from foregate.runtime.assessment.page import write_assessment
from foregate.runtime.assessment.tables import lines_of
from foregate.runtime.hardware import HardwareProfile
from foregate.runtime.time_model import ModelSizes

TOPOLOGY = MoeTopology.uniform(3, 8, 2)
SIZES = ModelSizes(expert_bytes=1e6, dense_bytes=4e6)
TOKENS, LAYERS = Note("Rows are of several requests.", "tokens_apart"), Note("Runs are apart.", "layers_apart")
REMARK = Note("An assumption.")


class Noted(Trace):
    """A trace of rows in memory, with notes."""

    def __init__(self, rows: Sequence[SequenceRouting], notes: Sequence[Note] = ()) -> None:
        super().__init__(Path("memory"), TraceHeader(topology=TOPOLOGY, vocab_size=20, notes=tuple(notes)), [])
        self.held = rows

    def __iter__(self) -> Iterator[SequenceRouting]:
        return iter(self.held)


@pytest.fixture
def rows(random_rows: Callable[..., Any]) -> list[SequenceRouting]:
    return random_rows(TOPOLOGY, 6, 12)


@pytest.fixture
def by_layer(rows: list[SequenceRouting]) -> list[SequenceRouting]:
    """Give rows of three runs, of which each logged one layer."""
    found = []
    for number, row in enumerate(rows):
        experts = np.full_like(row.experts, -1)
        own = slice(2 * (number % 3), 2 * (number % 3) + 2)
        experts[:, own] = row.experts[:, own]
        found.append(replace(row, experts=experts, group=f"run{number % 3}", token_ids=None))
    return found


def shown(values: dict[str, Any], path: Path) -> tuple[str, str]:
    """Give what the terminal and the page's visible part show."""
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    write_assessment(path, values)
    page = re.sub(r"<(script|style|svg).*?</\1>", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    return "\n".join(lines_of(values)), page


def test_kinds_forbid_what_rests_on_them() -> None:
    assert Limits.of([], "decode") == Limits.of([REMARK], "decode") == Limits()
    tokens = Limits.of([TOKENS, REMARK], "decode")
    assert (tokens.tokens, tokens.layers) == (tokens.replay, None)
    assert Limits.of([TOKENS], "recorded").replay is not None
    assert Limits.of([TOKENS], "prefill") == Limits(tokens=tokens.tokens)  # its tokens ran together
    layers = Limits.of([LAYERS], "prefill")
    assert (layers.tokens, layers.layers) == (None, layers.replay)
    both = Limits.of([LAYERS, TOKENS], "decode").replay
    assert both is not None
    assert both.count("notes") == 1
    assert "follow one another in a text and the layers" in both


def test_remarks_are_repeated_and_change_nothing(rows: list[SequenceRouting], tmp_path: Path) -> None:
    plain, noted = assess(Noted(rows), AssessConfig()), assess(Noted(rows, [REMARK]), AssessConfig())
    assert plain["notes"] == []
    assert noted.pop("notes") == [{"sentence": "An assumption.", "kind": "remark"}]
    assert {**noted, "notes": []} == plain
    terminal, page = shown({**noted, "notes": [REMARK.to_json()]}, tmp_path / "p.html")
    assert "note: An assumption." in terminal
    assert "remark: An assumption." in page
    assert "Notes of the import" not in shown(plain, tmp_path / "q.html")[1]


def test_tokens_apart_leave_no_statement_from_token_to_token(
    rows: list[SequenceRouting], tmp_path: Path, box: HardwareProfile
) -> None:
    values = assess(Noted(rows, [REMARK, TOKENS]), AssessConfig(), box, SIZES)
    verdict = values["verdict"]
    assert (verdict["kind"], verdict["training"], verdict["gains"]) == ("incomplete", None, None)
    assert "need not follow one another in a text" in verdict["because"]
    assert "--as prefill" in verdict["because"]
    assert (values["gains"], values["curves"], values["replayed"], values["overlap"]) == (None, None, None, [])
    assert values["contamination"]["with"] is values["contamination"]["without"] is None
    assert values["contamination"]["stacks"]["causal"]["repeated"] is None
    signals = values["signals"]["causal"]
    assert set(signals["signals"]) == {"popularity", "token_table", "layer_pair"}
    assert (signals["left_out"], signals["misses_of"]) == (["previous_token"], None)
    assert all(signal["coverage"] == [] for signal in signals["signals"].values())
    assert "block_ms" not in values["machine"]
    free = assess(Noted(rows), AssessConfig())["signals"]["causal"]["signals"]
    assert signals["signals"]["token_table"]["recall"] == free["token_table"]["recall"]
    terminal, page = shown(values, tmp_path / "p.html")
    assert terminal.startswith(
        "What prefetching or a cache can gain, and whether training is worth it, cannot be said:"
    )
    assert terminal.index("note: Rows are of several requests.") < terminal.index("note: An assumption.")
    for text in (terminal, page):
        assert "at most" not in text
        assert "miss rate" not in text.lower()
        assert "covers" not in text
        assert "tokens before" not in text
        assert "token table" in text
    assert "Nothing is said from one token to the next: by the notes of the trace, the tokens" in page


def test_a_sequence_of_tokens_that_ran_together_may_be_one_step(rows: list[SequenceRouting], tmp_path: Path) -> None:
    values = assess(Noted(rows, [TOKENS]), AssessConfig(reading="prefill"))
    free = assess(Noted(rows), AssessConfig(reading="prefill"))
    assert values["curves"] == free["curves"]
    assert values["gains"]["misses_per_token"] == free["gains"]["misses_per_token"]
    assert values["overlap"] == []
    assert values["contamination"]["with"]["overlap"] is None
    assert values["verdict"]["kind"] != "incomplete"
    terminal, page = shown(values, tmp_path / "p.html")
    assert "gains over LRU" in terminal
    assert "None is given: by the notes" in page


def test_what_was_left_out_proves_no_routing_unpredictable(row: Any) -> None:
    rng = np.random.default_rng(0)
    rows = [
        row(
            np.concatenate([rng.permuted(np.tile(np.arange(8), (40, 1)), axis=1)[:, :2] for _ in range(3)], axis=1),
            str(n),
        )
        for n in range(20)
    ]
    assert assess(Noted(rows), AssessConfig(reading="prefill", capacity=2))["verdict"]["kind"] == "unpredictable"
    limited = assess(Noted(rows, [TOKENS]), AssessConfig(reading="prefill", capacity=2))
    assert limited["verdict"]["kind"] != "unpredictable"


@pytest.mark.parametrize("reading", ["decode", "prefill", "recorded"])
def test_layers_apart_are_never_replayed(rows: list[SequenceRouting], reading: Any, tmp_path: Path) -> None:
    values = assess(Noted(rows, [LAYERS]), AssessConfig(reading=reading))
    assert (values["verdict"]["kind"], values["gains"], values["curves"]) == ("incomplete", None, None)
    assert "the layers of a token need not belong together" in values["verdict"]["because"]
    assert "prefill" not in values["verdict"]["because"]
    assert set(values["signals"]["causal"]["signals"]) == {"popularity", "previous_token", "token_table"}
    assert values["overlap"] == assess(Noted(rows), AssessConfig())["overlap"]
    shown(values, tmp_path / "p.html")


def test_runs_of_one_layer_each(by_layer: list[SequenceRouting], tmp_path: Path) -> None:
    values = assess(Noted(by_layer, [TOKENS, LAYERS]), AssessConfig())
    assert values["verdict"]["kind"] == "incomplete"
    assert values["signals"]["causal"]["signals"] == {}  # the run that would be measured is of another layer
    assert "experts in layers where those to fit on have none" in values["signals"]["causal"]["reason"]
    assert all(item["held_out"] is None for item in values["coverage"])
    assert values["load"]["dropped"] == pytest.approx(2 / 3)
    terminal, page = shown(values, tmp_path / "p.html")
    for text in (terminal, page):
        assert not re.findall(r"(?:>|  )(?:nan|None|inf)(?:<|  )", text)
    assert "Nothing is said of caches" in page
    # without notes, as imports used to write them, what cannot be compared is left out all the same
    older = assess(Noted(by_layer), AssessConfig())
    assert older["verdict"]["kind"] == "incomplete"
    assert older["signals"]["causal"]["signals"] == {}
    assert "at most" not in older["verdict"]["sentence"]


def test_the_level_of_popularity_is_that_of_the_rows_that_logged_the_layer(by_layer: list[SequenceRouting]) -> None:
    found = assess(Noted(by_layer, [LAYERS]), AssessConfig())["overlap"][0]
    for number in range(3):
        own = [replace(row, experts=row.experts[:, 2 * number : 2 * number + 2]) for row in by_layer[number::3]]
        uses = np.bincount(np.concatenate([row.experts.ravel() for row in own]), minlength=8)
        share = uses / sum(row.num_tokens for row in own)
        assert found["layers"][number]["popularity"] == pytest.approx((share**2).sum() / share.sum())


def test_nothing_used_is_refused_with_notes_too() -> None:
    nothing = SequenceRouting(sequence="a", experts=np.full((3, 6), -1, np.int16))
    with pytest.raises(TraceError, match="all choices were dropped"):
        assess(Noted([nothing], [TOKENS]), AssessConfig())


def test_hostile_notes_are_escaped(rows: list[SequenceRouting], tmp_path: Path) -> None:
    values = assess(Noted(rows, [Note("<img src=x onerror=alert(1)>"), LAYERS]), AssessConfig())
    assert "<img" not in shown(values, tmp_path / "p.html")[1]
    assert len(values["notes"]) == 2
