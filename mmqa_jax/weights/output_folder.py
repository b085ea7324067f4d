"""Where a conversion reads and writes: folders that appear complete or not at all."""

import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

from mmqa_jax.core.errors import RunError, UserError, find_disk_failure
from mmqa_jax.core.files import no_empty_folders, read_json, remove_leftovers, unfinished

WRITTEN_BY = "written_by"  # in a JSON file of ours: --overwrite may replace its folder

# A folder of open_clip on the hub: the config, and the tensors in the first of these that is there.
OPEN_CLIP_CONFIG = "open_clip_config.json"
OPEN_CLIP_WEIGHTS = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
TORCH = "pytorch_model.bin"
# Copied if they are beside the weights.
COMPANIONS = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.txt", "vocab.json", "merges.txt", "sentencepiece.bpe.model"),
    *("spiece.model", OPEN_CLIP_CONFIG),
    "bpe_simple_vocab_16e6.txt.gz",
    *("chat_template.jinja", "chat_template.json", "generation_config.json"),
    *("preprocessor_config.json", "processor_config.json"),
)


def check_paths(source: Path, out: Path, overwrite: bool) -> None:
    """Refuses a conversion that cannot be read or would destroy something."""
    if not source.exists():
        raise UserError(f"--source={source}: no such file or folder; check the path.")
    inside, outside = out.resolve(), source.resolve()
    if inside.is_relative_to(outside):
        raise UserError(f"--out={out}: is in --source={source}; name a folder outside it.")
    if outside.is_relative_to(inside):
        raise UserError(f"--out={out}: --source={source} is in it; name another folder.")
    if not out.exists():
        return
    if not out.is_dir():
        raise UserError(f"--out={out}: is a file; name a folder.")
    if not any(out.iterdir()):
        return
    if not overwrite:
        raise UserError(f"--out={out}: exists; name a new folder, or add --overwrite.")
    files = [file for file in (out / "model.json", out / "config.json") if file.is_file()]
    contents = [content for file in files if isinstance(content := read_json(file), dict)]
    if not any(WRITTEN_BY in content for content in contents):
        raise UserError(
            f"--out={out}: is not a folder of `mmqa convert`, so --overwrite does not replace it; "
            "name another."
        )


@contextlib.contextmanager
def whole_folder(out: Path, size: int) -> Iterator[Path]:
    """Yields a temporary folder beside `out` that takes its name when the block succeeds.

    If the block fails or is interrupted (Ctrl-C, SIGTERM), nothing is left. What a killed process
    left is removed by the next conversion to the same `out`.

    Args:
      out: the folder to make, or to replace.
      size: bytes that will be written.

    Raises:
      RunError: the disk does not have that much space.
    """
    out = Path(os.path.realpath(out))  # a link stays, and its folder is on another disk perhaps
    with no_empty_folders(out.parent), _sigterm_interrupts():
        out.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(out)
        free = shutil.disk_usage(out.parent).free
        if free < size:
            raise RunError(
                f"--out={out}: {size / 2**30:.1f} GiB will be written, the disk has "
                f"{free / 2**30:.1f} GiB left; name a folder on another disk."
            )
        temporary, old = (unfinished(out, kind) for kind in ("tmp", "old"))
        try:
            temporary.mkdir()
            yield temporary
            if out.exists():
                os.rename(out, old)
            os.rename(temporary, out)
        finally:
            if old.exists() and not out.exists():
                os.rename(old, out)
            for folder in (temporary, old):
                shutil.rmtree(folder, ignore_errors=True)


def copy_companions(source: Path, folder: Path) -> list[str]:
    """Copies the tokenizer and generation files that are in `source`; returns their names."""
    names = [name for name in COMPANIONS if (source / name).is_file()]
    for name in names:
        shutil.copyfile(source / name, folder / name)
    return names


@contextlib.contextmanager
def name_paths(source: Path) -> Iterator[None]:
    """Turns the operating system's errors into sentences that name the path."""
    try:
        yield
    except OSError as error:
        if find_disk_failure(error) is not None:
            raise
        path = error.filename or source
        raise UserError(f"{path}: {error.strerror}; check the path and its permissions.") from error


@contextlib.contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """SIGTERM acts as Ctrl-C does: half-written files are removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
