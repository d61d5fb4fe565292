"""Bundles on a hub: pushed to and fetched from a small server that speaks the hub's protocol; nothing else is asked."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import yaml
from foregate.collect.errors import BundleError, SettingError
from foregate.collect.topology import MoeTopology
from foregate.predictors.base import PredictorSpec
from foregate.predictors.bundle import Bundle, seal
from foregate.predictors.hub import HubName, local_bundle, push_to_hub
from foregate.predictors.model_card import model_card
from safetensors.numpy import save_file

METRICS = {
    "recall_at_k": 0.6,
    "interval": [0.58, 0.62],
    "baselines": {"token_table": 0.55, "random": 0.1},
    "sequences": 9,
    "tokens": 800,
}


def make(folder: Path, *, horizon: str = "token", **further: Any) -> Path:
    """Write a bundle that opens; its graph is none."""
    folder.mkdir(parents=True)
    spec = PredictorSpec(
        family="small", horizon=horizon, topology=MoeTopology.uniform(2, 4, 1), stack="causal", vocab_size=9
    )
    for name in ("predictor.onnx", *(["ahead.onnx"] if horizon == "layer" else [])):
        (folder / name).write_bytes(name.encode() * 100)
    save_file({"training.sequences": np.arange(3)}, folder / "weights.safetensors")
    graphs = {"state": [], "rings": []} | ({"reach": 1} if horizon == "layer" else {})
    card = {
        **spec.to_json(),
        **graphs,
        "model": "a/model",
        "metrics": METRICS,
        "verdict": "It beats what is free.",
        **further,
    }
    seal(folder, card)
    return folder


class Hub:
    """Repositories by name: a list of commits, each {path: bytes}."""

    def __init__(self) -> None:
        self.repos: dict[str, list[dict[str, bytes]]] = {}
        self.tags: dict[str, int] = {}
        self.asked: list[str] = []
        self.validated: list[str] = []

    def put(self, repo: str, folder: Path) -> None:
        self.repos.setdefault(repo, []).append({path.name: path.read_bytes() for path in folder.iterdir()})


class Handler(BaseHTTPRequestHandler):
    """Answer as the hub does what a client asks to fetch and to commit."""

    hub: Hub

    def log_message(self, format: str, *args: object) -> None:
        """Keep standard error clean."""

    @property
    def here(self) -> str:
        return f"http://{self.headers['Host']}"

    def _answer(self, code: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self) -> None:
        owner, name, verb, revision, *rest = [*self.path.strip("/").split("/"), "", ""]
        rest = list(filter(None, rest))
        if verb != "resolve":
            return self._answer(404)  # the client asks for lists of its own, too
        self.hub.asked.append(self.path)
        commits = self.hub.repos.get(f"{owner}/{name}")
        if commits is None:
            return self._answer(404, X_Error_Code="RepoNotFound")
        place = {"main": len(commits) - 1, **self.hub.tags, **{f"{i:040x}": i for i in range(len(commits))}}
        if revision not in place:
            return self._answer(404, X_Error_Code="RevisionNotFound")
        body = commits[place[revision]].get("/".join(rest))
        if body is None:
            return self._answer(404, X_Error_Code="EntryNotFound", X_Repo_Commit=f"{place[revision]:040x}")
        tag = f'"{hash((place[revision], self.path)) & 0xFFFFFFFF:x}"'
        return self._answer(200, body, X_Repo_Commit=f"{place[revision]:040x}", ETag=tag)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/repos/create":
            wanted = json.loads(body)
            repo = "/".join(filter(None, [wanted.get("organization"), wanted["name"]]))
            self.hub.repos.setdefault(repo, [])
            return self._answer(200, json.dumps({"url": f"{self.here}/{repo}", "id": repo}).encode())
        if self.path == "/api/validate-yaml":
            self.hub.validated.append(json.loads(body)["content"])
            return self._answer(200, b'{"errors": [], "warnings": []}')
        owner, name, verb = self.path.split("/")[3:6]
        if verb == "preupload":
            how = {"uploadMode": "regular", "shouldIgnore": False}
            files = [{"path": item["path"], **how} for item in json.loads(body)["files"]]
            return self._answer(200, json.dumps({"files": files}).encode())
        entries = [json.loads(line) for line in body.splitlines()]
        files = {e["value"]["path"]: base64.b64decode(e["value"]["content"]) for e in entries if e["key"] == "file"}
        self.hub.repos[f"{owner}/{name}"].append(files)
        oid = f"{len(self.hub.repos[f'{owner}/{name}']) - 1:040x}"
        done = {"success": True, "commitOid": oid, "commitUrl": f"{self.here}/{owner}/{name}/commit/{oid}"}
        return self._answer(200, json.dumps(done).encode())


@pytest.fixture
def server() -> Iterator[tuple[Hub, str]]:
    hub = Hub()
    made = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    try:
        yield hub, f"http://127.0.0.1:{made.server_port}"
    finally:
        made.shutdown()
        made.server_close()
        thread.join()


SCRIPT = """
import json, sys
from foregate.collect.errors import ForegateError
from foregate.predictors.hub import local_bundle, push_to_hub
for verb, *words in json.loads(sys.argv[1]):
    try:
        print(json.dumps(str({"fetch": local_bundle, "push": push_to_hub}[verb](*words))))
    except ForegateError as error:
        print(json.dumps([type(error).__name__, str(error)]))
"""


def ask(endpoint: str, folder: Path, *wanted: list[str], offline: bool = False) -> list[Any]:
    """Do what is wanted in a process of its own: the client reads its settings when it is imported."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": endpoint,
        "HF_HUB_OFFLINE": "1" if offline else "0",
        "HF_HOME": str(folder / "home"),
        "HF_TOKEN": "hf_test",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_XET": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(wanted)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_bundle_is_pushed_and_fetched_back(server, tmp_path):
    hub, endpoint = server
    first = make(tmp_path / "first")
    second = make(tmp_path / "second", horizon="layer", reach=1, checksums={})
    (second / "notes.txt").write_text("mine")
    hub.tags["v1"] = 0
    pushed = ask(endpoint, tmp_path, ["push", str(first), "me/small"], ["push", str(second), "hub:me/small"])
    assert pushed == [f"{endpoint}/me/small/commit/{number:040x}" for number in (0, 1)]
    old, new = hub.repos["me/small"]
    assert sorted(old) == ["README.md", "card.json", "predictor.onnx", "weights.safetensors"]
    assert sorted(new) == ["README.md", "ahead.onnx", "card.json", "predictor.onnx", "weights.safetensors"]
    assert new["README.md"].decode() == model_card(Bundle.open(second).card, "me/small")
    assert hub.validated == [commit["README.md"].decode() for commit in (old, new)]
    hub.asked.clear()
    names = ["hub:me/small@v1", "hub:me/small"]
    fetched = ask(endpoint, tmp_path, *(["fetch", name] for name in names))
    for path, wanted in zip(fetched, (first, second), strict=True):
        assert Path(path).is_relative_to(tmp_path / "home")
        for file in Path(path).iterdir():
            assert file.read_bytes() == (wanted / file.name).read_bytes()
    asked = [path.rpartition("/")[2] for path in hub.asked]
    assert set(asked) == {"card.json", "predictor.onnx", "weights.safetensors", "ahead.onnx"}
    assert all(f"/resolve/{1:040x}/" in path for path in hub.asked if path.endswith("ahead.onnx"))  # of one commit
    hub.asked.clear()
    assert ask("http://127.0.0.1:9", tmp_path, ["fetch", names[1]], offline=True) == fetched[1:]
    assert hub.asked == []


def test_what_is_wrong_on_a_hub_is_one_sentence(server, tmp_path):
    hub, endpoint = server
    for name in ("altered", "half", "hostile"):
        hub.put(f"me/{name}", make(tmp_path / name))
    hub.repos["me/altered"][0]["predictor.onnx"] += b"x"
    del hub.repos["me/half"][0]["weights.safetensors"]
    hub.repos["me/hostile"][0]["card.json"] = b'["../../../etc"]'
    hub.repos["me/other"] = [{"README.md": b"a model"}]
    cases = {
        "hub:me/nothing": ("BundleError", "hub:me/nothing does not exist on the hub, or is private"),
        "hub:me/half@v9": ("BundleError", "hub:me/half@v9 does not exist: there is no such revision"),
        "hub:me/other": ("BundleError", "it has no card.json; give one that foregate pushed."),
        "hub:me/half": ("BundleError", "it has no weights.safetensors"),
        "hub:me/altered": ("BundleError", "predictor.onnx does not match its checksum"),
        "hub:me/hostile": ("BundleError", "is damaged"),
        "hub:me/bad--name": ("SettingError", "is named hub:OWNER/NAME"),
    }
    for (name, (kind, text)), answer in zip(
        cases.items(), ask(endpoint, tmp_path, *(["fetch", name] for name in cases)), strict=True
    ):
        assert answer[0] == kind, name
        assert text in answer[1], name
        assert answer[1].count("\n") == 0
        assert answer[1].endswith(".")
    ((kind, text),) = ask("http://127.0.0.1:9", tmp_path / "empty", ["fetch", "hub:me/half"], offline=True)
    assert kind == "BundleError"
    assert "connect to the network" in text


@pytest.mark.parametrize(
    "name", ["", "name", "a/b/c", "../x", "a/..", "a/b@", "a/b@..", "a/b@x/../../y", "/etc/x", "a\\b/c", "a/b c", "~/x"]
)
def test_names_that_could_leave_the_folder_are_none(name):
    with pytest.raises(SettingError, match="hub:OWNER/NAME"):
        local_bundle(f"hub:{name}")


def test_names():
    assert HubName.parse("hub:me/a.b_c-1@refs/pr/3") == ("me/a.b_c-1", "refs/pr/3")
    assert HubName.parse("me/x") == ("me/x", None)
    assert local_bundle("me/x") == Path("me/x")
    with pytest.raises(SettingError, match="newest"):
        push_to_hub("nowhere", "me/x@v1")


def test_only_a_bundles_own_files_are_pushed(tmp_path, monkeypatch):
    """Checksums may name anything; what they name is not sent."""
    folder = make(tmp_path / "bundle")
    (tmp_path / "secret").write_text("mine")
    card = json.loads((folder / "card.json").read_text())
    card["checksums"]["../secret"] = "0"
    (folder / "card.json").write_text(json.dumps(card))
    sent: dict[str, Any] = {}

    class Api:
        def create_repo(self, repo: str, **options: Any) -> None:
            sent["created"] = (repo, options)

        def create_commit(self, repo: str, operations: list[Any], **_: Any) -> Any:
            sent["files"] = [operation.path_in_repo for operation in operations]
            return SimpleNamespace(commit_url="url")

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    assert push_to_hub(folder, "hub:me/x", private=True) == "url"
    assert sent["created"] == ("me/x", {"private": True, "exist_ok": True})
    assert sorted(sent["files"]) == ["README.md", "card.json", "predictor.onnx", "weights.safetensors"]
    (folder / "predictor.onnx").write_bytes(b"x")
    sent.clear()
    with pytest.raises(BundleError, match="altered"):
        push_to_hub(folder, "hub:me/x")
    assert not sent


def test_the_model_card_says_what_the_card_says(tmp_path):
    hostile = "x](http://evil) <script> `y`\n# z"
    card = Bundle.open(make(tmp_path / "b", training={"trace": 'a"b: c', "sources": [hostile]})).card
    text = model_card(card, "me/x")
    _, head, body = text.split("---\n", 2)
    values = yaml.safe_load(head)
    assert values["license"] == "apache-2.0"
    assert {"foregate", "small", "token-horizon"} <= set(values["tags"])
    (result,) = values["model-index"][0]["results"]
    assert result["dataset"]["name"] == 'a"b: c'
    assert {metric["name"]: metric["value"] for metric in result["metrics"]} == {
        "recall at top-k": 0.6,
        "recall at top-k of token table": 0.55,
        "recall at top-k of random": 0.1,
    }
    assert "| this predictor | 0.600 (0.580 to 0.620) |" in body
    assert "It beats what is free." in body
    assert "<script>" not in body.replace("\\<script\\>", "")
    assert "\n# z" not in body
    bare = model_card({"family": "f", "horizon": "batch"}, "me/x")
    assert "model-index" not in bare
