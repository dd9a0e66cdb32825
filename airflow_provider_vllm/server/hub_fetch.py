"""Fetches one model from the hub; run as a program by the interpreter that has vLLM.

Enters: one JSON argument {"model", "revision", "cache_dir", "load_format", "lock_fd"}; the token and
everything else of the hub's library come by environment. Leaves: one JSON line on stdout, {"folder"}
or {"error", "text", "status"}; what is to be fetched stands in the lock file as soon as it is known.

It imports nothing of this package, which that interpreter does not have, and ends when its stdin
does: whoever started it is gone then.
"""

from __future__ import annotations

import fnmatch
import json
import os
import shutil
import sys
import threading
from pathlib import Path

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ot")
# Half-written files that the hub's library cannot go on with.
ORPHANS = "*.????????.incomplete"


class NoSpace(Exception):
    """The disk of the cache is too small for what is missing."""


def wanted_files(names: list[str], load_format: str, weight_map: dict[str, str]) -> list[str]:
    """The files of a repository that vLLM will read: all but weights, and one set of weights.

    The order of preference is vLLM's (model_loader/default_loader.py): Mistral's consolidated
    files, safetensors (those of the index where there is one), *.bin, *.pt.
    """
    others = [name for name in names if not name.endswith(_WEIGHTS)]
    top = [name for name in names if "/" not in name]
    patterns = ["consolidated*.safetensors", "*.safetensors", "*.bin", "*.pt"]
    if load_format not in ("auto", "mistral"):
        patterns.pop(0)
    if load_format == "pt":
        patterns = ["*.pt"]
    for pattern in patterns:
        found = fnmatch.filter(top, pattern)
        if pattern == "*.safetensors" and weight_map:
            found = sorted(set(weight_map.values()) & set(names))
        if found:
            return others + found
    return others


def fetch(model: str, revision: str, cache_dir: str, load_format: str, lock_fd: int) -> str:
    """Fetches what is missing; the snapshot's folder."""
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download

    place = {"repo_id": model, "cache_dir": cache_dir}
    info = HfApi().model_info(model, revision=revision, files_metadata=True)
    sizes = {entry.rfilename: entry.size or 0 for entry in info.siblings or ()}
    weight_map: dict[str, str] = {}
    index = "model.safetensors.index.json"
    if index in sizes:
        path = hf_hub_download(filename=index, revision=info.sha, **place)
        weight_map = json.loads(Path(path).read_text(encoding="utf-8")).get("weight_map", {})
    names = wanted_files(list(sizes), load_format, weight_map)
    repository = Path(cache_dir, "models--" + model.replace("/", "--"))
    snapshot = repository / "snapshots" / str(info.sha)
    missing = sum(sizes[name] for name in names if not (snapshot / name).exists())
    note = {"start": stored(repository), "missing": missing}
    text = json.dumps(note).encode()
    os.ftruncate(lock_fd, 0)
    os.pwrite(lock_fd, text, 0)
    free = shutil.disk_usage(nearest(Path(cache_dir))).free
    if missing > free:
        raise NoSpace(f"{missing} bytes are missing, {free} bytes are free in {cache_dir}.")
    return str(snapshot_download(revision=revision, allow_patterns=names, **place))


def stored(repository: Path) -> int:
    """Bytes of a cached repository, files that are still arriving included."""
    total = 0
    for path in (repository / "blobs").glob("*"):
        try:
            total += path.stat().st_size
        except OSError:
            continue  # renamed just now: it is counted under its new name next time
    return total


def nearest(path: Path) -> Path:
    return next(folder for folder in (path, *path.absolute().parents) if folder.exists())


def end_with_parent() -> None:
    """Ends this program when its stdin ends, without what it was just writing.

    Such files have names of their own (huggingface_hub 2.4): nobody takes them up again.
    """
    sys.stdin.read()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            path = descriptor.readlink()
            if path.match(ORPHANS):
                path.unlink()
        except OSError:
            continue
    os._exit(1)  # downloading threads hear of nothing else


def main() -> None:
    order = json.loads(sys.argv[1])
    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        answer: dict[str, object] = {"folder": fetch(**order)}
    except Exception as exc:
        status = getattr(getattr(exc, "response", None), "status_code", None)
        answer = {"error": type(exc).__name__, "text": str(exc), "status": status}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
