"""Hugging Face folder or hub id -> model, and back. Nothing is converted: parameter names are the file's keys.

A model folder holds config.json, generation_config.json, tokenizer.json and model.safetensors (or shards with an
index). What we train adds thinking.json (method, chunk size, layers, where it comes from) and thinking.safetensors
(T and C), so that transformers loads the same folder as a plain Qwen2.5.
"""
from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from minits.checkpoint.files import flush, listing, new_folder, present, read_json, require
from minits.qwen import Qwen2ForCausalLM, QwenConfig
from minits.thinking import ThinkingConfig, ThinkingStates
from minits.checkpoint.tokenizer import Tokenizer

CHOICES = ("chunk_size", "inject_after", "extract_after")  # what a training fixes of Thinking States, in thinking.json
FLOATS = ("F64", "F32", "F16", "BF16")  # what weights may be, in the words of safetensors
LFS_POINTER = b"version https://git-lfs"  # how a file begins whose weights `git lfs` has not fetched
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
WANTED = ["*.json", "*.safetensors"]  # files of a hub repository that we read


def load(folder_or_hub_id: str | Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu",
         chunk_size: int | None = None, inject_after: int | None = None, extract_after: int | None = None,
         revision: str | None = None) -> tuple[ThinkingStates, Tokenizer]:
    """Model and tokenizer from a model folder, a run folder (its newest checkpoint) or a hub id.

    chunk_size, inject_after, extract_after: None means what the folder's training says, else 8, 1, n_layers - 1.
    A plain Qwen2.5 folder gets fresh copies as T and C (paper, appendix A.1). Raises FileNotFoundError for what is
    missing, ValueError for what does not fit, a value that contradicts a trained run included.
    """
    folder = checkpoint_of(resolve(folder_or_hub_id, revision))
    config = read_config(folder)
    eos_ids, pad_id = special_ids(folder, config.vocab_size)
    about = read_about(folder)
    asked = {"chunk_size": chunk_size, "inject_after": inject_after, "extract_after": extract_after}
    asked = {key: value for key, value in asked.items() if value is not None}
    usual = {"chunk_size": 8, "inject_after": 1, "extract_after": max(1, config.num_hidden_layers - 1)}
    choices = {key: about[key] for key in CHOICES} if about else usual | asked
    for key, value in asked.items():
        if value != choices[key]:
            raise ValueError(f"{key} {value} was asked, but {folder} was trained with {choices[key]}; leave it out, "
                             "or train again with the value you want.")

    with torch.device("meta"):
        model = ThinkingStates(Qwen2ForCausalLM(config), ThinkingConfig(**choices, eos_ids=eos_ids, pad_id=pad_id),
                               thinks=about.get("method", "thinking") == "thinking")
    load_backbone(model.backbone, folder, dtype, device)
    if model.thinks:
        blocks = nn.ModuleDict({"thinking_block": model.thinking_block, "compression_block": model.compression_block})
        if about:
            load_exactly(blocks, [folder / "thinking.safetensors"], dtype, device)
        else:
            blocks.to_empty(device=device).to(dtype)
            model.copy_blocks()
    tokenizer = Tokenizer.from_folder(folder, eos_ids, pad_id)
    model.blocked = blocked_ids(tokenizer, config.vocab_size).to(device)
    if unknown := [i for i in eos_ids if model.blocked[i]]:
        raise ValueError(f"{folder}: the id {unknown[0]} that ends a text is no token of tokenizer.json, so nothing would "
                         "ever end. Use the tokenizer and generation_config.json of one and the same checkpoint.")
    return model.eval(), tokenizer


def save(model: ThinkingStates, tokenizer: Tokenizer, folder: Path, about: dict) -> None:
    """Writes a new model folder at once or not at all. `about`: method and origin, for thinking.json.

    Raises ValueError if there is something at `folder` already.
    """
    if present(folder):
        raise ValueError(f"{folder} exists (it holds {listing(folder)}); nothing is overwritten. Name a new folder.")
    with new_folder(folder) as target:
        write_model(model, tokenizer, target, about)


def write_model(model: ThinkingStates, tokenizer: Tokenizer, target: Path, about: dict) -> None:
    """Writes the files of `save` into the existing folder `target`."""
    config, state = model.config, model.backbone.state_dict()
    if model.backbone.config.tie_word_embeddings:
        del state["lm_head.weight"]  # the same storage as the embedding: written once, tied again on loading
    write_tensors(state, target / "model.safetensors")
    if model.thinks:
        blocks = nn.ModuleDict({"thinking_block": model.thinking_block, "compression_block": model.compression_block})
        write_tensors(blocks.state_dict(), target / "thinking.safetensors")
    ids = {"eos_token_id": list(config.eos_ids), "pad_token_id": config.pad_id}
    dtype = str(model.backbone.lm_head.weight.dtype).removeprefix("torch.")
    choices = {key: getattr(config, key) for key in CHOICES}
    for file, content in {
        "config.json": model.backbone.config.to_json() | ids | {"torch_dtype": dtype},
        "generation_config.json": ids,
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast",
                                  "eos_token": tokenizer.token(config.eos_ids[0]),
                                  "pad_token": tokenizer.token(config.pad_id)},
        "thinking.json": about | choices,
    }.items():
        (target / file).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (target / "tokenizer.json").write_text(tokenizer.definition, encoding="utf-8")


# -- where the files are -------------------------------------------------------------------------------------------------


def resolve(folder_or_hub_id: str | Path, revision: str | None = None) -> Path:
    """The local folder of a path or hub id. What looks like a path is never sent to the hub."""
    name, path = str(folder_or_hub_id), Path(folder_or_hub_id).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ValueError(f"{name} is a file; give the folder that holds it.")
    if (not HUB_ID.fullmatch(name) or isinstance(folder_or_hub_id, Path) or name.startswith(".")
            or Path(name).parent.is_dir()):
        near = path.parent
        raise FileNotFoundError(f"no folder {name} ({near} holds {listing(near)}). Give a folder with config.json and "
                                "safetensors, or a hub id such as Qwen/Qwen2.5-0.5B.")
    return download(name, revision)


def download(hub_id: str, revision: str | None) -> Path:
    """The cached snapshot of a hub repository, fetched if need be; honours HF_HUB_OFFLINE and HF_HOME."""
    from huggingface_hub import constants, snapshot_download  # imported here: local folders never need it

    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=WANTED))
    except Exception as error:  # the hub, the network and the disk each have errors of their own, with no common ancestor
        at = hub_id + (f" at revision {revision}" if revision else "")
        offline = ", HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else ""
        raise FileNotFoundError(
            f"{at} could not be had: {' '.join(str(error).split()) or type(error).__name__} (cache: "
            f"{constants.HF_HUB_CACHE}{offline}). Check the id, --revision and the network, or give a local folder.") from error


def checkpoint_of(folder: Path) -> Path:
    """The model folder: `folder` itself, or the newest checkpoint of a run folder."""
    if steps := finished_checkpoints(folder):
        return steps[-1]
    if (folder / "run.json").exists():
        raise FileNotFoundError(f"{folder} is a run without a finished checkpoint (it holds {listing(folder)}). "
                                "Train it longer, or name another run.")
    return folder


def finished_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run folder, oldest first; what a kill left half written is passed over."""
    found = [p for p in folder.glob("checkpoints/step-*") if p.name.removeprefix("step-").isdigit()]
    return sorted(found, key=lambda p: int(p.name.removeprefix("step-")))


def read_config(folder: Path) -> QwenConfig:
    """config.json of a model folder. Raises FileNotFoundError or ValueError, as `QwenConfig.from_json`."""
    path = folder / "config.json"
    return QwenConfig.from_json(read_json(path), str(path))


def read_about(folder: Path) -> dict:
    """thinking.json of a folder that we saved; empty for a plain Qwen2.5. Raises if it is not whole or not there."""
    path = folder / "thinking.json"
    if not present(path) and not present(folder / "thinking.safetensors"):
        return {}
    about = read_json(path)
    numbers = {key: about.get(key) for key in CHOICES} | {"max_ops": about.get("max_ops", 1)}  # save needs no max_ops
    for key, value in numbers.items():
        if type(value) is not int:
            raise ValueError(f"{path}: {key} is {value!r}, not a whole number. Put back what training wrote.")
    return about


def special_ids(folder: Path, vocab_size: int) -> tuple[tuple[int, ...], int]:
    """(ids that end a text, first one first; id that pads) from generation_config.json, else config.json."""
    files = [read_json(folder / name) for name in ("generation_config.json", "config.json")
             if present(folder / name)]
    eos = next((f["eos_token_id"] for f in files if f.get("eos_token_id") not in (None, [])), None)
    if eos is None:
        raise ValueError(f"{folder}: neither generation_config.json nor config.json names an eos_token_id; "
                         "add the id that ends a text (151643 for Qwen2.5 base models).")
    eos_ids = tuple(dict.fromkeys(eos if isinstance(eos, list) else [eos]))
    pad = next((f["pad_token_id"] for f in files if f.get("pad_token_id") is not None), eos_ids[0])
    if wrong := [i for i in (*eos_ids, pad) if not (isinstance(i, int) and 0 <= i < vocab_size)]:
        raise ValueError(f"{folder}: eos or pad id {wrong[0]} is outside the vocabulary (0 … {vocab_size - 1}); "
                         "correct generation_config.json or config.json.")
    return eos_ids, pad


def blocked_ids(tokenizer: Tokenizer, vocab_size: int) -> torch.Tensor:
    """bool [V]: the rows of a padded vocabulary that stand for no token."""
    blocked = torch.ones(vocab_size, dtype=torch.bool)
    blocked[[i for i in tokenizer.known_ids if i < vocab_size]] = False
    return blocked


# -- tensors -------------------------------------------------------------------------------------------------------------


def load_backbone(backbone: Qwen2ForCausalLM, folder: Path, dtype: torch.dtype, device: str | torch.device) -> None:
    """Fills a backbone (on the meta device) from the folder's single file or shards."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if present(single):
        files = [single]
    elif present(index):
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
            raise ValueError(f"{index} has no weight_map from tensors to files; download it again.")
        names = sorted(set(weight_map.values()))
        files = [folder / name for name in names]
        if missing := [f.name for f in files if not f.exists()]:
            raise FileNotFoundError(f"{index} names shards that are not there: {', '.join(missing)}. "
                                    "Download them; nothing was loaded.")
    else:
        raise FileNotFoundError(f"{folder} has no model.safetensors and no model.safetensors.index.json (it holds "
                                f"{listing(folder)}). Only safetensors weights are read.")
    load_exactly(backbone, files, dtype, device, tied=backbone.config.tie_word_embeddings)
    backbone.tie()


def load_exactly(module: nn.Module, files: list[Path], dtype: torch.dtype, device: str | torch.device,
                 tied: bool = False) -> None:
    """Fills `module` from `files`, which must cover its tensors exactly: no more, no less, same shapes, one float type.

    All that is wrong is named in one error. `tied`: lm_head.weight is the embedding and need not be in the files.
    """
    expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    handles = [open_tensors(path) for path in files]
    found: dict[str, tuple] = {}
    problems = []
    for path, handle in zip(files, handles):
        for name in handle.keys():
            part = handle.get_slice(name)
            if name in found:
                problems.append(f"twice: {name}")
            found[name] = (handle, tuple(part.get_shape()), part.get_dtype())
    problems += [f"missing: {name}" + (" (config.json says tie_word_embeddings = false)" if name == "lm_head.weight"
                                       else "")
                 for name in expected if name not in found and not (tied and name == "lm_head.weight")]
    problems += [f"not part of the model: {name}" for name in found if name not in expected]
    problems += [f"shape of {name}: {list(shape)} in the file, {list(expected[name])} by config.json"
                 for name, (_, shape, _) in found.items() if name in expected and shape != expected[name]]
    usual = Counter(kind for _, _, kind in found.values()).most_common(1)[0][0] if found else "F32"
    problems += [f"type of {name}: {kind}, the others are {usual}" if kind in FLOATS else
                 f"type of {name}: {kind}, not one of {', '.join(FLOATS)}"
                 for name, (_, _, kind) in found.items() if kind != usual or kind not in FLOATS]
    if problems:
        names = ", ".join(sorted({path.name for path in files}))
        raise ValueError(f"{files[0].parent}: {names} does not fit the model, {len(problems)} problem(s): "
                         + "; ".join(problems) + ". Use the files and config.json of one and the same checkpoint.")
    tensors = {name: handle.get_tensor(name).to(device=device, dtype=dtype) for name, (handle, _, _) in found.items()}
    if tied:
        embedding = tensors["model.embed_tokens.weight"]
        if not torch.equal(tensors.setdefault("lm_head.weight", embedding), embedding):
            raise ValueError(f"{files[0].parent}: config.json says tie_word_embeddings = true, but lm_head.weight "
                             "differs from model.embed_tokens.weight. Set tie_word_embeddings to false.")
    module.load_state_dict(tensors, strict=True, assign=True)


def open_tensors(path: Path) -> safe_open:
    """The tensors of a safetensors file, memory-mapped: read when asked. Raises, naming the file, unless it is whole."""
    require(path)
    with path.open("rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise ValueError(f"{path} is a Git-LFS pointer of {path.stat().st_size} bytes, not the weights. "
                             "Run `git lfs pull` in its repository, or download the file.")
    try:
        return safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        raise ValueError(f"{path} ({path.stat().st_size} bytes) is no whole safetensors file: {error}. Download it "
                         "again.") from error


def write_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Writes a safetensors file and flushes it to disk."""
    save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, path, metadata={"format": "pt"})
    flush(path)
