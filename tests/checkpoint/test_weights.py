"""Model folders: what loads, what is refused and how that is said, what saving leaves behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from huggingface_hub import errors
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from minits import generate_ids, load, save
from minits.checkpoint import tensor_files
from minits.checkpoint.download import checkpoint_of
from minits.checkpoint.tensor_files import open_tensors
from minits.checkpoint.tokenizer import Tokenizer
from minits.checkpoint.weights import load_checkpoint
from minits.cli.models import trained_task
from minits.thinking import CompressionBlock, ThinkingStates
from strategies import half, Shape, fresh, shapes, write_checkpoint, write_tokenizer

SHAPE = Shape(layers=2, vocab=260)  # 256 bytes, <|endoftext|> = 256, 3 rows of padding
FLOATS = [torch.float64, torch.float32, torch.bfloat16]
checkpoint_shapes = shapes().map(lambda shape: replace(shape, vocab=260))
IDS = [[*b"How many roads must a man walk down"]]
ABOUT = {"method": "thinking", "task": "parity"}
REPOSITORY = Path(__file__).parents[2]


@contextmanager
def temporary():
    """An empty folder; hypothesis tests cannot share pytest's."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def logits(model: ThinkingStates, rows: list[list[int]] = IDS) -> torch.Tensor:
    with torch.no_grad():
        return model.backbone(torch.tensor(rows))


def trained_folder(folder: Path, shape: Shape = SHAPE) -> Path:
    """A folder as training leaves it: T and C are copies of nothing."""
    model = fresh(shape, torch.float32)
    model.config = replace(model.config, eos_ids=(256, 2), pad_id=256)
    with temporary() as other:
        write_tokenizer(other / "tokenizer.json", shape.vocab)
        save(model, Tokenizer.from_folder(other, (256, 2), 256), folder, ABOUT)
    return folder


def same_tensors(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Same names, types, shapes and bytes."""

    def same(one: torch.Tensor, other: torch.Tensor) -> bool:
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and torch.equal(
                one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
            )
        )

    return left.keys() == right.keys() and all(same(t, right[name]) for name, t in left.items())


def rewrite(path: Path, change) -> None:
    """Edits the tensors of a safetensors file."""
    tensors = load_file(path)
    change(tensors)
    whole = {name: t.contiguous() for name, t in tensors.items()}
    save_file(whole, path, metadata={"format": "pt"})


def rewrite_json(path: Path, **values) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


# -- round trips (property 10) ---------------------------------------------------------------------


@half
@given(shape=checkpoint_shapes, dtype=st.sampled_from(FLOATS), chunk_size=st.integers(1, 16))
def test_load_save_load_is_identity(shape, dtype, chunk_size):
    with temporary() as folder:
        plain = write_checkpoint(folder / "a", shape, dtype=dtype)
        first, tokenizer = load(plain, dtype, chunk_size=chunk_size)
        save(first, tokenizer, folder / "b", ABOUT)
        second, again = load(folder / "b", dtype)
        assert same_tensors(first.state_dict(), second.state_dict())
        assert (second.config, second.backbone.config) == (first.config, first.backbone.config)
        assert torch.equal(second.blocked, first.blocked)
        assert (again.definition, again.eos_ids, again.pad_id) == (
            tokenizer.definition,
            tokenizer.eos_ids,
            tokenizer.pad_id,
        )


@half
@given(shape=checkpoint_shapes, dtype=st.sampled_from(FLOATS))
def test_saving_keeps_every_tensor_of_the_checkpoint_and_adds_none(shape, dtype):
    with temporary() as folder:
        plain = write_checkpoint(folder / "a", shape, dtype=dtype)
        save(*load(plain, dtype), folder / "b", ABOUT)
        before, after = (load_file(each / "model.safetensors") for each in (plain, folder / "b"))
        assert same_tensors(before, after)


@half
@given(shape=checkpoint_shapes)
def test_trained_blocks_come_back_as_they_were(shape):
    with temporary() as folder:
        model, (loaded, _) = fresh(shape, torch.float32), load(trained_folder(folder / "a", shape))
        assert same_tensors(model.state_dict(), loaded.state_dict())


def test_saving_twice_writes_the_same_bytes(tmp_path):
    model = load(trained_folder(tmp_path / "a"))
    save(*model, tmp_path / "b", ABOUT)
    names = sorted(p.name for p in (tmp_path / "a").iterdir())
    assert names == sorted(p.name for p in (tmp_path / "b").iterdir())
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def baseline_folder(folder: Path, method: str) -> Path:
    """A folder as the training of a method without T and C leaves it."""
    _, tokenizer = load(write_checkpoint(folder / "plain", SHAPE))
    model = fresh(SHAPE, torch.float32, thinks=False)
    save(model, tokenizer, folder / "run", {"method": method})
    return folder / "run"


@pytest.mark.parametrize("method", ["no-cot", "of one's own"])
def test_a_baseline_is_saved_and_loaded_without_t_and_c(tmp_path, method):
    folder = baseline_folder(tmp_path, method)
    assert not (folder / "thinking.safetensors").exists()
    assert not load(folder)[0].thinks


@pytest.mark.parametrize("method", ["no-cot", "cot"])
def test_the_method_tells_of_t_and_c_where_the_folder_is_silent(tmp_path, method):
    """As in checkpoints of older versions."""
    for folder in (baseline_folder(tmp_path, method), trained_folder(tmp_path / "thinking")):
        about = json.loads((folder / "thinking.json").read_text())
        thinks = about.pop("thinks")
        (folder / "thinking.json").write_text(json.dumps(about))
        assert load(folder)[0].thinks == thinks


@pytest.mark.parametrize("dtype", FLOATS)
def test_tensors_are_cast_to_the_asked_type(tmp_path, dtype):
    model, _ = load(write_checkpoint(tmp_path, SHAPE, dtype=torch.bfloat16), dtype)
    assert {p.dtype for p in model.parameters()} == {dtype}


def test_a_sharded_checkpoint_loads_as_the_single_file(tmp_path):
    single, _ = load(write_checkpoint(tmp_path / "single", SHAPE))
    sharded, _ = load(write_checkpoint(tmp_path / "sharded", SHAPE, shards=3))
    assert same_tensors(single.state_dict(), sharded.state_dict())


def test_biases_of_q_k_and_v_are_loaded_though_no_key_asks_for_them(tmp_path):
    config = json.loads((write_checkpoint(tmp_path, SHAPE) / "config.json").read_text())
    assert "attention_bias" not in config
    model, _ = load(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    biases = [name for name in stored if name.endswith(".bias")]
    assert len(biases) == 3 * SHAPE.layers
    assert all(torch.equal(model.backbone.state_dict()[name], stored[name]) for name in biases)


def test_a_model_is_saved_where_a_text_says_as_it_is_loaded_from_there(tmp_path):
    model, tokenizer = load(trained_folder(tmp_path / "run", SHAPE))
    save(model, tokenizer, str(tmp_path / "copy"), {})
    assert torch.equal(logits(load(str(tmp_path / "copy"))[0]), logits(model))


@pytest.mark.parametrize("tie", [True, False])
def test_a_saved_folder_gives_equal_logits_in_transformers(tmp_path, tie):
    transformers = pytest.importorskip("transformers")
    shape = replace(SHAPE, layers=3, tie=tie, window=5, first_sliding=1)
    model, _ = load(trained_folder(tmp_path / "run", shape))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "run", dtype=torch.float32
    )
    with torch.no_grad():
        expected = theirs(torch.tensor(IDS)).logits
    torch.testing.assert_close(expected, logits(model), rtol=1e-4, atol=1e-4)


def test_a_saved_folders_tokenizer_and_eos_load_in_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    model, tokenizer = load(trained_folder(tmp_path / "run"))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "run")
    assert theirs("Cafe\u0301, please")["input_ids"] == tokenizer.encode("Cafe\u0301, please")
    assert theirs.eos_token_id == model.config.eos_ids[0]
    generation = transformers.GenerationConfig.from_pretrained(tmp_path / "run")
    assert generation.eos_token_id == list(model.config.eos_ids)


# -- tensors that do not fit (property 10) ---------------------------------------------------------


def drop(tensors: dict, name: str) -> None:
    del tensors[name]


def reshape(tensors: dict, name: str) -> None:
    tensors[name] = tensors[name][None]


def widen(tensors: dict, name: str) -> None:
    tensors[name] = torch.cat([tensors[name], tensors[name]])


def retype(tensors: dict, name: str) -> None:
    tensors[name] = tensors[name].to(torch.bfloat16)


def quantise(tensors: dict, name: str) -> None:
    tensors[name] = tensors[name].to(torch.int8)


faults = st.sampled_from([drop, reshape, widen, quantise])
PARTS = st.sampled_from(["model.safetensors", "thinking.safetensors"])


@half
@given(shape=checkpoint_shapes, part=PARTS, fault=faults, data=st.data())
def test_any_one_damaged_tensor_is_an_error_that_names_it(shape, part, fault, data):
    with temporary() as folder:
        path = trained_folder(folder / "run", shape) / part
        with safe_open(path, "pt") as file:
            name = data.draw(st.sampled_from(sorted(file.keys())))
        rewrite(path, lambda tensors: fault(tensors, name))
        with pytest.raises(ValueError) as error:
            load(folder / "run")
        assert name in str(error.value) and part in str(error.value)


strangers = st.sampled_from(
    [
        "extra",
        "model.layers.9.mlp.up_proj.weight",
        "model.layers.0.self_attn.o_proj.bias",
        "thinking_block.lm_head.bias",
        "compression_block.norm.weight",
    ]
)


@half
@given(shape=checkpoint_shapes, part=PARTS, name=strangers)
def test_a_tensor_that_is_no_part_of_the_model_is_an_error_that_names_it(shape, part, name):
    with temporary() as folder:
        path = trained_folder(folder / "run", shape) / part
        rewrite(path, lambda tensors: tensors.update({name: torch.zeros(3)}))
        with pytest.raises(ValueError) as error:
            load(folder / "run")
        assert name in str(error.value)


@half
@given(
    shape=checkpoint_shapes,
    part=PARTS,
    data=st.data(),
    kinds=st.lists(faults, min_size=2, max_size=4),
)
def test_several_faults_are_all_named_in_one_error(shape, part, kinds, data):
    with temporary() as folder:
        path = trained_folder(folder / "run", shape) / part
        with safe_open(path, "pt") as file:
            names = data.draw(st.permutations(sorted(file.keys())))[: len(kinds)]

        def damage(tensors):
            for fault, name in zip(kinds, names):
                fault(tensors, name)
            tensors["extra"] = torch.zeros(3)

        rewrite(path, damage)
        with pytest.raises(ValueError) as error:
            load(folder / "run")
        assert [name for name in [*names, "extra"] if name not in str(error.value)] == []


def test_a_renamed_tensor_is_named_under_both_names(tmp_path):
    def rename(tensors):
        tensors["model.layers.1.mlp.up.weight"] = tensors.pop("model.layers.1.mlp.up_proj.weight")

    both = "model.layers.1.mlp.up_proj.weight.*model.layers.1.mlp.up.weight"
    with pytest.raises(ValueError, match=both):
        load(write_checkpoint(tmp_path, SHAPE, change=rename))


def test_a_dropped_thinking_tensor_is_an_error_not_a_fresh_block(tmp_path):
    folder, name = trained_folder(tmp_path / "run"), "compression_block.layer.mlp.up_proj.weight"
    rewrite(folder / "thinking.safetensors", lambda tensors: drop(tensors, name))
    with pytest.raises(ValueError, match=f"thinking.safetensors.*missing: {name}"):
        load(folder)


def test_a_tensor_in_two_shards_is_an_error_that_names_it(tmp_path):
    write_checkpoint(tmp_path, SHAPE, shards=2)
    first, second = sorted(tmp_path.glob("*.safetensors"))
    name = next(iter(load_file(first)))
    rewrite(second, lambda tensors: tensors.update({name: load_file(first)[name]}))
    with pytest.raises(ValueError, match=f"twice: {name}"):
        load(tmp_path)


# -- ties ------------------------------------------------------------------------------------------


def tied(model: ThinkingStates) -> bool:
    return model.backbone.lm_head.weight is model.backbone.model.embed_tokens.weight


@pytest.mark.parametrize(
    "path",
    [
        lambda model, folder: model,
        lambda model, folder: model.to(torch.bfloat16),
        lambda model, folder: deepcopy(model),
        lambda model, folder: deepcopy(model).to(torch.float64),
        lambda model, folder: load(folder, torch.bfloat16)[0],
        lambda model, folder: load(trained_folder(folder.with_name("saved")))[0],
    ],
    ids=["load", "to", "deepcopy", "deepcopy-to", "load-as", "save-load"],
)
def test_the_tie_outlives_every_way_of_making_a_model(tmp_path, path):
    folder = write_checkpoint(tmp_path / "plain", SHAPE)
    assert tied(path(load(folder)[0], folder))


def test_tied_weights_move_as_one_in_training_and_count_once(tmp_path):
    model, _ = load(write_checkpoint(tmp_path, SHAPE))
    names = [name for name, _ in model.named_parameters()]
    assert "backbone.model.embed_tokens.weight" in names and "backbone.lm_head.weight" not in names
    before = model.backbone.lm_head.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.backbone(torch.tensor(IDS)).logsumexp(-1).sum().backward()
    optimizer.step()
    assert not torch.equal(model.backbone.lm_head.weight, before)
    assert torch.equal(model.backbone.lm_head.weight, model.backbone.model.embed_tokens.weight)


def test_an_untied_model_stays_untied(tmp_path):
    shape = replace(SHAPE, tie=False)
    model, _ = load(trained_folder(tmp_path / "run", shape))
    assert not tied(model)
    assert not torch.equal(model.backbone.lm_head.weight, model.backbone.model.embed_tokens.weight)


def test_a_tied_checkpoint_may_hold_the_head_too(tmp_path):
    def copy_head(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    assert tied(load(write_checkpoint(tmp_path, SHAPE, change=copy_head))[0])


def test_a_tied_checkpoint_with_another_head_is_an_error_that_names_the_config_key(tmp_path):
    def other_head(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    with pytest.raises(ValueError, match="tie_word_embeddings = true.*lm_head.weight"):
        load(write_checkpoint(tmp_path, SHAPE, change=other_head))


def test_an_untied_checkpoint_without_head_is_an_error_that_names_the_config_key(tmp_path):
    shape = replace(SHAPE, tie=False)
    folder = write_checkpoint(tmp_path, shape, change=lambda t: drop(t, "lm_head.weight"))
    with pytest.raises(ValueError, match="missing: lm_head.weight.*tie_word_embeddings = false"):
        load(folder)


# -- files that are not what they seem -------------------------------------------------------------


@given(cut=st.integers(1, 1 << 20))
def test_a_file_cut_anywhere_is_an_error_with_its_name_and_size(cut):
    with temporary() as folder:
        path = folder / "model.safetensors"
        save_file({"a": torch.ones(9), "b": torch.ones(2, 3)}, path)
        content = path.read_bytes()
        kept = content[: cut % len(content)]
        path.write_bytes(kept)
        with pytest.raises(ValueError) as error:
            open_tensors(path)
        assert str(path) in str(error.value) and str(len(kept)) in str(error.value)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("change", [-16, 8])
def test_a_file_that_is_too_short_or_too_long_is_refused_by_name(tmp_path, shards, change):
    path = sorted(write_checkpoint(tmp_path, SHAPE, shards=shards).glob("*.safetensors"))[-1]
    size = path.stat().st_size + change
    os.truncate(path, size)
    message = rf"{path.name} \({size} bytes\) is no whole safetensors file.*again"
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def write_raw(path: Path, header: object, data: bytes) -> None:
    """A hand-made safetensors file."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


FLOAT_PAIR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "header",
    [
        {"a": FLOAT_PAIR, "b": FLOAT_PAIR},
        {"a": FLOAT_PAIR | {"dtype": "F99"}},
        {"a": FLOAT_PAIR | {"shape": [3]}},
        {"a": FLOAT_PAIR | {"data_offsets": [4, 8]}},
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},'
        b' "a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
    ],
    ids=["overlap", "unknown type", "wrong size", "gap", "duplicate"],
)
def test_an_inconsistent_header_is_an_error_that_names_the_file(tmp_path, header):
    write_raw(tmp_path / "model.safetensors", header, bytes(8))
    with pytest.raises(ValueError, match="model.safetensors .* is no whole safetensors file"):
        open_tensors(tmp_path / "model.safetensors")


short = st.text(max_size=3)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 9) | short,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(short, inner, max_size=2),
)
entries = st.fixed_dictionaries({"dtype": values, "shape": values, "data_offsets": values})
headers = st.dictionaries(st.sampled_from(["a", "__metadata__"]), values | entries, min_size=1)


@given(header=headers)
@example({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}})
@example({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, "4"]}})
def test_a_header_of_any_other_form_is_a_value_error_that_names_the_file(header):
    """Or accepted, where it happens to be right; never another exception."""
    with temporary() as folder:
        write_raw(folder / "model.safetensors", header, b"")
        try:
            open_tensors(folder / "model.safetensors")
        except ValueError as error:
            assert "model.safetensors" in str(error)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 988097824\n"


@pytest.mark.parametrize("name", ["model.safetensors", "thinking.safetensors"])
def test_a_git_lfs_pointer_is_called_by_its_name(tmp_path, name):
    folder = trained_folder(tmp_path / "run")
    (folder / name).write_text(POINTER)
    message = f"{name} is a Git-LFS pointer of {len(POINTER)} bytes.*git lfs pull"
    with pytest.raises(ValueError, match=message):
        load(folder)


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "model.safetensors",
        "thinking.json",
        "thinking.safetensors",
    ],
)
def test_a_link_to_a_missing_blob_is_called_so(tmp_path, name):
    """As in a hub cache that lost a blob. Skipping it would silently change what is loaded."""
    folder = trained_folder(tmp_path / "run")
    (folder / name).unlink()
    (folder / name).symlink_to(tmp_path / "blobs" / "4d7a")
    with pytest.raises(FileNotFoundError, match=f"{name} is a link to a missing file"):
        load(folder)


def test_a_folder_of_links_loads_as_the_folder_of_files(tmp_path):
    folder, links = write_checkpoint(tmp_path / "blobs", SHAPE), tmp_path / "snapshot"
    links.mkdir()
    for path in folder.iterdir():
        (links / path.name).symlink_to(os.path.relpath(path, links))
    assert same_tensors(load(links)[0].state_dict(), load(folder)[0].state_dict())


# -- files that are missing ------------------------------------------------------------------------


def test_an_empty_folder_is_called_so(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"has no config.json \(it holds nothing\). Copy .* another folder"
    ):
        load(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_missing_file_is_named_with_what_is_there_instead(tmp_path, name):
    (write_checkpoint(tmp_path, SHAPE) / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"no {name}.*model.safetensors"):
        load(tmp_path)


def test_a_folder_without_weights_says_which_files_it_wants_and_has(tmp_path):
    weights = write_checkpoint(tmp_path, SHAPE) / "model.safetensors"
    weights.rename(tmp_path / "pytorch_model.bin")
    message = "no model.safetensors.*pytorch_model.bin.*Only safetensors"
    with pytest.raises(FileNotFoundError, match=message):
        load(tmp_path)


def test_all_missing_shards_are_listed_before_anything_is_read(tmp_path, monkeypatch):
    files = sorted(write_checkpoint(tmp_path, SHAPE, shards=3).glob("*.safetensors"))
    files[0].unlink()
    files[2].unlink()

    def refuse(*_arguments, **_options):
        pytest.fail("a shard was opened")

    monkeypatch.setattr(tensor_files, "safe_open", refuse)
    with pytest.raises(FileNotFoundError, match=f"not there: {files[0].name}, {files[2].name}"):
        load(tmp_path)


@pytest.mark.parametrize(
    "index", [{}, {"weight_map": {}}, {"weight_map": []}, {"weight_map": {"a": 1}}]
)
def test_an_index_that_names_no_shards_is_an_error_that_names_it(tmp_path, index):
    folder = write_checkpoint(tmp_path, SHAPE, shards=2)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises((ValueError, FileNotFoundError), match="model.safetensors.index.json"):
        load(tmp_path)


def test_a_parameter_of_t_or_c_that_is_no_copy_is_named_and_not_left_to_chance(
    tmp_path, monkeypatch
):
    """As someone's own C may have one, a gate of its state; a tiny model begins with the 1."""
    made, copied = CompressionBlock.__init__, ThinkingStates.copy_blocks

    def gated(self, config):
        made(self, config)
        self.gate = nn.Parameter(torch.ones(()))

    def filled(self):
        copied(self)
        self.compression_block.gate.data.fill_(0.5)

    monkeypatch.setattr(CompressionBlock, "__init__", gated)
    plain = write_checkpoint(tmp_path / "plain", SHAPE)
    with pytest.raises(
        ValueError, match="^compression_block.gate: copy_blocks .* gives it no value"
    ):
        load(plain)
    monkeypatch.setattr(ThinkingStates, "copy_blocks", filled)
    assert load(plain)[0].compression_block.gate == 0.5


@pytest.mark.parametrize("name", ["thinking.safetensors", "thinking.json"])
def test_thinking_weights_that_are_missing_are_not_replaced_by_fresh_ones(tmp_path, name):
    folder = trained_folder(tmp_path / "run")
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"no {name}"):
        load(folder)


@pytest.mark.parametrize("name, value", [("chunk_size", "8"), ("inject_after", None)])
def test_a_value_of_thinking_json_that_is_no_number_is_named(tmp_path, name, value):
    folder = trained_folder(tmp_path / "run")
    rewrite_json(folder / "thinking.json", **{name: value})
    with pytest.raises(ValueError, match=f"thinking.json: .*{name}"):
        load(folder)


@pytest.mark.parametrize("value", ["x", None])
def test_a_task_option_of_thinking_json_that_is_no_number_is_named(tmp_path, value):
    """As the commands load: the weights know nothing of tasks, so the task may be who says it."""
    folder = trained_folder(tmp_path / "run")
    rewrite_json(folder / "thinking.json", max_ops=value)
    with pytest.raises(ValueError, match="thinking.json.*max.ops"):
        trained_task(folder, load_checkpoint(folder).about)


# -- config.json -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen2_moe"])
def test_another_model_type_is_refused_with_the_supported_ones(tmp_path, kind):
    message = f"config.json: model_type '{kind}' is not known; use one of qwen2"
    with pytest.raises(ValueError, match=message):
        load(write_checkpoint(tmp_path, SHAPE, model_type=kind))


@pytest.mark.parametrize("content", ["", "{", "[]", POINTER])
def test_a_config_that_is_no_json_object_is_an_error_that_names_it(tmp_path, content):
    (write_checkpoint(tmp_path, SHAPE) / "config.json").write_text(content)
    with pytest.raises(ValueError, match="config.json"):
        load(tmp_path)


@pytest.mark.parametrize("theta", [1e4, 1e6])
def test_both_rope_spellings_give_equal_logits(tmp_path, theta):
    old = write_checkpoint(tmp_path / "old", SHAPE, rope_theta=theta)
    new = write_checkpoint(
        tmp_path / "new",
        SHAPE,
        rope="parameters",
        rope_parameters={"rope_theta": theta, "rope_type": "default"},
    )
    assert "rope_theta" not in json.loads((new / "config.json").read_text())
    assert torch.equal(logits(load(old)[0]), logits(load(new)[0]))


def test_the_rotary_base_of_the_config_matters(tmp_path):
    one, other = (
        write_checkpoint(tmp_path / str(theta), SHAPE, rope_theta=theta) for theta in (1e4, 1e6)
    )
    assert not torch.allclose(logits(load(one)[0]), logits(load(other)[0]), atol=1e-3)


def test_both_rope_spellings_that_agree_are_accepted(tmp_path):
    model, _ = load(
        write_checkpoint(tmp_path, SHAPE, rope_theta=5000, rope_parameters={"rope_theta": 5000.0})
    )
    assert model.backbone.config.rope_theta == 5000.0


def test_rope_spellings_that_contradict_each_other_are_an_error_with_both_values(tmp_path):
    with pytest.raises(
        ValueError, match="config.json: contradictory.*10000.0.*1000000.0.* of rope_theta"
    ):
        load(write_checkpoint(tmp_path, SHAPE, rope_theta=1e4, rope_parameters={"rope_theta": 1e6}))


@pytest.mark.parametrize("parameters", [None, {"rope_type": "default"}])
def test_silence_about_the_rotary_base_is_an_error(tmp_path, parameters):
    with pytest.raises(ValueError, match="config.json: neither rope_theta nor rope_parameters"):
        load(write_checkpoint(tmp_path, SHAPE, rope_theta=None, rope_parameters=parameters))


@pytest.mark.parametrize(
    "kind, config",
    [
        ("yarn", {"rope_scaling": {"type": "yarn", "factor": 4.0}}),
        ("linear", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        ("yarn", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0}}),
    ],
)
def test_a_context_extension_is_refused_by_its_name(tmp_path, kind, config):
    with pytest.raises(ValueError, match=f"type '{kind}' is not known; use one of default"):
        load(write_checkpoint(tmp_path, SHAPE, **config))


def test_a_window_that_is_switched_off_is_full_attention(tmp_path):
    window = {"sliding_window": 8, "max_window_layers": 0, "layer_types": None}
    configs = {
        "full": {},
        "off": window | {"use_sliding_window": False},
        "on": window | {"use_sliding_window": True},
    }
    full, off, on = (
        load(write_checkpoint(tmp_path / name, SHAPE, **config))[0]
        for name, config in configs.items()
    )
    assert torch.equal(logits(off), logits(full))
    assert not torch.allclose(logits(on), logits(full), atol=1e-3)


@pytest.mark.parametrize("key", ["model_type", "vocab_size", "hidden_size", "rms_norm_eps"])
def test_a_missing_key_is_named(tmp_path, key):
    with pytest.raises(ValueError, match=f"config.json: lacks {key}"):
        load(write_checkpoint(tmp_path, SHAPE, **{key: None}))


@pytest.mark.parametrize(
    "key, value",
    [
        ("num_hidden_layers", -1),
        ("hidden_size", "64"),
        ("vocab_size", [260]),
        ("intermediate_size", 160.5),
        ("rms_norm_eps", "1e-6"),
    ],
)
def test_a_value_that_is_no_positive_number_is_named(tmp_path, key, value):
    folder = write_checkpoint(tmp_path, SHAPE)
    rewrite_json(folder / "config.json", **{key: value})
    message = f"config.json: {key} "
    with pytest.raises(ValueError, match=message):
        load(folder)


# -- ids that end a text ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "eos, expected", [(256, (256,)), ([256, 3], (256, 3)), ([3, 3, 256], (3, 256))]
)
def test_eos_may_be_a_number_or_a_list(tmp_path, eos, expected):
    model, tokenizer = load(write_checkpoint(tmp_path, SHAPE, eos=eos))
    assert model.config.eos_ids == tokenizer.eos_ids == expected
    assert model.config.thought_end == tokenizer.eos_id == expected[0]


@pytest.mark.parametrize("eos", [None, []])
def test_no_eos_anywhere_is_an_error_that_names_the_key(tmp_path, eos):
    folder = write_checkpoint(tmp_path, SHAPE, eos=eos)
    (folder / "generation_config.json").write_text('{"eos_token_id": null}')
    with pytest.raises(ValueError, match="names an eos_token_id"):
        load(folder)


def test_generation_config_is_asked_first(tmp_path):
    folder = write_checkpoint(tmp_path, SHAPE, eos=256)
    (folder / "generation_config.json").write_text('{"eos_token_id": [4, 256], "pad_token_id": 9}')
    model, _ = load(folder)
    assert (model.config.eos_ids, model.config.pad_id) == ((4, 256), 9)


@pytest.mark.parametrize("content", ["{}", '{"eos_token_id": null}'])
def test_config_json_is_asked_where_generation_config_is_silent(tmp_path, content):
    folder = write_checkpoint(tmp_path, SHAPE, eos=256)
    (folder / "generation_config.json").write_text(content)
    assert load(folder)[0].config.eos_ids == (256,)


def test_padding_uses_the_first_eos_where_nothing_names_a_pad_id(tmp_path):
    assert load(write_checkpoint(tmp_path, SHAPE, eos=[3, 256]))[0].config.pad_id == 3


@pytest.mark.parametrize("eos", [260, -1, "256"])
def test_an_eos_id_outside_the_vocabulary_is_an_error_that_names_it(tmp_path, eos):
    with pytest.raises(ValueError, match=f"config.json: eos_token_id is .*{eos}.* outside the voc"):
        load(write_checkpoint(tmp_path, SHAPE, eos=eos))


# -- the padded vocabulary -------------------------------------------------------------------------


def huge_padding_rows(tensors: dict) -> None:
    """Whatever the hidden state is, one of the two padding rows has by far the highest logit."""
    head = tensors["lm_head.weight"]
    direction = torch.randn(head.shape[1], generator=torch.Generator().manual_seed(0))
    head[257] = 1e4 * direction
    head[258] = -1e4 * direction


@pytest.fixture(scope="module")
def padded(tmp_path_factory) -> ThinkingStates:
    folder, shape = tmp_path_factory.mktemp("padded"), replace(SHAPE, tie=False)
    write_checkpoint(folder, shape, change=huge_padding_rows)
    return load(folder, chunk_size=4)[0]


def test_padding_rows_would_win_every_decision(padded):
    assert set(logits(padded).argmax(-1).flatten().tolist()) <= {257, 258}


def test_padding_rows_are_never_emitted_in_an_answer(padded):
    (result,) = generate_ids(padded, IDS, max_new_tokens=24, max_thought_tokens=3)
    assert len(result.ids) > 0 and max(result.ids) <= 256


def test_padding_rows_are_never_thought(padded):
    (result,) = generate_ids(padded, IDS, max_new_tokens=8, max_thought_tokens=12)
    thought = [i for ids in result.thought_ids for i in ids]
    assert len(thought) > len(result.thought_ids)  # not all trivial
    assert max(thought) <= 256


def test_rows_of_the_padded_vocabulary_are_kept_as_stored(padded):
    assert padded.backbone.lm_head.weight.shape[0] == 260
    assert padded.blocked.nonzero().flatten().tolist() == [257, 258, 259]


# -- T and C of a plain folder, and of a trained one -----------------------------------------------


@pytest.mark.parametrize("tie", [True, False])
def test_a_plain_folder_gets_t_and_c_as_equal_but_independent_copies(tmp_path, tie):
    model, _ = load(write_checkpoint(tmp_path, replace(SHAPE, tie=tie)))
    backbone, t, c = model.backbone, model.thinking_block, model.compression_block
    pairs = [
        (t.layer, backbone.model.layers[-1]),
        (t.norm, backbone.model.norm),
        (t.lm_head, backbone.lm_head),
        (c.layer, backbone.model.layers[0]),
    ]
    for copy, source in pairs:
        assert same_tensors(copy.state_dict(), source.state_dict())
    storages = [p.untyped_storage().data_ptr() for p in model.parameters()]
    assert len(set(storages)) == len(storages)
    copied = {id(p) for copy, _ in pairs for p in copy.parameters()}
    assert copied == {id(p) for block in (t, c) for p in block.parameters()}


def test_a_plain_folder_takes_the_papers_choices_by_default(tmp_path):
    config = load(write_checkpoint(tmp_path, replace(SHAPE, layers=4)))[0].config
    assert (config.chunk_size, config.inject_after, config.extract_after) == (8, 1, 3)


@pytest.mark.parametrize(
    "choice, trained", [({"chunk_size": 8}, 4), ({"inject_after": 0}, 1), ({"extract_after": 1}, 2)]
)
def test_a_value_that_contradicts_the_training_is_an_error_with_both(tmp_path, choice, trained):
    folder = trained_folder(tmp_path / "run")
    ((name, value),) = choice.items()
    with pytest.raises(ValueError, match=f"{name} {value} was asked.*trained with {trained}"):
        load(folder, **choice)


def test_values_that_repeat_the_training_are_accepted(tmp_path):
    folder = trained_folder(tmp_path / "run")
    repeated, _ = load(folder, chunk_size=4, inject_after=1, extract_after=2)
    assert repeated.config == load(folder)[0].config


@pytest.mark.parametrize(
    "choice, message",
    [
        ({"chunk_size": 0}, "chunk size 0"),
        ({"chunk_size": 129}, "chunk size 129.*1 … 128"),
        ({"inject_after": 2, "extract_after": 1}, "inject_after 2, extract_after 1"),
        ({"extract_after": 3}, "<= 2"),
    ],
)
def test_a_value_that_does_not_fit_the_backbone_is_an_error_with_the_limit(
    tmp_path, choice, message
):
    with pytest.raises(ValueError, match=message):
        load(write_checkpoint(tmp_path, SHAPE), **choice)


# -- names: local folders and the hub --------------------------------------------------------------


@pytest.fixture
def no_hub(monkeypatch):
    def refuse(*_arguments, **_options):
        pytest.fail("the hub was asked")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)


@pytest.mark.parametrize(
    "name",
    [
        "./no/such/folder",
        "../no-such-folder",
        "./typo",
        "/no/such/folder",
        "~/no-such-folder",
        "no/such/folder",
        "typo",
        "runs/typo",
        ".cache/typo",
        Path("org/name"),
        "org/name/",
        "C:\\models\\qwen",
    ],
)
def test_what_looks_like_a_path_is_never_sent_to_the_hub(tmp_path, monkeypatch, no_hub, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    with pytest.raises(FileNotFoundError, match="no folder .*hub id such as"):
        load(name)


def test_a_mistyped_path_is_answered_with_what_is_beside_it(tmp_path, no_hub):
    write_checkpoint(tmp_path / "qwen-small", SHAPE)
    with pytest.raises(FileNotFoundError, match="qwen-smal .*holds qwen-small"):
        load(tmp_path / "qwen-smal")


def test_a_file_is_not_a_model_folder(tmp_path, no_hub):
    path = write_checkpoint(tmp_path, SHAPE) / "model.safetensors"
    with pytest.raises(ValueError, match="model.safetensors is a file; give the folder"):
        load(path)


def test_an_existing_folder_is_taken_before_a_hub_id_of_that_name(tmp_path, monkeypatch, no_hub):
    write_checkpoint(tmp_path / "Qwen" / "Qwen2.5-0.5B", SHAPE)
    monkeypatch.chdir(tmp_path)
    assert load("Qwen/Qwen2.5-0.5B")[0].backbone.config.num_hidden_layers == SHAPE.layers


def test_a_hub_id_is_fetched_at_its_revision_and_without_files_that_are_not_read(
    tmp_path, monkeypatch
):
    folder, asked = write_checkpoint(tmp_path, SHAPE), {}

    def fetch(repo_id, **options):
        asked.update(options, repo_id=repo_id)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    load("org/name", revision="v1")
    assert (asked["repo_id"], asked["revision"]) == ("org/name", "v1")
    assert not any(Path("pytorch_model.bin").match(pattern) for pattern in asked["allow_patterns"])


def http(kind: type, text: str) -> Exception:
    """An error of the hub client as it comes after an HTTP answer."""
    return kind(text, response=SimpleNamespace(headers={}, request=None, status_code=404))


# The library that the hub client speaks HTTP with, whichever that is.
network = sys.modules[errors.HTTPError.__module__.split(".")[0]]


@pytest.mark.parametrize(
    "cause, message",
    [
        (
            http(errors.RepositoryNotFoundError, "401\n\nno such repository"),
            "org/name at revision v1 .*no such repository",
        ),
        (http(errors.RevisionNotFoundError, "404 no such revision"), "v1 .*404 no such revision"),
        (http(errors.GatedRepoError, "403\nlog in"), "403 log in"),
        (http(errors.HfHubHTTPError, "500 Server Error\nlong"), "500 Server Error long"),
        (errors.LocalEntryNotFoundError("gone"), "gone .cache: .*Check the id, --revision"),
        (errors.HFValidationError("bad id"), "bad id"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (ConnectionResetError(), "ConnectionResetError"),
        # The client passes these two on: they are neither OSErrors nor its own.
        (network.ProxyError("the connection broke"), "connection broke"),
        (network.ReadTimeout("the connection broke"), "connection broke"),
    ],
    ids=[
        "repository",
        "revision",
        "gated",
        "server",
        "unreachable",
        "name",
        "disk",
        "without text",
        "proxy",
        "time",
    ],
)
def test_an_error_of_the_hub_becomes_one_line_with_a_next_step(monkeypatch, cause, message):
    def fail(*_args, **_options):
        raise cause

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(FileNotFoundError, match=message) as error:
        load("org/name", revision="v1")
    assert "\n" not in str(error.value) and "or give a local folder" in str(error.value)
    assert error.value.__cause__ is cause


# -- offline, with a cache that is empty and one that is not ---------------------------------------


OFFLINE = """
import json, os, socket, sys, time

def refuse(*_):
    raise AssertionError("the network was used")

socket.socket.connect = socket.getaddrinfo = socket.create_connection = refuse
from minits import load

def attempt():
    start = time.perf_counter()
    try:
        load("org/name")
        said = "loaded"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    return {"said": said, "seconds": time.perf_counter() - start}

empty = attempt()
os.rename(sys.argv[1], sys.argv[2])
print(json.dumps({"empty": empty, "full": attempt()}))
"""


@pytest.fixture(scope="module")
def offline(tmp_path_factory) -> dict:
    """What load("org/name") does under HF_HUB_OFFLINE with an empty cache, then with a full one."""
    home = tmp_path_factory.mktemp("home")
    repository, revision = home / "prepared", "4d7a" * 10
    blobs = write_checkpoint(repository / "blobs", SHAPE)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    snapshot = repository / "snapshots" / revision
    snapshot.mkdir(parents=True)
    for blob in blobs.iterdir():
        (snapshot / blob.name).symlink_to(Path("../../blobs") / blob.name)
    cache = home / "hub"
    cache.mkdir()
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(home),
        "PYTHONPATH": str(REPOSITORY),
    }
    environment.pop("HF_HUB_CACHE", None)
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE, str(repository), str(cache / "models--org--name")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]) | {"cache": str(cache)}


def test_offline_with_an_empty_cache_is_an_error_that_names_the_switch_and_the_cache(offline):
    assert offline["empty"]["said"].startswith("FileNotFoundError: org/name could not be had: ")
    assert offline["cache"] in offline["empty"]["said"]
    assert "HF_HUB_OFFLINE is set" in offline["empty"]["said"]


def test_offline_errors_come_at_once(offline):
    # It is far less than one; retries over a network would take longer.
    assert offline["empty"]["seconds"] < 10


def test_offline_a_cached_model_loads_through_the_caches_links(offline):
    assert offline["full"]["said"] == "loaded"


# -- saves that go wrong ---------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["disk", "ctrl-c"]
)
@pytest.mark.parametrize("file", ["model.safetensors", "thinking.safetensors"])
def test_a_save_that_fails_leaves_nothing_and_keeps_what_was_there(
    tmp_path, monkeypatch, error, file
):
    model, tokenizer = load(trained_folder(tmp_path / "run" / "checkpoints" / "step-000001"))
    before = contents(tmp_path)

    def write_some(tensors, path, metadata=None):
        save_file(tensors, path, metadata)
        if Path(path).name == file:
            os.truncate(path, 100)
            raise error

    monkeypatch.setattr(tensor_files, "save_file", write_some)
    with pytest.raises(type(error)):
        save(model, tokenizer, tmp_path / "run" / "checkpoints" / "step-000002", ABOUT)
    assert contents(tmp_path) == before
    assert not (tmp_path / "run" / "checkpoints" / "step-000002").exists()


def test_a_kill_inside_a_save_leaves_the_old_checkpoint_as_the_newest(tmp_path):
    """A child process dies by SIGKILL with model.safetensors half written: nothing can clean up."""
    old = trained_folder(tmp_path / "run" / "checkpoints" / "step-000001")
    model, tokenizer = load(old)
    before = contents(old)
    child = os.fork()
    if child == 0:
        try:

            def write_half(tensors, path, metadata=None):
                Path(path).write_bytes(b"half a file")
                os.kill(os.getpid(), signal.SIGKILL)

            tensor_files.save_file = write_half
            save(model, tokenizer, old.with_name("step-000002"), ABOUT)
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert contents(old) == before
    assert checkpoint_of(tmp_path / "run") == old
    # What was left behind is in nobody's way.
    save(model, tokenizer, old.with_name("step-000002"), ABOUT)
    assert checkpoint_of(tmp_path / "run").name == "step-000002"


def test_what_a_killed_process_of_the_same_number_left_behind_does_not_get_into_a_save(tmp_path):
    left = tmp_path / f"run.{os.getpid()}.tmp"
    left.mkdir()
    (left / "model-00001-of-00002.safetensors").write_bytes(b"half a file")
    run, other = (trained_folder(tmp_path / name) for name in ("run", "other"))
    assert sorted(contents(run)) == sorted(contents(other))
    assert not left.exists()


def test_an_existing_model_is_never_overwritten(tmp_path):
    folder = trained_folder(tmp_path / "run")
    before = contents(folder)
    with pytest.raises(ValueError, match="run exists .*nothing is overwritten"):
        save(*load(folder), folder, ABOUT)
    assert contents(folder) == before


# -- run folders -----------------------------------------------------------------------------------


def test_a_run_folder_stands_for_its_newest_finished_checkpoint(tmp_path):
    first = trained_folder(tmp_path / "checkpoints" / "step-000009")
    second = tmp_path / "checkpoints" / "step-000010"
    shutil.copytree(first, second)
    shutil.copytree(first, tmp_path / "checkpoints" / "step-000011.1234.tmp")
    rewrite(second / "model.safetensors", lambda tensors: tensors["model.norm.weight"].fill_(7.0))
    assert (load(tmp_path)[0].backbone.model.norm.weight == 7.0).all()


def test_a_run_without_a_finished_checkpoint_is_called_so(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="run without a finished checkpoint.*run.json"):
        load(tmp_path)
