"""Where a model's files are: a local folder, a run folder, or a repository of the hub."""
import re
from pathlib import Path

from minits.checkpoint.files import listing

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
WANTED = ["*.json", "*.safetensors"]  # files of a hub repository that we read


def resolve(folder_or_hub_id: str | Path, revision: str | None = None) -> Path:
    """The local folder of a path or hub id. What looks like a path is never sent to the hub."""
    name, path = str(folder_or_hub_id), Path(folder_or_hub_id).expanduser()
    if path.is_dir():
        if revision:
            raise ValueError(
                f"revision {revision}: {name} is a folder, which has none; only a hub id does."
            )
        return path
    if path.exists():
        raise ValueError(f"{name} is a file; give the folder that holds it.")
    like_a_path = (
        isinstance(folder_or_hub_id, Path)
        or not HUB_ID.fullmatch(name)
        or name.startswith(".")
        or Path(name).parent.is_dir()
    )
    if like_a_path:
        near = path.parent
        raise FileNotFoundError(
            f"no folder {name} ({near} holds {listing(near)}). Give a folder with config.json and "
            "safetensors, or a hub id such as Qwen/Qwen2.5-0.5B."
        )
    return download(name, revision)


def download(hub_id: str, revision: str | None) -> Path:
    """The cached snapshot of a hub repository, fetched if need be.

    Honours HF_HUB_OFFLINE and HF_HOME. Raises FileNotFoundError whatever went wrong.
    """
    from huggingface_hub import constants, snapshot_download  # local folders never need it

    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=WANTED))
    except Exception as error:
        # The hub, the network and the disk have errors of their own, without a common ancestor.
        at = hub_id + (f" at revision {revision}" if revision else "")
        said = " ".join(str(error).split()) or type(error).__name__
        offline = ", HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else ""
        raise FileNotFoundError(
            f"{at} could not be had: {said} (cache: {constants.HF_HUB_CACHE}{offline}). Check the "
            "id, --revision and the network, or give a local folder."
        ) from error


def checkpoint_of(folder: Path) -> Path:
    """The model folder: `folder` itself, or the newest checkpoint of a run folder."""
    steps = finished_checkpoints(folder)
    if steps:
        return steps[-1]
    if (folder / "run.json").exists():
        raise FileNotFoundError(
            f"{folder} is a run without a finished checkpoint (it holds {listing(folder)}). Train "
            "it longer, or name another run."
        )
    return folder


def finished_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run folder, oldest first; half-written ones are passed over."""
    found = [
        path
        for path in folder.glob("checkpoints/step-*")
        if path.name.removeprefix("step-").isdigit()
    ]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))
