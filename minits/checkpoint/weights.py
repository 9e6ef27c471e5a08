"""Hugging Face folder or hub id -> model, and back. Nothing is converted: names are file keys.

A model folder holds config.json, generation_config.json, tokenizer.json and model.safetensors (or
shards with an index). Training adds thinking.json (method, chunk size, layers, where it comes from)
and thinking.safetensors (T and C), so that transformers loads the same folder as a plain Qwen2.5.
"""
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from minits.checkpoint.config_json import read_config, write_config
from minits.checkpoint.download import checkpoint_of, resolve
from minits.checkpoint.files import listing, new_folder, present, read_json
from minits.checkpoint.tensor_files import load_exactly, weight_files, write_tensors
from minits.checkpoint.tokenizer import Tokenizer
from minits.qwen import Qwen2ForCausalLM, QwenConfig
from minits.thinking import ThinkingConfig, ThinkingStates

# What a training fixes of Thinking States, in thinking.json.
CHOICES = ("chunk_size", "inject_after", "extract_after")
# Methods without T and C, for checkpoints that do not say whether they have them (`thinks`).
WITHOUT_BLOCKS = ("no-cot", "cot")


class Checkpoint(NamedTuple):
    """What a model folder holds."""

    model: ThinkingStates
    tokenizer: Tokenizer
    about: dict[str, Any]  # thinking.json; empty for a plain Qwen2.5


def load(
    folder_or_hub_id: str | Path,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    chunk_size: int | None = None,
    inject_after: int | None = None,
    extract_after: int | None = None,
    revision: str | None = None,
) -> tuple[ThinkingStates, Tokenizer]:
    """Model and tokenizer from a model folder, a run folder (its newest checkpoint) or a hub id.

    chunk_size, inject_after, extract_after: None for what the folder's training says, else 8, 1,
    n_layers - 1. A plain Qwen2.5 gets fresh copies as T and C (paper, appendix A.1).

    Raises FileNotFoundError for what is missing, ValueError for what does not fit, a value that
    contradicts a trained run included.
    """
    folder = checkpoint_of(resolve(folder_or_hub_id, revision))
    asked = dict(zip(CHOICES, (chunk_size, inject_after, extract_after)))
    return load_checkpoint(folder, dtype, device, **asked)[:2]


def load_checkpoint(
    folder: Path,  # a model folder
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    **asked: int | None,  # as for `load`
) -> Checkpoint:
    """As `load`, with what thinking.json says."""
    qwen = config_of(folder)
    eos_ids, pad_id = special_ids(folder, qwen.vocab_size)
    about = read_about(folder)
    choices = choose(folder, qwen, about, {k: v for k, v in asked.items() if v is not None})
    thinks = about.get("thinks", about.get("method") not in WITHOUT_BLOCKS)
    room = qwen.max_position_embeddings - choices["chunk_size"]
    limit = about.get("max_thought_tokens", min(64, room))
    config = ThinkingConfig(
        **choices, eos_ids=eos_ids, pad_id=pad_id, max_thought_tokens=limit
    )
    with torch.device("meta"):
        model = ThinkingStates(Qwen2ForCausalLM(qwen), config, thinks=thinks)
    tied = qwen.tie_word_embeddings
    load_exactly(model.backbone, weight_files(folder), dtype, device, tied=tied)
    model.backbone.tie()
    if thinks and about:
        load_exactly(blocks_of(model), [folder / "thinking.safetensors"], dtype, device)
    elif thinks:
        blocks_of(model).to_empty(device=device).to(dtype)
        model.copy_blocks()
    tokenizer = Tokenizer.from_folder(folder, eos_ids, pad_id)
    model.blocked = blocked_ids(tokenizer, qwen.vocab_size).to(device)
    unknown = [i for i in eos_ids if model.blocked[i]]
    if unknown:
        raise ValueError(
            f"{folder}: the id {unknown[0]} that ends a text is no token of tokenizer.json, so "
            "nothing would ever end. Use the tokenizer and generation_config.json of one and the "
            "same checkpoint."
        )
    return Checkpoint(model.eval(), tokenizer, about)


def choose(
    folder: Path, qwen: QwenConfig, about: dict[str, Any], asked: dict[str, int]
) -> dict[str, int]:
    """The choices of Thinking States: those of the training, else what is asked for, else usual."""
    if not about:
        last = max(1, qwen.num_hidden_layers - 1)
        return {"chunk_size": 8, "inject_after": 1, "extract_after": last} | asked
    choices = {name: about[name] for name in CHOICES}
    for name, value in asked.items():
        if value != choices[name]:
            raise ValueError(
                f"{name} {value} was asked, but {folder} was trained with {choices[name]}; leave "
                "it out, or train again with the value you want."
            )
    return choices


def blocks_of(model: ThinkingStates) -> nn.ModuleDict:
    """T and C under the names that thinking.safetensors has."""
    return nn.ModuleDict(
        {
            "thinking_block": model.thinking_block,
            "compression_block": model.compression_block,
        }
    )


def blocked_ids(tokenizer: Tokenizer, vocab_size: int) -> torch.Tensor:
    """bool [V]: the rows of a padded vocabulary that stand for no token."""
    blocked = torch.ones(vocab_size, dtype=torch.bool)
    blocked[[i for i in tokenizer.known_ids if i < vocab_size]] = False
    return blocked


# -- the small files -------------------------------------------------------------------------------


def config_of(folder: Path) -> QwenConfig:
    """config.json of a model folder. Raises FileNotFoundError, or ValueError as `read_config`."""
    path = folder / "config.json"
    return read_config(read_json(path), str(path))


def read_about(folder: Path) -> dict[str, Any]:
    """thinking.json of a folder that we saved; empty for a plain Qwen2.5.

    Raises if it is not whole, or lacking beside thinking.safetensors.
    """
    path = folder / "thinking.json"
    if not present(path) and not present(folder / "thinking.safetensors"):
        return {}
    about = read_json(path)
    for name in CHOICES:
        if type(about.get(name)) is not int:
            raise ValueError(
                f"{path}: {name} is {about.get(name)!r}, not a whole number. Put back what "
                "training wrote."
            )
    return about


def special_ids(folder: Path, vocab_size: int) -> tuple[tuple[int, ...], int]:
    """(ids that end a text, the id that pads) from generation_config.json, else config.json."""
    names = ("generation_config.json", "config.json")
    files = [read_json(folder / name) for name in names if present(folder / name)]
    ends = (file.get("eos_token_id") for file in files)
    eos = next((end for end in ends if end not in (None, [])), None)
    if eos is None:
        raise ValueError(
            f"{folder}: neither generation_config.json nor config.json names an eos_token_id; add "
            "the id that ends a text (151643 for Qwen2.5 base models)."
        )
    eos_ids = tuple(dict.fromkeys(eos if isinstance(eos, list) else [eos]))
    pads = (file.get("pad_token_id") for file in files)
    pad = next((pad for pad in pads if pad is not None), eos_ids[0])
    for i in (*eos_ids, pad):
        if not (isinstance(i, int) and 0 <= i < vocab_size):
            raise ValueError(
                f"{folder}: eos or pad id {i} is outside the vocabulary (0 … {vocab_size - 1}); "
                "correct generation_config.json or config.json."
            )
    return eos_ids, pad


# -- saving ----------------------------------------------------------------------------------------


def save(
    model: ThinkingStates,
    tokenizer: Tokenizer,
    folder: Path,
    about: dict[str, Any],  # method and origin, for thinking.json
) -> None:
    """Writes a new model folder whole or not at all.

    Raises ValueError if there is something at `folder` already.
    """
    if present(folder):
        raise ValueError(
            f"{folder} exists (it holds {listing(folder)}); nothing is overwritten. Name a new "
            "folder."
        )
    with new_folder(folder) as unfinished:
        write_model(model, tokenizer, unfinished, about)


def write_model(
    model: ThinkingStates,
    tokenizer: Tokenizer,
    folder: Path,
    about: dict[str, Any],
    dtype: torch.dtype | None = None,
) -> None:
    """Writes the files of `save` into the existing `folder`."""
    config, qwen, state = model.config, model.backbone.config, model.backbone.state_dict()
    dtype = dtype or model.backbone.lm_head.weight.dtype
    state = {name: tensor.to(dtype) for name, tensor in state.items()}
    if qwen.tie_word_embeddings:
        # The same storage as the embedding: written once, tied again on loading.
        del state["lm_head.weight"]
    write_tensors(state, folder / "model.safetensors")
    if model.thinks:
        blocks = {name: tensor.to(dtype) for name, tensor in blocks_of(model).state_dict().items()}
        write_tensors(blocks, folder / "thinking.safetensors")
    ids = {"eos_token_id": list(config.eos_ids), "pad_token_id": config.pad_id}
    dtype = str(dtype).removeprefix("torch.")
    choices = {name: getattr(config, name) for name in CHOICES}
    written = {"thinks": model.thinks, "max_thought_tokens": config.max_thought_tokens}
    contents = {
        "config.json": write_config(qwen) | ids | {"torch_dtype": dtype},
        "generation_config.json": ids,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": tokenizer.token(config.eos_ids[0]),
            "pad_token": tokenizer.token(config.pad_id),
        },
        "thinking.json": about | choices | written,
    }
    for name, content in contents.items():
        text = json.dumps(content, indent=2) + "\n"
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "tokenizer.json").write_text(tokenizer.definition, encoding="utf-8")
