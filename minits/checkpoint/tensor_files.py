"""Tensors <-> safetensors files, which must cover a module exactly, or all faults are named."""
from collections import Counter
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from minits.checkpoint.files import flush, listing, present, read_json, require

FLOATS = ("F64", "F32", "F16", "BF16")  # what weights may be, in the words of safetensors
LFS_POINTER = b"version https://git-lfs"  # how a file begins whose weights are not fetched


def weight_files(folder: Path) -> list[Path]:
    """The files of a folder's weights: the single one, or the shards that the index names."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if present(single):
        return [single]
    if not present(index):
        raise FileNotFoundError(
            f"{folder} has no model.safetensors and no model.safetensors.index.json (it holds "
            f"{listing(folder)}). Only safetensors weights are read."
        )
    weight_map = read_json(index).get("weight_map")
    named = isinstance(weight_map, dict) and all(isinstance(v, str) for v in weight_map.values())
    if not named or not weight_map:
        raise ValueError(f"{index} has no weight_map from tensors to files; download it again.")
    files = [folder / name for name in sorted(set(weight_map.values()))]
    missing = [path.name for path in files if not path.exists()]
    if missing:
        raise FileNotFoundError(
            f"{index} names shards that are not there: {', '.join(missing)}. Download them; "
            "nothing was loaded."
        )
    return files


def load_exactly(
    module: nn.Module,  # its tensors may be on the meta device
    files: list[Path],
    dtype: torch.dtype,
    device: str | torch.device,
    *,
    tied: bool = False,  # lm_head.weight is the embedding and need not be in the files
) -> None:
    """Fills `module` from `files`, which must hold its tensors: no more, no less, one float type.

    Raises ValueError that names all that is wrong.
    """
    expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    found: dict[str, tuple] = {}  # of each tensor: its file, shape and type
    problems = []
    for path in files:
        handle = open_tensors(path)
        for name in handle.keys():
            if name in found:
                problems.append(f"twice: {name}")
            part = handle.get_slice(name)
            found[name] = (handle, tuple(part.get_shape()), part.get_dtype())
    problems += differences(expected, found, tied)
    if problems:
        names = ", ".join(sorted({path.name for path in files}))
        raise ValueError(
            f"{files[0].parent}: {names} does not fit the model, {len(problems)} problem(s): "
            f"{'; '.join(problems)}. Use the files and config.json of one and the same checkpoint."
        )
    tensors = {
        name: handle.get_tensor(name).to(device=device, dtype=dtype)
        for name, (handle, _, _) in found.items()
    }
    if tied:
        embedding = tensors["model.embed_tokens.weight"]
        if not torch.equal(tensors.setdefault("lm_head.weight", embedding), embedding):
            raise ValueError(
                f"{files[0].parent}: config.json says tie_word_embeddings = true, but "
                "lm_head.weight differs from model.embed_tokens.weight. Set tie_word_embeddings "
                "to false."
            )
    module.load_state_dict(tensors, strict=True, assign=True)


def differences(
    expected: dict[str, tuple[int, ...]], found: dict[str, tuple], tied: bool
) -> list[str]:
    """What is missing, too much, of another shape or of another type, in words."""
    problems = []
    for name in expected:
        head = name == "lm_head.weight"
        if name not in found and not (tied and head):
            why = " (config.json says tie_word_embeddings = false)" if head else ""
            problems.append(f"missing: {name}{why}")
    usual = Counter(kind for _, _, kind in found.values()).most_common(1)
    for name, (_, shape, kind) in found.items():
        if name not in expected:
            problems.append(f"not part of the model: {name}")
        elif shape != expected[name]:
            problems.append(
                f"shape of {name}: {list(shape)} in the file, {list(expected[name])} by config.json"
            )
        if kind not in FLOATS:
            problems.append(f"type of {name}: {kind}, not one of {', '.join(FLOATS)}")
        elif kind != usual[0][0]:
            problems.append(f"type of {name}: {kind}, the others are {usual[0][0]}")
    return problems


def open_tensors(path: Path) -> safe_open:
    """The tensors of a safetensors file, memory-mapped: read when asked.

    Raises, naming the file, unless it is whole.
    """
    require(path)
    with path.open("rb") as file:
        start = file.read(len(LFS_POINTER))
    size = path.stat().st_size
    if start == LFS_POINTER:
        raise ValueError(
            f"{path} is a Git-LFS pointer of {size} bytes, not the weights. Run `git lfs pull` in "
            "its repository, or download the file."
        )
    try:
        return safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        raise ValueError(
            f"{path} ({size} bytes) is no whole safetensors file: {error}. Download it again."
        ) from error


def write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Writes a safetensors file and flushes it to disk."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(plain, path, metadata={"format": "pt"})
    flush(path)
