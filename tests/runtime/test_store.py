"""The packed store: a mapping of blocks, and what it refuses to open."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from foregate.collect import tiny_models
from foregate.collect.architectures import expert_tensors, find_moe_modules, model_fingerprint
from foregate.collect.errors import StoreError
from foregate.collect.topology import ExpertId
from foregate.runtime.blocks import ALIGNMENT, views
from foregate.runtime.checkpoint import read_header
from foregate.runtime.loading import load
from foregate.runtime.manifest import MANIFEST, Manifest
from foregate.runtime.pack import pack
from foregate.runtime.store import ExpertStore
from safetensors import safe_open
from transformers import Qwen3MoeForCausalLM


@pytest.fixture(scope="module")
def model():
    return tiny_models.build("qwen3_moe").to(torch.bfloat16)


@pytest.fixture(scope="module")
def packed(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    model.save_pretrained(folder / "model")
    return pack(folder / "model", folder / "store")


@pytest.fixture
def copied(packed, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(packed.path, tmp_path / "store")


def edit_manifest(folder, change):
    value = json.loads((folder / MANIFEST).read_text())
    change(value)
    (folder / MANIFEST).write_text(json.dumps(value))


def flip(path, offset):
    """Change one byte of a file."""
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0x40]))


def test_it_maps_every_expert_to_its_block(packed, model):
    assert len(packed) == packed.topology.num_experts == 16
    assert list(packed) == list(packed.topology.ids)
    for index, item in enumerate(find_moe_modules(model)):
        assert packed.module_names[index] == item.name
        assert packed.kinds[index] == "fused"
        for expert in range(item.layer.num_experts):
            block = packed[ExpertId(index, expert)]
            assert len(block) == packed.layout(index).nbytes <= packed.block_bytes
            found = views(bytearray(block), packed.layout(index))
            wanted = expert_tensors(model.get_submodule(item.name), item.kind, expert)
            assert list(found) == list(wanted)
            assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert packed.fingerprint == model_fingerprint(model.config)


@pytest.mark.parametrize("expert", [(0, 8), (2, 0), (-1, 0), (0, -1)])
def test_an_expert_that_does_not_exist_is_no_key(packed, expert):
    with pytest.raises(KeyError):
        packed[ExpertId(*expert)]
    assert packed.get(ExpertId(*expert)) is None


def test_segments_are_aligned_and_give_the_block(packed):
    for flat, expert in enumerate(packed):
        parts = packed.segments(flat)
        block = b""
        for part in parts:
            assert part.offset % ALIGNMENT == part.nbytes % ALIGNMENT == part.block_offset % ALIGNMENT == 0
            assert part.block_offset == len(block)
            block += packed.files[part.file].read_bytes()[part.offset : part.offset + part.nbytes]
        assert block == packed[expert]
        assert packed.verify_expert(flat, block)
        assert packed.verify_expert(flat, block + bytes(100))  # a slot may be longer
        assert not packed.verify_expert(flat, block[:-1])
        assert not packed.verify_expert((flat + 1) % len(packed), block)


def test_its_files_are_plain_safetensors(packed, model):
    for index, item in enumerate(find_moe_modules(model)):
        with safe_open(packed.files[index], "pt") as file:
            names = [name for name in file.keys() if not name.startswith("padding.")]  # noqa: SIM118 - no mapping
            assert len(names) == 2 * item.layer.num_experts
            wanted = model.get_submodule(item.name).down_proj[3]
            assert torch.equal(file.get_tensor(f"{item.name}.3.down_proj"), wanted)
        starts = [tensor.start for tensor in read_header(packed.files[index]).values()]
        assert min(starts) % ALIGNMENT == 0


def test_the_manifest_survives_json(packed):
    assert Manifest.from_json(json.loads(json.dumps(packed.manifest.to_json()))) == packed.manifest


@pytest.mark.parametrize("what", ["folder", "file"])
def test_what_is_no_store_is_refused(tmp_path, what):
    path = tmp_path
    if what == "file":
        path = tmp_path / "file"
        path.write_text("text")
    with pytest.raises(StoreError, match=r"is no expert store .*foregate pack"):
        ExpertStore.open(path)
    with pytest.raises(StoreError, match="is no expert store"):
        ExpertStore.open(tmp_path / "absent")


@pytest.mark.parametrize(
    "change",
    [
        lambda value: value.update(format="other"),
        lambda value: value.update(version=99),
        lambda value: value.update(codec="zstd"),
        lambda value: value.pop("layers"),
        lambda value: value["layers"][0].pop("layout"),
        lambda value: value["layers"][0]["checksums"].pop(),
        lambda value: value["layers"].pop(),
        lambda value: value["layers"][0]["layout"].update(nbytes=1000),
        lambda value: value.update(topology=[]),
        lambda value: value.update(dense_files=[]),
        lambda value: value["dense_files"][0].pop("name"),
        *(
            lambda value, files=files, name=name: value[files][0].update(name=name)
            for files in ("expert_files", "dense_files")
            for name in ("../model.safetensors", "/etc/hostname", "a/b", "a\\b", "C:a", "..", ".", "", "a\0b", 3, None)
        ),
    ],
)
def test_a_manifest_of_another_form_is_refused(copied, change):
    edit_manifest(copied, change)
    with pytest.raises(StoreError, match=r"foregate\.json is no manifest of this version .*pack the model again"):
        ExpertStore.open(copied)


def test_a_manifest_that_is_no_json_is_refused(copied):
    (copied / MANIFEST).write_text("{")
    with pytest.raises(StoreError, match="is no manifest"):
        ExpertStore.open(copied)
    (copied / MANIFEST).write_text("[" * 100_000)
    with pytest.raises(StoreError, match="is no manifest"):
        ExpertStore.open(copied)


@pytest.mark.parametrize("name", ["experts-00002.safetensors", "model.safetensors"])
@pytest.mark.parametrize("damage", ["truncated", "longer", "missing"])
def test_files_of_another_size_are_refused(copied, name, damage):
    path = copied / name
    if damage == "missing":
        path.unlink()
    else:
        content = path.read_bytes()
        path.write_bytes(content[:-4096] if damage == "truncated" else content + bytes(4096))
    with pytest.raises(StoreError, match=rf"{name} .*incomplete or was altered"):
        ExpertStore.open(copied)


def test_a_header_that_says_something_else_is_refused(copied):
    path = copied / "experts-00001.safetensors"
    content = path.read_bytes()
    assert content.count(b"experts.3.down_proj") == 1
    path.write_bytes(content.replace(b"experts.3.down_proj", b"experts.9.down_proj"))
    with pytest.raises(StoreError, match=r"was altered: tensor .*experts\.3\.down_proj"):
        ExpertStore.open(copied)


def test_a_header_that_is_damaged_is_refused(copied):
    flip(copied / "experts-00001.safetensors", 8)
    with pytest.raises(StoreError, match="is damaged"):
        ExpertStore.open(copied)


def test_a_manifest_that_moves_a_block_is_refused(copied):
    edit_manifest(copied, lambda value: value["layers"][1].update(offset=value["layers"][1]["offset"] + 4096))
    with pytest.raises(StoreError, match="was altered"):
        ExpertStore.open(copied)


def test_the_config_of_another_model_is_refused(copied):
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "rope_theta": 5.0, "rms_norm_eps": 0.5}))
    with pytest.raises(StoreError, match="belongs to another model"):
        ExpertStore.open(copied)


def test_a_missing_config_is_refused(copied):
    (copied / "config.json").unlink()
    with pytest.raises(StoreError, match="has no config"):
        ExpertStore.open(copied)


def test_altered_bytes_are_found_by_checksum(copied):
    store = ExpertStore.open(copied)
    segment = store.segments(11)[0]
    flip(store.files[segment.file], segment.offset + 77)
    store = ExpertStore.open(copied)  # sizes and headers are as they were
    assert [flat for flat, expert in enumerate(store) if not store.verify_expert(flat, store[expert])] == [11]
    assert store.damaged_dense_files() == []
    dense = copied / "model.safetensors"
    flip(dense, dense.stat().st_size - 1)
    assert ExpertStore.open(copied).damaged_dense_files() == [dense]


def test_a_store_that_shrinks_while_open_says_so(copied):
    store = ExpertStore.open(copied)
    with open(store.files[1], "r+b") as file:
        file.truncate(8192)
    with pytest.raises(StoreError, match="truncated after it was opened"):
        store[ExpertId(1, 7)]


def damage_header(folder):
    """Rename a dense tensor: transformers would fill it with random numbers."""
    path = folder / "model.safetensors"
    content = path.read_bytes()
    assert content.count(b'"model.norm.weight"') == 1
    path.write_bytes(content.replace(b'"model.norm.weight"', b'"model.morn.weight"'))


def damage_values(folder):
    path = folder / "model.safetensors"
    flip(path, path.stat().st_size - 1)


def damage_top_k(folder):
    edit_manifest(folder, lambda value: [layer.update(top_k=1) for layer in value["topology"]["layers"]])


def add_other_weights(folder):
    """Make transformers read the dense tensors from elsewhere, although the packed file is untouched."""
    tensors = {name: "other.safetensors" for name in read_header(folder / "model.safetensors")}
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    index = {"metadata": {"total_size": 0}, "weight_map": tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    edit_manifest(
        folder,
        lambda value: value.update(
            dense_files=[{"name": "config.json", "nbytes": (folder / "config.json").stat().st_size, "checksum": ""}]
        ),
    )


@pytest.mark.parametrize("damage", [damage_header, damage_values, damage_top_k, add_other_weights])
def test_an_altered_store_is_not_loaded(copied, damage):
    damage(copied)
    ExpertStore.open(copied)  # only loading reads every dense byte and builds the model
    with pytest.raises(StoreError, match=r"was altered: .*pack the model again"):
        load(copied)
    with pytest.raises(StoreError, match="was altered"):
        Qwen3MoeForCausalLM.from_pretrained(copied)
