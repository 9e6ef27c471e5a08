"""Tensors <-> safetensors files, which must cover a module exactly, or all faults are named."""
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mode

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from minits.checkpoint.files import flush, listing, present, printable, read_json, require

FLOATS = ("F64", "F32", "F16", "BF16")  # what weights may be, in the words of safetensors
# What weights of a model are called; those beside the ones that are read must be a mistake.
WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
# The keys of config.json that make the first shapes that differ.
SIZES = {
    "embed_tokens.weight": " (vocab_size, hidden_size)",
    "gate_proj.weight": " (intermediate_size, hidden_size)",
    "q_proj.weight": " (num_attention_heads * head_dim, hidden_size)",
    "k_proj.weight": " (num_key_value_heads * head_dim, hidden_size)",
}
MOST = 8  # problems that one message tells
LFS_POINTER = b"version https://git-lfs"  # how a file begins whose weights are not fetched


def weight_files(folder: Path) -> dict[Path, set[str] | None]:
    """The files of a folder's weights, each with the tensors that it should hold (None: unknown).

    The index says which files they are; without one it is model.safetensors. Files of weights
    beside them may be stale, or meant: nobody can tell, so that is an error.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    source, files = single, {single: None}
    if present(index):
        source, files = index, {}
        for name, file in weight_map(index).items():
            files.setdefault(folder / file, set()).add(name)
    missing = sorted(path.name for path in files if not present(path))
    if missing and source == index:
        raise FileNotFoundError(
            f"{index} names shards that are not there: {', '.join(missing[:8])}. Download them; "
            "nothing was loaded."
        )
    if missing:
        raise FileNotFoundError(
            f"{folder} has no model.safetensors and no model.safetensors.index.json (it holds "
            f"{listing(folder)}). Only safetensors weights are read."
        )
    there = sorted(path.name for path in folder.iterdir() if path not in files)
    if beside := list(filter(WEIGHTS.fullmatch, there)):
        raise ValueError(
            f"{folder} holds weights twice: {source.name} does not name {beside[0]}. Remove what "
            "is stale."
        )
    return files


def weight_map(index: Path) -> dict[str, str]:
    """Which file holds each tensor, by the index.

    Raises ValueError unless all are names of files in its folder.
    """
    found = read_json(index).get("weight_map")
    if not (found and isinstance(found, dict)):
        raise ValueError(f"{index} has no weight_map from tensors to files; download it again.")
    for name, file in found.items():
        if not (isinstance(file, str) and re.fullmatch(r"[\w.-]+\.safetensors", file)):
            raise ValueError(
                f"{index}: weight_map has {printable(name)} in {printable(repr(file))}, which is "
                "no name of a file of weights in this folder; download it again."
            )
    return found


def load_exactly(
    module: nn.Module,  # its tensors may be on the meta device
    files: dict[Path, set[str] | None],  # as from `weight_files`
    dtype: torch.dtype,
    device: str | torch.device,
    *,
    tied: bool = False,  # lm_head.weight is the embedding and need not be in the files
) -> None:
    """Fills `module` from `files`, which must hold its tensors: no more, no less, finite floats.

    Raises ValueError that names what is wrong.
    """
    expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    found: dict[str, tuple] = {}  # of each tensor: its file, shape and type
    handles: dict[Path, safe_open] = {}
    problems = []
    for path, indexed in files.items():
        handle = handles[path] = open_tensors(path)
        inside = set(handle.keys())
        for name in sorted(inside ^ (indexed or inside)):
            puts = "does not put" if name in inside else "puts"
            problems.append(f"model.safetensors.index.json {puts} {name} into {path.name}")
        for name in sorted(inside):
            if name in found:
                problems.append(f"twice: {name}")
            part = handle.get_slice(name)
            found[name] = (path, tuple(part.get_shape()), part.get_dtype())
    folder = next(iter(files)).parent
    unused = [name for name in found if name.endswith("rotary_emb.inv_freq")]
    for name in unused:  # computed from rope_theta; older files have them
        del found[name]
    problems = differences(expected, found, tied) + problems
    if problems:
        names = ", ".join(sorted(path.name for path in files)[:8])
        shown = "; ".join(map(printable, problems[:MOST]))
        rest = f"; and {len(problems) - MOST} more" if len(problems) > MOST else ""
        raise ValueError(
            f"{folder}: {names} does not fit the model, {len(problems)} problem(s): {shown}{rest}. "
            "Use the files and config.json of one and the same checkpoint."
        )
    note_oddities(folder, found, unused)
    tensors = {}
    for name, (path, _, _) in found.items():
        stored = handles[path].get_tensor(name)
        tensors[name] = stored.to(device=device, dtype=dtype)
        # One pass, without a mask as large as the tensor; both are NaN where there is one.
        if not torch.stack(tensors[name].aminmax()).isfinite().all():
            raise ValueError(
                f"{path}: {name} holds values that are not finite as {dtype} (stored as "
                f"{stored.dtype}). Download it again, or load it as float32."
            )
    if tied:
        embedding = tensors["model.embed_tokens.weight"]
        if not torch.equal(tensors.setdefault("lm_head.weight", embedding), embedding):
            raise ValueError(
                f"{folder}: config.json says tie_word_embeddings = true, but "
                "lm_head.weight differs from model.embed_tokens.weight. Set tie_word_embeddings "
                "to false."
            )
    module.load_state_dict(tensors, strict=True, assign=True)


def note_oddities(folder: Path, found: dict[str, tuple], unused: list[str]) -> None:
    """Warns of what is harmless and may surprise."""
    usual = mode(kind for _, _, kind in found.values())
    others = [name for name, (_, _, kind) in found.items() if kind != usual]
    notes = {
        f"of another precision than {usual}": others,
        "not read, for rope_theta says the same": unused,
    }
    for text, names in notes.items():
        if names:
            first = printable(names[0])
            warnings.warn(f"{folder}: {len(names)} tensors are {text}; the first: {first}")


def differences(
    expected: dict[str, tuple[int, ...]], found: dict[str, tuple], tied: bool
) -> list[str]:
    """What is missing, too much, of another shape or not of floats, in words."""
    problems = []
    by_config, in_file = (
        len({name.split(".")[2] for name in names if name.startswith("model.layers.")})
        for names in (expected, found)
    )
    if by_config != in_file:
        problems.append(f"num_hidden_layers {by_config} by config.json, {in_file} in the file")
    for name in expected:
        head = name == "lm_head.weight"
        if name not in found and not (tied and head):
            why = " (config.json says tie_word_embeddings = false)" if head else ""
            problems.append(f"missing: {name}{why}")
    for name, (_, shape, kind) in found.items():
        if name not in expected:
            problems.append(f"not part of the model: {name}")
        elif shape != expected[name]:
            keys = next((keys for end, keys in SIZES.items() if name.endswith(end)), "")
            problems.append(
                f"shape of {name}: {list(shape)} in the file, {list(expected[name])} by "
                f"config.json{keys}"
            )
        if kind not in FLOATS:
            problems.append(f"type of {name}: {kind}, not one of {', '.join(FLOATS)}")
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
            f"{path} ({size} bytes) is no whole safetensors file: {printable(error)}. Download it "
            "again; if a run of yours wrote it, remove its folder: the checkpoint before counts."
        ) from error


@contextmanager
def memory_errors(folder: Path, device: str | torch.device) -> Iterator[None]:
    """Raises ValueError where the weights of `folder` find no room on `device`."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 1e9
        said = printable(str(error).partition("\n")[0] or "no memory")
        raise ValueError(
            f"{folder}: its weights ({size:.1f} GB in files) could not be put on {device}: {said}. "
            "Free memory, or load them as bfloat16."
        ) from error


def write_tensors(tensors: dict[str, Tensor], path: Path, dtype: torch.dtype) -> None:
    """Writes a safetensors file, in the given precision, and flushes it to disk."""
    whole = {name: tensor.detach().cpu().to(dtype).contiguous() for name, tensor in tensors.items()}
    save_file(whole, path, metadata={"format": "pt"})
    flush(path)
