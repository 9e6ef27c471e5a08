"""Where a model's files are: a local folder, a run folder, or a repository of the hub."""
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from minits.checkpoint.files import around, listing, read_json, said_by

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# Files of a hub repository that we read, or that go with a model into its checkpoints.
WANTED = ["*.json", "*.safetensors", "merges.txt", "chat_template*"]


def local_folder(folder_or_hub_id: str | Path, revision: str | None = None) -> Path:
    """The local folder of a path or hub id. What looks like a path is never sent to the hub.

    A folder of a hub id's name wins if it holds a model or a run.
    """
    name, path = str(folder_or_hub_id), Path(folder_or_hub_id).expanduser()
    if path.exists() and not path.is_dir():
        raise ValueError(f"{name} is a file; give the folder that holds it.")
    like_a_path = (
        isinstance(folder_or_hub_id, Path)
        or not HUB_ID.fullmatch(name)
        or name.startswith((".", "runs/"))
    )
    holds = any((path / each).exists() for each in ("config.json", "run.json", "checkpoints"))
    if path.is_dir() and (like_a_path or holds):
        if revision:
            raise ValueError(
                f"revision {revision}: {name} is a folder, which has none; only a hub id does."
            )
        return path
    if like_a_path:
        raise FileNotFoundError(
            f"no folder {name} ({around(path)}). Give a folder with config.json and safetensors, "
            "or a hub id such as Qwen/Qwen2.5-0.5B."
        )
    return download(name, revision)


def download(hub_id: str, revision: str | None) -> Path:
    """The cached snapshot of a hub repository, fetched if need be.

    Honours HF_HUB_OFFLINE and HF_HOME. Raises FileNotFoundError whatever went wrong.
    """
    from huggingface_hub import snapshot_download  # local folders never need it

    with hub_errors(
        hub_id + (f" at revision {revision}" if revision else ""),
        "the id, --revision and the network, or give a local folder with a model "
        f"({hub_id} here holds {listing(Path(hub_id))})",
    ):
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=WANTED))


def dataset_file(name: str) -> Path:
    """The cached copy of OWNER/NAME/FILE, a file of one of the hub's data sets.

    Raises ValueError for a name of another form, FileNotFoundError whatever else went wrong.
    """
    from huggingface_hub import hf_hub_download

    owner, data_set, file = (name.split("/", 2) + [""] * 2)[:3]
    if not file or file.endswith(".parquet"):
        raise ValueError(
            f"hf://datasets/{name}: name a file of text or JSON lines in the data set, as in "
            "hf://datasets/OWNER/NAME/train.jsonl; parquet needs a package that is not used here."
        )
    with hub_errors(f"hf://datasets/{name}", "the name and the network, or give a local file"):
        return Path(hf_hub_download(f"{owner}/{data_set}", file, repo_type="dataset"))


@contextmanager
def hub_errors(wanted: str, check: str) -> Iterator[None]:
    """Raises FileNotFoundError for whatever goes wrong with the hub."""
    from huggingface_hub import constants

    try:
        yield
    except Exception as error:
        # The hub, the network and the disk have errors of their own, without a common ancestor.
        offline = ", HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else ""
        raise FileNotFoundError(
            f"{wanted} could not be had: {said_by(error)} (cache: {constants.HF_HUB_CACHE}"
            f"{offline}). Check {check}."
        ) from error


def checkpoint_of(folder: Path) -> Path:
    """The model folder: `folder` itself, or the newest checkpoint of a run folder.

    Of a run that came to its end, or has no other: the best one, where the best were kept.
    """
    steps, best = finished_checkpoints(folder), finished_checkpoints(folder, "best")
    run = folder / "run.json"
    if steps and best and run.exists() and read_json(run).get("steps") == step_of(steps[-1]):
        return best[-1]
    if steps or best:
        return (steps or best)[-1]
    if run.exists():
        raise FileNotFoundError(
            f"{folder} is a run without a finished checkpoint (it holds {listing(folder)}). Train "
            "it longer, or name another run."
        )
    return folder


def finished_checkpoints(folder: Path, kind: str = "checkpoints") -> list[Path]:
    """The checkpoints of a run folder, oldest first; half-written ones are passed over.

    kind: "best" for those that were best on the first evaluation set; the last one counts.
    """
    found = [
        path
        for path in folder.glob(f"{kind}/step-*")
        if path.name.removeprefix("step-").isdigit()
    ]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """The number of optimizer steps after which a run's checkpoint was written."""
    return int(checkpoint.name.removeprefix("step-"))
