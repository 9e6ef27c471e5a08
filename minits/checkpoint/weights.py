"""Hugging Face folder or hub id -> model, and back. Nothing is converted: names are file keys.

A model folder holds config.json, generation_config.json (which is asked first for the ids that end
a text), tokenizer.json and weights: the files that model.safetensors.index.json names, or where
there is no index model.safetensors. Training adds thinking.json (method, chunk size, layers, where
it comes from) and thinking.safetensors (T and C), so that transformers loads the same folder as a
plain Qwen2.5.
"""
import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from minits.checkpoint.config_json import read_config, write_config
from minits.checkpoint.download import checkpoint_of, local_folder
from minits.checkpoint.files import (
    Json,
    listing,
    new_folder,
    present,
    printable,
    read_json,
    read_values,
    require,
)
from minits.checkpoint.tensor_files import load_exactly, memory_errors, weight_files, write_tensors
from minits.checkpoint.tokenizer import Tokenizer
from minits.qwen import Qwen2ForCausalLM, QwenConfig
from minits.settings import setting
from minits.thinking import ThinkingConfig, ThinkingStates

# What a training fixes of Thinking States, in thinking.json.
CHOICES = ("chunk_size", "inject_after", "extract_after")
# Whether methods have T and C, for checkpoints that do not say so themselves (`thinks`).
THINKS = {"thinking": True, "no-cot": False, "cot": False}
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
# What goes with the weights, untouched, from the base into every checkpoint.
COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
)


@dataclass(frozen=True)
class ThinkingFile:
    """What thinking.json says, but for the options of the task."""

    chunk_size: int = setting(least=1)
    inject_after: int = setting(least=0)
    extract_after: int = setting(least=0)
    thinks: bool | None = setting(None)  # whether T and C were saved
    max_thought_tokens: int | None = setting(None, least=1)
    method: str | None = setting(None)
    task: str | None = setting(None)
    base_model: str | None = setting(None)
    seed: int | None = setting(None)
    step: int | None = setting(None, least=0)


class WithoutInit(TorchFunctionMode):
    """Within, modules are made without initial values: those of a checkpoint come at once.

    Else nn.Embedding, on the meta device, imports torch._dynamo (1.6 of 1.6 s for a 0.5B model).
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__module__", None) == "torch.nn.init":
            return None
        return function(*args, **(kwargs or {}))


class Checkpoint(NamedTuple):
    """What a model folder holds."""

    model: ThinkingStates
    tokenizer: Tokenizer
    about: Json  # thinking.json; empty for a plain Qwen2.5


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
    folder = local_folder(folder_or_hub_id, revision)
    return load_checkpoint(
        folder,
        dtype,
        device,
        chunk_size=chunk_size,
        inject_after=inject_after,
        extract_after=extract_after,
    )[:2]


def load_checkpoint(
    folder: Path,  # a model folder, or a run folder for its newest checkpoint
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    **asked: int | None,  # as for `load`
) -> Checkpoint:
    """As `load`, with what thinking.json says."""
    check_dtype(dtype)
    while True:
        found = checkpoint_of(folder)
        try:
            return read_checkpoint(found, dtype, device, asked)
        except (ValueError, OSError):
            # A training beside this one saves a newer checkpoint and removes this one.
            if checkpoint_of(folder) == found:
                raise


def read_checkpoint(
    folder: Path,
    dtype: torch.dtype,
    device: str | torch.device,
    asked: dict[str, int | None],
) -> Checkpoint:
    """As `load_checkpoint`, of a model folder."""
    qwen = config_of(folder)
    eos_ids, pad_id = special_ids(folder, qwen.vocab_size)
    about = read_about(folder)
    choices = choose(folder, qwen, about, {k: v for k, v in asked.items() if v is not None})
    thinks = thinks_of(folder, about)
    room = qwen.max_position_embeddings - choices["chunk_size"]
    limit = about.get("max_thought_tokens") or min(ThinkingConfig.max_thought_tokens, room)
    config = ThinkingConfig(
        **choices, eos_ids=eos_ids, pad_id=pad_id, max_thought_tokens=limit
    )
    try:
        config.check(qwen)
    except ValueError as error:
        source = "thinking.json and config.json" if about else "config.json"
        raise ValueError(f"{folder}, {source}: {error}") from error
    tokenizer = read_tokenizer(folder, eos_ids, pad_id, qwen.vocab_size)
    with torch.device("meta"), WithoutInit():
        model = ThinkingStates(Qwen2ForCausalLM(qwen), config, thinks=thinks)
    tied = qwen.tie_word_embeddings
    with memory_errors(folder, device):
        load_exactly(model.backbone, weight_files(folder), dtype, device, tied=tied)
        model.backbone.tie()
        if thinks and about:
            load_exactly(blocks_of(model), {folder / "thinking.safetensors": None}, dtype, device)
        elif thinks:
            start_blocks(model, dtype, device)
    model.blocked = blocked_ids(tokenizer, qwen.vocab_size).to(device)
    return Checkpoint(model.eval(), tokenizer, about)


def check_dtype(dtype: torch.dtype) -> torch.dtype:
    """`dtype` itself; raises ValueError if weights cannot be of it."""
    if dtype not in DTYPES:
        raise ValueError(
            f"weights of type {dtype} are not supported; use one of {', '.join(map(str, DTYPES))}."
        )
    return dtype


def choose(
    folder: Path, qwen: QwenConfig, about: Json, asked: dict[str, int]
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


def start_blocks(model: ThinkingStates, dtype: torch.dtype, device: str | torch.device) -> None:
    """Makes T and C, from the meta device, copies of layers of the backbone.

    Raises ValueError naming what of them is no copy: it would hold whatever was in memory.
    """
    blocks = blocks_of(model).to_empty(device=device).to(dtype)
    for each in blocks.parameters():
        each.data.view(-1)[0] = torch.nan  # one place is enough, and takes no time
    model.copy_blocks()
    if left := [name for name, each in blocks.named_parameters() if each.view(-1)[0].isnan()]:
        raise ValueError(
            f"{', '.join(left)}: copy_blocks (minits/thinking.py) gives it no value; fill it there."
        )


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
    blocked[[*tokenizer.known_ids]] = False
    return blocked


# -- the small files -------------------------------------------------------------------------------


def config_of(folder: Path) -> QwenConfig:
    """config.json of a model folder. Raises FileNotFoundError, or ValueError as `read_config`."""
    path = folder / "config.json"
    return read_config(read_json(path), str(path))


def read_about(folder: Path) -> Json:
    """thinking.json of a folder that we saved; empty for a plain Qwen2.5.

    Raises if it is not whole, or lacking beside thinking.safetensors.
    """
    path = folder / "thinking.json"
    if not present(path) and not present(folder / "thinking.safetensors"):
        return {}
    about = read_json(path)
    read_values(ThinkingFile, about, path)
    return about


def thinks_of(folder: Path, about: Json) -> bool:
    """Whether the model in `folder` has T and C; a plain Qwen2.5 gets them.

    Raises ValueError where `thinks`, the method and the files contradict one another.
    """
    if not about:
        return True
    method, thinks = about.get("method"), about.get("thinks")
    if thinks is None:
        thinks = THINKS.get(method)
    blocks = present(folder / "thinking.safetensors")
    if thinks is None or THINKS.get(method, thinks) != thinks or blocks > thinks:
        there = "there is a" if blocks else "there is no"
        raise ValueError(
            f"{folder / 'thinking.json'}: method is {printable(repr(method))} and thinks "
            f"{about.get('thinks')}, and {there} thinking.safetensors; this contradicts itself, or "
            "is not known. Put back what training wrote."
        )
    return thinks


def special_ids(folder: Path, vocab_size: int) -> tuple[tuple[int, ...], int]:
    """(ids that end a text, the id that pads) from generation_config.json, else config.json."""
    found: dict[str, list[int]] = {}
    for name in ("generation_config.json", "config.json"):
        file = read_json(folder / name) if present(folder / name) else {}
        for key in ("eos_token_id", "pad_token_id"):
            value, several = file.get(key), key == "eos_token_id"
            if value is None:
                continue
            ids = value if several and isinstance(value, list) else [value]
            if any(type(i) is not int or not 0 <= i < vocab_size for i in ids):
                raise ValueError(
                    f"{folder / name}: {key} is {printable(repr(value))}, outside the vocabulary "
                    f"(0 … {vocab_size - 1}). Put back what it was."
                )
            found[key] = found.get(key) or ids  # an empty list names none
    ends = found.get("eos_token_id")
    if not ends:
        raise ValueError(
            f"{folder}: neither generation_config.json nor config.json names an eos_token_id; add "
            "the id that ends a text (151643 for Qwen2.5 base models)."
        )
    return tuple(dict.fromkeys(ends)), found.get("pad_token_id", ends)[0]


def read_tokenizer(
    folder: Path, eos_ids: tuple[int, ...], pad_id: int, vocab_size: int
) -> Tokenizer:
    """The tokenizer of a model folder, with the files that go with it into every checkpoint."""
    tokenizer = Tokenizer.from_folder(folder, eos_ids, pad_id)
    tokenizer.companions = {
        path.name: require(path).read_bytes()
        for pattern in COMPANIONS
        for path in folder.glob(pattern)
    }
    for eos_id in eos_ids:
        if eos_id not in tokenizer.known_ids:
            raise ValueError(
                f"{folder}: the id {eos_id} that ends a text (eos_token_id) is no token of "
                "tokenizer.json, so nothing would ever end. Use the tokenizer and "
                "generation_config.json of one and the same checkpoint."
            )
    highest = max(tokenizer.known_ids)
    if highest >= vocab_size:
        token = printable(repr(tokenizer.token(highest)))
        raise ValueError(
            f"{folder / 'tokenizer.json'}: vocab gives {token} the id {highest}, outside "
            f"vocab_size {vocab_size} of config.json. Use the two of one and the same checkpoint."
        )
    return tokenizer


# -- saving ----------------------------------------------------------------------------------------


def save(
    model: ThinkingStates,
    tokenizer: Tokenizer,
    folder: str | Path,
    about: Json,  # method and origin, for thinking.json
    dtype: torch.dtype | None = None,  # of the files; None: as the weights are
) -> None:
    """Writes a new model folder whole or not at all.

    What lay beside the tokenizer, when it was loaded, goes with it. Raises ValueError if there is
    something at `folder` already.
    """
    folder = Path(folder)
    if present(folder):
        raise ValueError(
            f"{folder} exists (it holds {listing(folder)}); nothing is overwritten. Name a new "
            "folder."
        )
    with new_folder(folder) as unfinished:
        write_model(model, tokenizer, unfinished, about, dtype)


def write_model(
    model: ThinkingStates,
    tokenizer: Tokenizer,
    folder: Path,
    about: Json,
    dtype: torch.dtype | None = None,
) -> None:
    """Writes the files of `save` into the existing `folder`."""
    config, qwen, state = model.config, model.backbone.config, model.backbone.state_dict()
    dtype = check_dtype(dtype or model.backbone.lm_head.weight.dtype)
    if qwen.tie_word_embeddings:
        # The same storage as the embedding: written once, tied again on loading.
        del state["lm_head.weight"]
    write_tensors(state, folder / "model.safetensors", dtype)
    if model.thinks:
        write_tensors(blocks_of(model).state_dict(), folder / "thinking.safetensors", dtype)
    for name, content in tokenizer.companions.items():
        (folder / name).write_bytes(content)
    ids = {"eos_token_id": list(config.eos_ids), "pad_token_id": config.pad_id}
    choices = {name: getattr(config, name) for name in CHOICES}
    written = {"thinks": model.thinks, "max_thought_tokens": config.max_thought_tokens}
    written_as = str(dtype).removeprefix("torch.")
    # The base's other keys stay; all of them where it says the same, perhaps in other words.
    base, sampling = (
        json.loads(tokenizer.companions.get(name, "{}"))
        for name in ("config.json", "generation_config.json")
    )
    said = base if base and read_config(base) == qwen else base | write_config(qwen)
    types = {"torch_dtype": written_as} | ({"dtype": written_as} if "dtype" in base else {})
    contents = {
        "config.json": said | ids | types,
        "generation_config.json": sampling | ids,
        "thinking.json": about | choices | written,
    }
    if "tokenizer_config.json" not in tokenizer.companions:
        contents["tokenizer_config.json"] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": tokenizer.token(config.eos_ids[0]),
            "pad_token": tokenizer.token(config.pad_id),
        }
    for name, content in contents.items():
        text = json.dumps(content, indent=2) + "\n"
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "tokenizer.json").write_bytes(tokenizer.definition.encode())
