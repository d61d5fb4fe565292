"""Packing: any family and layout, by name; refusals; nothing left behind."""

from __future__ import annotations

import errno
import json
import os
import shutil
import weakref
from collections import namedtuple

import pytest
import torch
from foregate.cli import main as program
from foregate.collect import tiny_models
from foregate.collect.architectures import expert_tensors, find_moe_modules, topology_of
from foregate.collect.errors import ModelError, SettingError, StoreError
from foregate.collect.kinds import kind_named
from foregate.collect.staging import staged_folder
from foregate.runtime import pack as packing
from foregate.runtime.blocks import views
from foregate.runtime.checkpoint import find_folder, open_checkpoint, read_header
from foregate.runtime.pack import pack
from foregate.runtime.store import ExpertStore
from foregate.runtime.streaming import stream
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM


def assert_packed(store, model):
    """Compare every expert with the model's own tensors, by name."""
    for index, item in enumerate(find_moe_modules(model)):
        for expert in range(item.layer.num_experts):
            found = views(bytearray(store[store.topology.ids[store.topology.flat(index, expert)]]), store.layout(index))
            wanted = expert_tensors(model.get_submodule(item.name), item.kind, expert)
            assert set(found) == set(wanted)
            assert all(torch.equal(found[name], wanted[name]) for name in wanted), (index, expert)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pack")
    tiny_models.build("qwen3_moe").save_pretrained(folder / "model")
    tiny_models.tokenizer().save_pretrained(folder / "model")
    return folder / "model"


@pytest.fixture
def damaged(folder, tmp_path):
    """A copy of the checkpoint that a test may change."""
    return shutil.copytree(folder, tmp_path / "model")


def is_empty(folder, *allowed):
    return sorted(path.name for path in folder.iterdir()) == sorted(allowed)


@pytest.mark.parametrize("name", sorted(tiny_models.FORMS))
def test_every_family_is_packed_by_name(name, tmp_path):
    model = tiny_models.build(name)
    model.save_pretrained(tmp_path / "model")
    store = pack(tmp_path / "model", tmp_path / "store")
    assert_packed(store, model)
    assert store.topology.same_routing(topology_of(model))
    assert store.topology.expert_bytes == topology_of(model).expert_bytes
    assert store.topology.dense_bytes == topology_of(model).dense_bytes
    dense = load_file(store.path / "model.safetensors")
    stored = {
        f"{item.name}.{key}"
        for item in find_moe_modules(model)
        for key in kind_named(item.kind).stored(model.get_submodule(item.name))
    }
    state = {id(value): value.numel() for name, value in model.state_dict(keep_vars=True).items() if name not in stored}
    first = find_moe_modules(model)[0]
    expert = sum(tensor.numel() for tensor in expert_tensors(model.get_submodule(first.name), first.kind, 0).values())
    assert (
        sum(tensor.numel() for tensor in dense.values()) < sum(state.values()) + expert
    )  # some save more than is read
    assert is_empty(tmp_path, "model", "store")


@pytest.mark.parametrize("original", [True, False], ids=["as-published", "fused"])
@pytest.mark.parametrize("name", ["mixtral", "deepseek_v2", "granitemoe"])
def test_every_layout_on_disk_gives_the_same_blocks(name, original, tmp_path):
    model = tiny_models.build(name).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "model", save_original_format=original, max_shard_size="20KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    assert_packed(pack(tmp_path / "model", tmp_path / "store"), model)


def test_a_store_is_a_whole_model_folder(folder, tmp_path):
    (tmp_path / "model").mkdir()
    shutil.copytree(folder, tmp_path / "model", dirs_exist_ok=True)
    (tmp_path / "model" / "README.md").write_text("card")
    (tmp_path / "model" / "generation_config.json").write_text('{"temperature": 0.3, "eos_token_id": 7}')  # not sampled
    store = pack(tmp_path / "model", tmp_path / "store")
    names = {path.name for path in store.path.iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "README.md", "model.safetensors", "foregate.json"} <= names
    assert json.loads((store.path / "generation_config.json").read_text())["eos_token_id"] == 7
    config = json.loads((store.path / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "foregate"}
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    assert store.manifest.versions["transformers"]


@pytest.mark.parametrize("tied", [True, False])
def test_tied_embeddings_stay_tied(tied, tmp_path):
    import foregate.runtime

    model = tiny_models.build("qwen3_moe", tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "model")
    store = pack(tmp_path / "model", tmp_path / "store")
    assert ("lm_head.weight" in load_file(store.path / "model.safetensors")) != tied
    loaded = foregate.runtime.load(store.path, slots=0.5)
    with loaded.foregate:
        assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
        wanted = model.state_dict()
        for name, tensor in loaded.state_dict().items():
            assert torch.equal(tensor, wanted[name]), name


def test_a_store_in_many_dense_files_opens(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("foregate.runtime.checkpoint.MAX_SHARD", "30KB")
    store = pack(folder, tmp_path / "store")
    assert len(store.manifest.dense_files) > 1
    assert (store.path / "model.safetensors.index.json").exists()


def test_layers_are_let_go_one_by_one(folder):
    seen, alive = [], []

    def on_layer(index, item, tensors):
        alive.append([ref for ref in seen if ref() is not None])
        seen.extend(weakref.ref(tensor) for tensor in tensors.values())

    model = stream(open_checkpoint(folder), on_layer)
    assert len(alive) == 2
    assert not any(alive)
    assert all(parameter.numel() == 0 for name, parameter in model.named_parameters() if ".experts." in name)


# refusals


def test_an_output_that_exists_is_refused(folder, tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "mine").write_text("precious")
    with pytest.raises(SettingError, match="exists already"):
        pack(folder, tmp_path / "store")
    assert (tmp_path / "store" / "mine").read_text() == "precious"


def test_an_empty_folder_may_be_the_output(folder, tmp_path):
    (tmp_path / "store").mkdir()
    pack(folder, tmp_path / "store")


def test_a_dense_model_is_refused(tmp_path):
    config = LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match="no MoE layers"):
        pack(tmp_path / "model", tmp_path / "store")
    assert is_empty(tmp_path, "model")


def test_a_store_is_not_packed_again(folder, tmp_path):
    pack(folder, tmp_path / "store")
    with pytest.raises(StoreError, match="packed store already"):
        pack(tmp_path / "store", tmp_path / "again")


def test_quantized_checkpoints_are_refused(damaged, tmp_path):
    config = json.loads((damaged / "config.json").read_text())
    (damaged / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ModelError, match="quantized with fp8"):
        pack(damaged, tmp_path / "store")
    assert is_empty(tmp_path, "model")


@pytest.mark.parametrize("name", ["model.layers.1.mlp.experts.3.up_proj.weight", "model.norm.weight"])
def test_a_checkpoint_that_lacks_a_tensor_is_refused(damaged, tmp_path, name):
    state = load_file(damaged / "model.safetensors")
    del state[name]
    save_file(state, damaged / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks .* tensors|could not be loaded|must be"):
        pack(damaged, tmp_path / "store")
    assert is_empty(tmp_path, "model")


def test_a_checkpoint_of_other_shapes_is_refused(damaged, tmp_path):
    config = json.loads((damaged / "config.json").read_text())
    (damaged / "config.json").write_text(json.dumps({**config, "moe_intermediate_size": 32}))
    with pytest.raises(ModelError, match="belong to different models"):
        pack(damaged, tmp_path / "store")
    assert is_empty(tmp_path, "model")


def test_a_truncated_checkpoint_is_refused(damaged, tmp_path):
    content = (damaged / "model.safetensors").read_bytes()
    (damaged / "model.safetensors").write_bytes(content[:-100])
    with pytest.raises(ModelError, match="could not be loaded"):
        pack(damaged, tmp_path / "store")
    assert is_empty(tmp_path, "model")


def test_an_unknown_model_class_is_refused(damaged, tmp_path):
    config = json.loads((damaged / "config.json").read_text())
    (damaged / "config.json").write_text(json.dumps({**config, "architectures": ["NoSuchMoe"]}))
    with pytest.raises(ModelError, match="NoSuchMoe"):
        pack(damaged, tmp_path / "store")


def test_a_config_without_a_model_class_takes_the_usual_one(damaged, tmp_path):
    config = json.loads((damaged / "config.json").read_text())
    del config["architectures"]
    (damaged / "config.json").write_text(json.dumps(config))
    assert len(pack(damaged, tmp_path / "store")) == 16


@pytest.mark.parametrize("name", ["no-such-model", "./absent", "a/b/c", "nobody-here/no-such-model"])
def test_a_model_that_does_not_exist_is_refused(name, tmp_path):
    with pytest.raises(ModelError, match=r"foregate-mini, foregate-mini-switch"):
        find_folder(name)


def test_a_misspelt_mini_model_is_told_its_name():
    with pytest.raises(ModelError, match="did you mean 'foregate-mini'"):
        find_folder("foregate-mini-3")


def test_folders_that_are_no_models_are_refused(tmp_path):
    with pytest.raises(ModelError, match=r"no config\.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="no config that transformers can read"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\x08\0\0\0\0\0\0\0[1, 2, 3", b"\x02\0\0\0\0\0\0\0[]"])
def test_what_is_no_safetensors_file_is_refused(content, tmp_path):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ModelError, match="no safetensors file"):
        read_header(tmp_path / "file")


# disk


def test_a_full_disk_is_noticed_before_anything_is_written(folder, tmp_path, monkeypatch, capsys):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100, 99, 1))
    with pytest.raises(StoreError, match=r"needs .* MiB and .* has 0\.0 MiB free"):
        pack(folder, tmp_path / "store")
    assert is_empty(tmp_path)
    assert program.main(["pack", str(folder), "--out", str(tmp_path / "store")]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "free some space" in err


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), SystemExit(1)]
)
def test_an_error_half_way_leaves_nothing(folder, tmp_path, monkeypatch, error):
    calls = []

    def failing(block):
        calls.append(len(block))
        if len(calls) == 11:
            raise error
        return "0" * 32

    monkeypatch.setattr(packing, "checksum_of", failing)
    with pytest.raises(type(error)):
        pack(folder, tmp_path / "store")
    assert len(calls) == 11  # it stops there
    assert is_empty(tmp_path)


def test_what_does_not_open_is_not_kept(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "_file_name", lambda layer: "model-experts.safetensors")  # both layers in one file
    with pytest.raises(StoreError):
        pack(folder, tmp_path / "store")
    assert is_empty(tmp_path)


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path):
    stale = tmp_path / ".out.partial-4194305"  # above the largest process id that Linux gives
    stale.mkdir()
    running = tmp_path / ".out.partial-1"
    running.mkdir()
    with staged_folder(tmp_path / "out") as folder:
        assert not stale.exists()
        (folder / "file").write_text("x")
        assert folder.name.endswith(str(os.getpid()))
    running.rmdir()
    assert is_empty(tmp_path, "out")
    assert is_empty(tmp_path / "out", "file")


def test_a_full_disk_is_named(tmp_path):
    with pytest.raises(OSError, match="full") as failure, staged_folder(tmp_path / "out"):
        raise OSError(errno.ENOSPC, "full")  # as file.write raises it: without a name
    assert failure.value.filename == str(tmp_path / "out")
    assert is_empty(tmp_path)


def test_the_command_packs(folder, tmp_path, capsys):
    assert program.main(["pack", str(folder), "--out", str(tmp_path / "store"), "--json"]) == 0
    out, _ = capsys.readouterr()
    value = json.loads(out)
    store = ExpertStore.open(tmp_path / "store")
    assert value["experts"] == len(store) == 16
    assert value["fingerprint"] == store.fingerprint
    assert program.main(["pack", str(folder), "--out", str(tmp_path / "store")]) == 2
    assert "exists already" in capsys.readouterr().err
