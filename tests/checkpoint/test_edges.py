"""What checkpoints must not do silently: one table of faults, then what is accepted and noted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file
from strategies import Shape, fresh, write_checkpoint
from test_weights import ABOUT, SHAPE, logits, rewrite, rewrite_json, same_tensors, trained_folder

from minits import load, save
from minits.checkpoint import files, weights
from minits.checkpoint.download import finished_checkpoints
from minits.checkpoint.files import listing, printable, write_text
from minits.checkpoint.tiny import ASSETS

INDEX = "model.safetensors.index.json"
NORM, QUERY = "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"
WIDE = Shape(vocab=260, layers=2, window=5)


def config(**keys):
    return lambda folder: rewrite_json(folder / "config.json", **keys)


def thinking(**keys):
    return lambda folder: rewrite_json(folder / "thinking.json", **keys)


def spoil(name: str, value: float, part: str = "model.safetensors"):
    """One number of one tensor."""

    def change(folder: Path) -> None:
        rewrite(folder / part, lambda tensors: tensors[name].view(-1)[3:4].fill_(value))

    return change


def generation(**keys):
    return lambda folder: rewrite_json(folder / "generation_config.json", **keys)


def nested(file: str):
    return lambda folder: (folder / file).write_text('{"a": ' * 100_000)


def pipe(file: str):
    def change(folder: Path) -> None:
        (folder / file).unlink()
        os.mkfifo(folder / file)

    return change


def rename_tensor(name: str):
    def change(tensors: dict) -> None:
        tensors[name] = tensors.pop(NORM)

    return lambda folder: rewrite(folder / "model.safetensors", change)


KEYS = [
    ("model_type", "llama"),
    ("vocab_size", "260"),
    ("vocab_size", 10**11),
    ("hidden_size", True),
    ("intermediate_size", 160.5),
    ("num_hidden_layers", -1),
    ("num_attention_heads", [4]),
    ("num_key_value_heads", 3),
    ("head_dim", 7),
    ("rms_norm_eps", "1e-6"),
    ("rms_norm_eps", float("nan")),
    ("rope_theta", 0),
    ("rope_theta", True),
    ("rope_theta", float("nan")),
    ("rope_theta", "10000"),
    ("rope_theta", 10**400),
    ("rope_parameters", [1e4]),
    ("rope_parameters", {"rope_theta": -1.0}),
    ("rope_parameters", {"partial_rotary_factor": 0.5}),
    ("rope_scaling", {"rope_type": "yarn"}),
    ("max_position_embeddings", 10**11),
    ("max_position_embeddings", 4),
    ("tie_word_embeddings", "yes"),
    ("hidden_act", "gelu"),
    ("is_causal", False),
    ("use_sliding_window", 1),
    ("sliding_window", 0),
    ("sliding_window", -8),
    ("sliding_window", None),
    ("use_sliding_window", False),
    ("max_window_layers", 2),
    ("layer_types", "sliding_attention"),
    ("layer_types", ["full_attention", "linear_attention"]),
    ("layer_types", ["sliding_attention"]),
    ("attention_dropout", -0.1),
    ("eos_token_id", [256, None]),
    ("eos_token_id", True),
    ("pad_token_id", [256]),
    ("pad_token_id", -1),
    ("quantization_config", "gptq"),
]
FAULTS = {
    **{
        f"{key} {value!r:.20}": (config(**{key: value}), f"config.json.*{key}")
        for key, value in KEYS
    },
    **{
        f"generation {key} {value!r}": (
            generation(**{key: value}),
            f"generation_config.json: {key}",
        )
        for key, value in [("eos_token_id", "256"), ("eos_token_id", 1.0), ("pad_token_id", 10**9)]
    },
    **{
        f"thinking {key} {value!r}": (
            thinking(**{key: value}),
            f"thinking.json.*: .*{key.replace('_', '.')}",
        )
        for key, value in [
            ("chunk_size", -8),
            ("chunk_size", 4.0),
            ("chunk_size", 10**11),
            ("inject_after", True),
            ("extract_after", 9),
            ("max_thought_tokens", 0),
            ("max_thought_tokens", "64"),
            ("max_thought_tokens", 10**11),
            ("thinks", "yes"),
            ("thinks", False),
            ("thinks", 1),
            ("method", "no-cot"),
            ("method", 5),
            ("task", ["parity"]),
            ("seed", "1"),
            ("step", -3),
        ]
    },
    "unknown method": (thinking(method="thinkin", thinks=None), "thinking.json: method.*thinkin"),
    "nan": (spoil(QUERY, float("nan")), f"model.safetensors: {QUERY} .* not finite"),
    "inf": (spoil(NORM, -float("inf")), f"model.safetensors: {NORM} .* not finite"),
    "nan in T": (
        spoil("thinking_block.norm.weight", float("nan"), "thinking.safetensors"),
        "thinking.safetensors: thinking_block.norm.weight .* not finite",
    ),
    "nested config": (nested("config.json"), "config.json is not valid JSON"),
    "nested thinking": (nested("thinking.json"), "thinking.json is not valid JSON"),
    "nested tokenizer": (nested("tokenizer.json"), "tokenizer.json is not a readable tokenizer"),
    "pipe of weights": (pipe("model.safetensors"), "model.safetensors is not a file"),
    "pipe of T and C": (pipe("thinking.safetensors"), "thinking.safetensors is not a file"),
    "pipe of config": (pipe("config.json"), "config.json is not a file"),
    "pipe of tokenizer": (pipe("tokenizer.json"), "tokenizer.json is not a file"),
    "control characters": (rename_tensor("a\x1b[2J\r\nb"), r"part of the model: a\\x1b\[2J\\r\\nb"),
    "long name": (rename_tensor("w" * 200_000), "w … .* characters … w"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_told_in_a_line_that_names_file_and_key(tmp_path, fault):
    damage, message = FAULTS[fault]
    folder = trained_folder(tmp_path / "run", WIDE)
    damage(folder)
    with pytest.raises(ValueError, match=message) as error:
        load(folder)
    assert len(str(error.value)) < 1500 and str(error.value).isprintable()


def test_values_that_leave_the_range_of_the_compute_type_are_named(tmp_path):
    def change(tensors: dict) -> None:
        tensors[NORM][2] = 1e300

    folder = write_checkpoint(tmp_path, SHAPE, dtype=torch.float64, change=change)
    assert load(folder, torch.float64)[0].backbone.model.norm.weight[2] == 1e300
    with pytest.raises(ValueError, match=f"{NORM} .* not finite as torch.float32 .*torch.float64"):
        load(folder)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int64, "float32", None])
def test_a_type_that_nothing_is_computed_in_is_refused(tmp_path, dtype):
    with pytest.raises(ValueError, match=f"{dtype} are not supported; use one of torch.float32"):
        load(write_checkpoint(tmp_path, SHAPE), dtype)


# -- which files hold the weights ------------------------------------------------------------------


def edit_index(**changes):
    """Other places for tensors in the index; None: the index lacks it."""

    def change(folder: Path) -> None:
        content = json.loads((folder / INDEX).read_text())
        places = content["weight_map"] | {
            name.replace("__", "."): to for name, to in changes.items()
        }
        kept = {name: file for name, file in places.items() if file is not None}
        (folder / INDEX).write_text(json.dumps(content | {"weight_map": kept}))

    return change


def stale_single(folder: Path) -> None:
    write_checkpoint(folder.with_name("other"), replace(SHAPE, seed=5))
    shutil.copy(folder.with_name("other") / "model.safetensors", folder)


def stale_shard(folder: Path) -> None:
    shutil.copy(
        folder / "model-00001-of-00002.safetensors", folder / "model-00001-of-00003.safetensors"
    )


FIRST, SECOND = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
DISAGREEMENTS = {
    "single file": (stale_single, f"holds weights twice: {INDEX} does not name model.safetensors"),
    "stale shard": (stale_shard, f"{INDEX} does not name model-00001-of-00003"),
    "wrong shard": (edit_index(model__norm__weight=FIRST), f"puts {NORM} into {FIRST}.*{SECOND}"),
    "not in the index": (edit_index(model__norm__weight=None), f"not put {NORM} into {SECOND}"),
    "in no shard": (edit_index(ghost=FIRST), f"{INDEX} puts ghost into {FIRST}"),
    "out of the folder": (
        edit_index(ghost="../other/model.safetensors"),
        f"{INDEX}: weight_map has ghost in '../other/model.safetensors'",
    ),
    "an absolute path": (edit_index(ghost="/etc/passwd"), "ghost in '/etc/passwd'"),
    "no name": (edit_index(ghost=5), "ghost in 5"),
}


@pytest.mark.parametrize("fault", DISAGREEMENTS)
def test_index_headers_and_files_that_disagree_are_an_error_that_says_which(tmp_path, fault):
    damage, message = DISAGREEMENTS[fault]
    folder = write_checkpoint(tmp_path / "sharded", SHAPE, shards=2)
    damage(folder)
    with pytest.raises(ValueError, match=message):
        load(folder)


def test_a_shard_beside_a_single_file_is_an_error_that_says_which(tmp_path):
    folder = write_checkpoint(tmp_path, SHAPE)
    shutil.copy(folder / "model.safetensors", folder / FIRST)
    with pytest.raises(ValueError, match=f"weights twice: model.safetensors does not name {FIRST}"):
        load(folder)


def test_shards_without_their_index_are_not_taken_for_no_weights_at_all(tmp_path):
    folder = write_checkpoint(tmp_path, SHAPE, shards=2)
    (folder / INDEX).unlink()
    with pytest.raises(FileNotFoundError, match=f"no {INDEX}.*{FIRST}"):
        load(folder)


def test_an_index_may_name_the_single_file(tmp_path):
    folder = write_checkpoint(tmp_path, SHAPE)
    names = load_file(folder / "model.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (folder / INDEX).write_text(json.dumps(index))
    assert same_tensors(
        load(folder)[0].backbone.state_dict(), fresh(SHAPE, torch.float32).backbone.state_dict()
    )


# -- one line, however much is wrong ---------------------------------------------------------------


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes"])
def test_quantised_weights_are_told_in_one_short_line(tmp_path, method):
    settings = {"quant_method": method, "bits": 4, "modules_to_not_convert": ["x" * 1000]}
    folder = write_checkpoint(tmp_path, SHAPE, quantization_config=settings)
    with pytest.raises(ValueError, match=rf"quantization_config.*quantised \({method}\)") as error:
        load(folder)
    assert len(str(error.value)) < 300


def test_many_problems_are_counted_and_the_first_ones_told(tmp_path):
    def pack(tensors: dict) -> None:
        for name in [name for name in tensors if name.endswith("proj.weight")]:
            tensors[name.replace("weight", "qweight")] = tensors.pop(name).to(torch.int8)

    folder = write_checkpoint(tmp_path, replace(SHAPE, layers=4), change=pack)
    with pytest.raises(ValueError, match=r"84 problem\(s\): .*qweight|; and 76 more") as error:
        load(folder)
    assert len(str(error.value)) < 1200


@pytest.mark.parametrize(
    "key, value", [("hidden_size", 64), ("intermediate_size", 80), ("num_hidden_layers", 3)]
)
def test_weights_of_another_size_than_config_json_says_name_its_key(tmp_path, key, value):
    folder = write_checkpoint(tmp_path, SHAPE, head_dim=8)
    rewrite_json(folder / "config.json", layer_types=None, **{key: value})
    with pytest.raises(
        ValueError, match=f"problem.*config.json.*{key}|{key} {value} by config.json"
    ):
        load(folder)


def test_foreign_text_is_shown_short_and_without_control_characters():
    assert printable("a\n\x1b\u202e é 日") == "a\\n\\x1b\\u202e é 日"
    assert printable("x" * 1000) == "x" * 100 + " … 800 characters … " + "x" * 100


def test_a_folder_is_listed_up_to_eight_names(tmp_path):
    assert listing(tmp_path) == "nothing"
    for name in "ihgfedcba":
        assert "more" not in listing(tmp_path)
        (tmp_path / name).touch()
    assert listing(tmp_path) == "a, b, c, d, e, f, g, h and 1 more"


# -- accepted, and said ----------------------------------------------------------------------------


def test_parts_of_another_precision_are_accepted_and_named(tmp_path):
    def widen(tensors: dict) -> None:
        tensors[NORM] = tensors[NORM].float()

    folder = write_checkpoint(tmp_path, SHAPE, dtype=torch.bfloat16, change=widen)
    with pytest.warns(UserWarning, match=f"1 tensors are of another precision than BF16.*{NORM}"):
        model, _ = load(folder)
    assert torch.equal(
        model.backbone.model.norm.weight, load_file(folder / "model.safetensors")[NORM]
    )


@pytest.mark.parametrize("place", ["model", "model.layers.1.self_attn"])
def test_stored_rotary_frequencies_are_passed_over_and_named(tmp_path, place):
    name = f"{place}.rotary_emb.inv_freq"
    plain_model = load(write_checkpoint(tmp_path / "plain", SHAPE))[0]
    folder = write_checkpoint(
        tmp_path / "old", SHAPE, change=lambda tensors: tensors.update({name: torch.ones(4)})
    )
    with pytest.warns(UserWarning, match=f"not read.*{name}"):
        model, _ = load(folder)
    assert torch.equal(logits(model), logits(plain_model))


def test_dropout_that_the_base_was_trained_with_is_noted(tmp_path):
    with pytest.warns(UserWarning, match="config.json: attention_dropout 0.1 is not applied"):
        load(write_checkpoint(tmp_path, SHAPE, attention_dropout=0.1))


# -- what travels with a checkpoint ----------------------------------------------------------------

COMPANIONS = {
    "tokenizer_config.json": b'{"chat_template": "{{ x }}",\r\n "model_max_length": 99}',
    "chat_template.jinja": "{% for m in messages %}é{% endfor %}".encode(),
    "special_tokens_map.json": b"{}",
    "added_tokens.json": b'{"<|endoftext|>": 256}',
    "vocab.json": b'{"a": 0}\n',
    "merges.txt": b"#version: 0.2\na b\r\n",
}


def instruct_folder(folder: Path) -> Path:
    """A folder with all that an Instruct model brings."""
    write_checkpoint(folder, SHAPE, bos_token_id=3, initializer_range=0.02, use_cache=False)
    keys = {"eos_token_id": [256, 3], "temperature": 0.7, "top_p": 0.8, "pad_token_id": 256}
    (folder / "generation_config.json").write_text(json.dumps(keys))
    for name, content in COMPANIONS.items():
        (folder / name).write_bytes(content)
    definition = (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_bytes(definition.replace(b"\n", b"\r\n") + b"\r\n ")
    return folder


def test_what_we_do_not_change_travels_from_base_to_checkpoint_and_on(tmp_path):
    base = instruct_folder(tmp_path / "base")
    for number in (1, 2):
        saved = tmp_path / f"saved-{number}"
        save(*load(base if number == 1 else tmp_path / "saved-1"), saved, ABOUT)
        for name in [*COMPANIONS, "tokenizer.json"]:
            assert (saved / name).read_bytes() == (base / name).read_bytes(), name
        for name, ours in [
            ("config.json", {"eos_token_id", "pad_token_id", "torch_dtype"}),
            ("generation_config.json", set()),
        ]:
            before, after = (json.loads((each / name).read_text()) for each in (base, saved))
            kept = {key: value for key, value in after.items() if key not in ours}
            assert kept == {key: value for key, value in before.items() if key not in ours}


def test_a_model_that_became_another_does_not_get_the_old_config(tmp_path):
    """The keys that we read are the model's, the others the base's."""
    _, tokenizer = load(instruct_folder(tmp_path / "base"))
    other = fresh(replace(SHAPE, layers=3), torch.float32)
    other.config = replace(other.config, eos_ids=(256,), pad_id=256)
    save(other, tokenizer, tmp_path / "saved", ABOUT)
    raw = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert (raw["num_hidden_layers"], raw["bos_token_id"]) == (3, 3)
    assert load(tmp_path / "saved")[0].backbone.config == other.backbone.config


def test_a_hub_repository_is_fetched_with_what_travels():
    from fnmatch import fnmatch

    from minits.checkpoint.download import WANTED

    wanted = [*COMPANIONS, "chat_template.json", "config.json", "tokenizer.json"]
    assert [name for name in wanted if not any(fnmatch(name, each) for each in WANTED)] == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("tie", [True, False])
def test_a_checkpoint_can_be_written_in_another_precision(tmp_path, dtype, tie):
    model, tokenizer = load(trained_folder(tmp_path / "run", replace(SHAPE, tie=tie)))
    save(model, tokenizer, tmp_path / "saved", ABOUT, dtype=dtype)
    for part in ("model.safetensors", "thinking.safetensors"):
        assert {tensor.dtype for tensor in load_file(tmp_path / "saved" / part).values()} == {dtype}
    raw = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert raw["torch_dtype"] == str(dtype).removeprefix("torch.")
    again, cast = load(tmp_path / "saved", dtype)[0], model.to(dtype)
    assert same_tensors(again.state_dict(), cast.state_dict())


def test_a_precision_that_could_not_be_loaded_is_not_written(tmp_path):
    model = load(trained_folder(tmp_path / "run"))
    with pytest.raises(ValueError, match="torch.float16 are not supported"):
        save(*model, tmp_path / "saved", ABOUT, dtype=torch.float16)
    assert not (tmp_path / "saved").exists()


# -- names, beside others that read and write ------------------------------------------------------


def test_a_local_folder_does_not_block_a_hub_id_that_begins_like_it(tmp_path, monkeypatch):
    asked = []

    def fetch(repo_id, **_options):
        asked.append(repo_id)
        return str(write_checkpoint(tmp_path / "cache", SHAPE))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen" / "empty").mkdir(parents=True)
    for name in ("Qwen/Qwen2.5-0.5B", "Qwen/empty"):
        load(name)
    assert asked == ["Qwen/Qwen2.5-0.5B", "Qwen/empty"]


def test_the_hubs_error_says_what_a_local_folder_of_that_name_holds(tmp_path, monkeypatch):
    def fail(*_args, **_options):
        raise ConnectionResetError

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mine" / "weights").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="models/mine here holds weights"):
        load("models/mine")


def test_a_checkpoint_that_goes_while_it_is_read_gives_way_to_the_newest(tmp_path, monkeypatch):
    """A training saves step 2 and removes step 1 just after a reader has found that."""
    run = tmp_path / "run"
    first = trained_folder(run / "checkpoints" / "step-000001")
    read = weights.read_about

    def meanwhile(folder: Path):
        if first.exists():
            first.rename(first.with_name("step-000002"))
        return read(folder)

    monkeypatch.setattr(weights, "read_about", meanwhile)
    assert load(run)[0].thinks


def test_a_checkpoint_that_is_gone_for_good_is_an_error(tmp_path, monkeypatch):
    folder = trained_folder(tmp_path / "run")
    monkeypatch.setattr(weights, "read_about", lambda folder: shutil.rmtree(folder) or {})
    with pytest.raises(FileNotFoundError):
        load(folder)


NO_MEMORY = """
import resource, sys
from minits import load

now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + 2**28, now + 2**28))
try:
    load(sys.argv[1])
except ValueError as error:
    print(error)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux tells sizes there")
def test_weights_that_find_no_memory_are_told_in_one_line(tmp_path):
    """300 MB, as float32, where there are 256."""
    shape = Shape(layers=1, vocab=260, heads=2, kv_heads=1)
    wide = {"intermediate_size": 1_000_000, "hidden_size": 16}

    def widen(tensors: dict) -> None:
        for name in ("gate_proj", "up_proj", "down_proj"):
            size = (16, 1_000_000) if name == "down_proj" else (1_000_000, 16)
            tensors[f"model.layers.0.mlp.{name}.weight"] = torch.zeros(size, dtype=torch.bfloat16)

    folder = write_checkpoint(tmp_path, shape, dtype=torch.bfloat16, change=widen, **wide)
    command = [sys.executable, "-c", NO_MEMORY, str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ASSETS.parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert "could not be put on cpu" in done.stdout, done.stderr
    assert done.stdout.count("\n") == 1


# -- speed -----------------------------------------------------------------------------------------


def test_loading_does_not_import_the_compiler():
    """torch._dynamo takes 2 s: nn.Embedding's initial values need it on the meta device."""
    code = "import sys, minits; minits.load(sys.argv[1]); print('torch._dynamo' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(ASSETS.parents[1])}
    command = [sys.executable, "-c", code, str(ASSETS / "parity")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.stdout == "False\n", done.stderr


# -- at the command line ---------------------------------------------------------------------------


def test_a_command_tells_of_an_oddity_in_a_line_of_its_own(tmp_path):
    def widen(tensors: dict) -> None:
        tensors[NORM] = tensors[NORM].float()

    folder = write_checkpoint(tmp_path, SHAPE, dtype=torch.bfloat16, change=widen)
    command = [sys.executable, str(ASSETS.parents[1] / "run.py"), "infer", "Hi", "--device", "cpu"]
    flags = ["--model", str(folder), "--max-new-tokens", "1"]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=120)
    (line,) = [line for line in done.stderr.splitlines() if NORM in line]
    assert line.startswith(f"{folder}: 1 tensors are of another precision")
    assert "warn" not in done.stderr.lower(), done.stderr


def test_a_text_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    write_text(path, "before")

    def full(_path: Path) -> None:
        raise OSError(28, "disk full")

    monkeypatch.setattr(files, "flush", full)
    with pytest.raises(OSError, match="disk full.*run.json"):
        write_text(path, "after")
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


def test_the_newest_checkpoint_is_that_of_the_highest_step(tmp_path):
    names = ["step-999999", "step-1000000"]
    for name in reversed(names):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert [path.name for path in finished_checkpoints(tmp_path)] == names
