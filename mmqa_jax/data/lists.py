"""A corpus from Python lists: texts, and if there are any their titles, pictures and ids."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from mmqa_jax.core.errors import UserError, check_several
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.images import read_picture_file, verify
from mmqa_jax.data.schema import Source

PictureOf = str | os.PathLike | bytes  # a file, or what is in it


def corpus_of_lists(
    texts: Sequence[str],
    titles: Sequence[str | None] | None = None,
    pictures: Sequence[PictureOf | None] | None = None,
    ids: Sequence[str] | None = None,
) -> Corpus:
    """The corpus whose sources are the texts.

    Args:
      texts: the snippet of every source; of one with a picture its caption, which may be empty.
      titles: by source; "" or None: it has none.
      pictures: by source, a file or its encoded bytes; None: the source is a text. Files are read
        again when their picture is used.
      ids: by source; None: "0", "1" and so on, their places in `texts`.

    Raises:
      TypeError: one text in place of a list, or a value of another type.
    """
    texts = _list(texts, "texts")
    titles, pictures, ids = (
        None if values is None else _list(values, name, len(texts))
        for name, values in (("titles", titles), ("pictures", pictures), ("ids", ids))
    )
    if not texts:
        raise UserError("open_corpus: there are no texts; give at least one.")
    sources: dict[str, Source] = {}
    encoded: dict[str, PictureOf] = {}
    digest = hashlib.sha256()
    for row, text in enumerate(texts):
        picture = None if pictures is None else pictures[row]
        title = "" if titles is None else _text(titles[row] or "", f"titles[{row}]")
        name = str(row) if ids is None else _text(ids[row], f"ids[{row}]")
        text = _text(text, f"texts[{row}]")
        if picture is None and not text.strip():
            raise UserError(
                f"open_corpus: texts[{row}] is empty; leave it out, or give its picture."
            )
        if not name.strip() or name in sources:
            there = "is empty" if not name.strip() else f"is {name!r}, as another one is"
            raise UserError(f"open_corpus: ids[{row}] {there}; give each source its own id.")
        image = None
        if picture is not None:
            image = f"pictures[{row}]"
            encoded[image] = picture
            data = _read(picture, image)
            verify(data, f"open_corpus: {image}")
            digest.update(hashlib.sha256(data).digest())
        modality = "text" if picture is None else "image"
        sources[name] = Source(name, modality, text, title, image)
        digest.update(json.dumps([name, text, title, image]).encode())

    def read_picture(image: str) -> bytes | None:
        return _read(encoded[image], image) if image in encoded else None

    return Corpus(sources.values(), (), read_picture, digest.hexdigest())


def _list(values: Iterable[Any], name: str, length: int | None = None) -> list[Any]:
    check_several(values, f"open_corpus: {name}", name)
    if isinstance(values, Mapping | Set):  # whose order, or keys, would be taken
        raise TypeError(
            f"open_corpus: {name} are a {type(values).__name__}, a list was expected; list them, "
            "and give the ids as `ids`."
        )
    found = list(values)
    if length is not None and len(found) != length:
        raise UserError(
            f"open_corpus: {length:,} texts but {len(found):,} {name}; give one for each text, "
            "None where there is none."
        )
    return found


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"open_corpus: {place} is {value!r:.60}, a text was expected; give a str.")
    return value


def _read(picture: PictureOf, place: str) -> bytes:
    """The encoded picture."""
    if isinstance(picture, bytes):
        return picture
    if isinstance(picture, str | os.PathLike):
        return read_picture_file(picture)
    raise TypeError(
        f"open_corpus: {place} is {type(picture).__name__}; give a file's path, or its bytes."
    )
