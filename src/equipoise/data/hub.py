"""Files of the Hugging Face hub: datasets to read, tokenizers to load. Used only when a hub id is given."""

import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from equipoise.errors import DataError

DEADLINE_S = 5.0
"""The hub has to answer a first question within this many seconds; its own client tries for half a minute."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*(/[\w.\-]+)?")
_PARQUET_BRANCH = "refs/convert/parquet"  # the hub's own conversion of any dataset: CONFIG/SPLIT/0000.parquet
_WITHOUT_NETWORK = "Check the network, or download the files and give their path"
_KINDS = ((".parquet",), (".jsonl", ".ndjson"), (".txt",))


def is_hub_id(text: str) -> bool:
    """Whether the text has the form of a hub id, `owner/name`. A `name` alone is rather a path that is not there."""
    return "/" in text and _HUB_ID.fullmatch(text) is not None and not text.endswith(".json")


@cache
def unreachable_reason() -> str | None:
    """Why the hub cannot be asked for anything, or None; found out once in a process, within `DEADLINE_S`."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    ended: list[str | None] = []

    def ask() -> None:
        try:
            get_session().head(constants.ENDPOINT, timeout=DEADLINE_S)
            ended.append(None)  # whatever the answer
        except Exception as error:  # the HTTP library's and the system's
            ended.append(f"{constants.ENDPOINT} cannot be reached ({str(error) or type(error).__name__})")

    thread = threading.Thread(target=ask, daemon=True)  # looking up a name has no timeout
    thread.start()
    thread.join(DEADLINE_S)
    return ended[0] if ended else f"{constants.ENDPOINT} did not answer within {DEADLINE_S:g} s"


def tokenizer_folder(model_id: str) -> Path:
    """Download `tokenizer.json`, and what names its special tokens, of a model; the folder with both.

    Raises `DataError` without the hub package, without a network, or when the model has no `tokenizer.json`.
    """
    path = _download(model_id, "tokenizer.json", "model", None, what=f"data.tokenizer {model_id!r}")
    with suppress(DataError):  # not every model has one, and a copy without it may serve where there is no network
        _download(model_id, "tokenizer_config.json", "model", None, what=f"data.tokenizer {model_id!r}")
    return path.parent


def reachable_model(model_id: str) -> str:
    """What a model of the hub is loaded by: its id, or without a network the folder of the copy on this machine.

    Raises `DataError` when there is neither a network nor a copy.
    """
    if unreachable_reason() is None:
        return model_id
    return str(_call("snapshot_download", f"model {model_id!r}", model_id))


def dataset_files(spec: str, include: str | None) -> Iterator[Path]:
    """Local copies of a dataset's files, in order of their names, each downloaded when it is asked for.

    `spec` is `owner/name` or `owner/name@revision`. `include` is a glob over the repository's paths, in which
    `*` crosses folders. Without it: the files of the training split, Parquet before JSONL before text, and
    where the repository has none of these, the hub's own Parquet conversion. Raises `DataError`.
    """
    dataset_id, _, revision = spec.partition("@")
    what = f"data.source 'hf://{spec}'"
    if not _HUB_ID.fullmatch(dataset_id):  # early datasets have no owner
        raise DataError(f"{what}: expected hf://owner/name or hf://owner/name@revision")
    names = sorted(_call("list_repo_files", what, dataset_id, repo_type="dataset", revision=revision or None))
    chosen = _choose(names, include)
    if not chosen and not revision:
        revision = _PARQUET_BRANCH
        names = sorted(_call("list_repo_files", what, dataset_id, repo_type="dataset", revision=revision))
        chosen = _choose(names, include)
        subsets = sorted({PurePosixPath(name).parts[0] for name in chosen})
        if len(subsets) > 1 and include is None:
            raise DataError(f"{what} has the subsets {', '.join(subsets)}; choose with data.include 'NAME/train/*'")
    if not chosen:
        raise DataError(
            f"{what}: no file matches {include or 'the training split'!r}; it has {', '.join(names[:12]) or 'none'}"
        )
    for name in chosen:
        yield _download(dataset_id, name, "dataset", revision or None, what)


def _choose(names: list[str], include: str | None) -> list[str]:
    if include is not None:
        shorter = include.removeprefix("**/")
        return [name for name in names if fnmatchcase(name, include) or fnmatchcase(name, shorter)]
    for suffixes in _KINDS:
        of_kind = [name for name in names if name.endswith(suffixes)]
        if of_kind:
            return [name for name in of_kind if "train" in name] or of_kind
    return []


def _download(repo_id: str, name: str, repo_type: str, revision: str | None, what: str) -> Path:
    return Path(_call("hf_hub_download", what, repo_id, name, repo_type=repo_type, revision=revision))


def _call(function: str, what: str, *args: Any, **kwargs: Any) -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise DataError(
            f"{what}: this needs the package huggingface_hub (pip install 'equipoise[hub]'), or download the "
            "files and give their path"
        ) from error
    reason = unreachable_reason()
    has_copies = reason is not None and function in ("hf_hub_download", "snapshot_download")
    if reason is not None and not has_copies:
        raise DataError(f"{what}: {reason}. {_WITHOUT_NETWORK}")
    if has_copies:
        kwargs["local_files_only"] = True
    try:
        return getattr(huggingface_hub, function)(*args, **kwargs)
    except Exception as error:  # the client raises its own, its HTTP library's and the system's errors
        if has_copies:
            raise DataError(f"{what}: {reason}, and no copy is kept on this machine. {_WITHOUT_NETWORK}") from error
        reason = str(error).strip().splitlines()[0] if str(error).strip() else "no reason given"
        raise DataError(
            f"{what}: the Hugging Face hub did not answer with it ({type(error).__name__}: {reason}). Check "
            "the id and the network (and HF_TOKEN for a gated one), or download the files and give their path"
        ) from error
