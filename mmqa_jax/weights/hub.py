"""Models by their name on the Hugging Face hub: found in the local cache, downloaded when asked.

huggingface_hub decides where the cache is (HF_HOME, HF_HUB_CACHE). A token for private and gated
models is taken from HF_TOKEN in the environment and nowhere else.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from mmqa_jax.core.errors import RunError, UserError, first_names
from mmqa_jax.core.terminal import libraries_bars
from mmqa_jax.weights.formats.safetensors import SAFETENSORS, files_in
from mmqa_jax.weights.output_folder import (
    COMPANIONS,
    OPEN_CLIP_CONFIG,
    OPEN_CLIP_WEIGHTS,
    TORCH,
)

_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?")
_CONFIG = "config.json"
# Whole or in shards with their index; the first kind that a model has is the one that is read.
_WEIGHTS = tuple(
    re.compile(rf"{stem}(-\d+-of-\d+)?\.{suffix}(\.index\.json)?")
    for stem, suffix in (name.rsplit(".", 1) for name in (SAFETENSORS, TORCH))
)


# Of sentence-transformers: how one vector is made of a text (see sentence_pooling.py).
_POOLING = (
    *("modules.json", "config_sentence_transformers.json"),
    *("sentence_bert_config.json", "sentence_roberta_config.json"),
    "sentence_xlm-roberta_config.json",
)
# 1_Pooling, 1_LogitScore, 2_Dense.
_LAYER = re.compile(r"\d+_\w+/config\.json|\d+_Dense/model\.safetensors")


def is_hub_name(text: str | os.PathLike) -> bool:
    """Whether a text reads ORG/NAME or ORG/NAME@REVISION and is no file or folder here."""
    return _NAME.fullmatch(str(text)) is not None and not Path(text).exists()


def is_cached(text: str | os.PathLike) -> bool:
    """Whether a text is the name of a model that the local cache has whole."""
    if not is_hub_name(text):
        return False
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    repository, _ = _split(str(text))
    folder = repo_folder_name(repo_id=repository, repo_type="model")
    if not Path(constants.HF_HUB_CACHE, folder).is_dir():
        return False  # the usual answer, without the look at revisions and files
    try:
        find_model(str(text))
    except UserError:
        return False
    return True


def find_model(name: str, flag: str = "--model", fetch: str = "add --download") -> Path:
    """A model in the local cache; nothing is fetched.

    Args:
      name: ORG/NAME or ORG/NAME@REVISION (branch, tag or commit; `main` by default).
      flag: that named it, for messages.
      fetch: how to fetch it, for messages.

    Returns:
      Its folder, or its file if the folder has only a GGUF file.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    repository, revision = _split(name)
    try:
        # Which files have to be there is decided below.
        snapshot = snapshot_download(
            repository, revision=revision, local_files_only=True, allow_patterns=[]
        )
    except LocalEntryNotFoundError as error:
        raise UserError(
            f"{flag}={name}: no such file or folder, and the Hugging Face cache "
            f"({constants.HF_HUB_CACHE}) has no revision {revision} of a model of this name; "
            f"check the spelling, or {fetch} to fetch it."
        ) from error
    folder = Path(snapshot)
    gguf = sorted(folder.glob("*.gguf"))
    if len(gguf) == 1 and not (folder / _CONFIG).exists():
        return gguf[0]
    missing = _missing(folder)
    if missing:
        raise UserError(
            f"{flag}={name}: the Hugging Face cache has revision {revision} without "
            f"{first_names(missing)}; {fetch} to fetch what is missing."
        )
    return folder


def download_model(name: str, flag: str = "--model") -> None:
    """Fetches a model into the local cache: config, tokenizer and weights, safetensors if it has
    them; what is there already is not fetched again. Arguments as for `find_model`.

    Raises:
      RunError: the hub cannot be reached.
    """
    if not is_hub_name(name):
        raise UserError(
            f"--download: {flag}={name} is not a model's name on the Hugging Face hub; give "
            "ORG/NAME or ORG/NAME@REVISION, or leave --download out."
        )
    from huggingface_hub import HfApi, errors

    repository, revision = _split(name)
    hub = HfApi(token=os.environ.get("HF_TOKEN") or False, library_name="mmqa_jax")
    try:
        listed = hub.list_repo_files(repository, revision=revision)
        wanted = _wanted(listed, f"{flag}={name}")
        with libraries_bars():
            hub.snapshot_download(repository, revision=revision, allow_patterns=wanted)
    except errors.GatedRepoError as error:
        raise UserError(
            f"{flag}={name}: access to it has to be granted; accept its terms on its page, and "
            "set HF_TOKEN in the environment."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            f"{flag}={name}: the Hugging Face hub shows no such model; check the spelling, or set "
            "HF_TOKEN in the environment if it is private."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UserError(
            f"{flag}={name}: the model has no revision {revision}; name a branch, tag or commit."
        ) from error
    except (errors.HTTPError, ConnectionError, FileNotFoundError) as error:
        # The library's own text names addresses.
        raise RunError(
            f"{flag}={name}: the Hugging Face hub cannot be reached ({type(error).__name__}); "
            "start the command again when online, which continues the download."
        ) from error


def _split(name: str) -> tuple[str, str]:
    repository, revision = _NAME.fullmatch(name).groups()
    return repository, revision or "main"


def _wanted(files: Sequence[str], where: str) -> list[str]:
    """Returns the files of a repository that are read."""
    for kind in _WEIGHTS:
        weights = [file for file in files if kind.fullmatch(file)]
        if weights and _CONFIG in files:
            beside = [companion for companion in (*COMPANIONS, *_POOLING) if companion in files]
            return [_CONFIG, *weights, *beside, *filter(_LAYER.fullmatch, files)]
    weights = [file for file in OPEN_CLIP_WEIGHTS if file in files]
    if weights and OPEN_CLIP_CONFIG in files:
        companions = (name for name in COMPANIONS if name in files and name != OPEN_CLIP_CONFIG)
        return [OPEN_CLIP_CONFIG, weights[0], *companions]
    gguf = [file for file in files if file.endswith(".gguf")]
    if len(gguf) == 1:
        return gguf
    if gguf:
        raise UserError(
            f"{where}: has {len(gguf)} GGUF files ({first_names(gguf)}); fetch one with "
            "`hf download`, and give its path."
        )
    raise UserError(
        f"{where}: has neither {SAFETENSORS} nor {TORCH} beside a {_CONFIG}, nor a GGUF file; "
        "choose a model in the format of transformers."
    )


def _missing(folder: Path) -> list[str]:
    """Files that a model in transformers' format lacks; companions are not known to exist."""
    open_clip = [name for name in OPEN_CLIP_WEIGHTS if (folder / name).exists()]
    if open_clip and (folder / OPEN_CLIP_CONFIG).exists() and not (folder / _CONFIG).exists():
        return []
    missing = [] if (folder / _CONFIG).exists() else [_CONFIG]
    files = files_in(folder, SAFETENSORS) or files_in(folder, TORCH)
    if not files:
        return [*missing, f"weights ({SAFETENSORS} or {TORCH})"]
    return missing + [file.name for file in files if not file.exists()]
