"""What the page asks for: the systems, an answer as it comes, a source with its surroundings."""

from __future__ import annotations

import asyncio
import json
import urllib.parse
from collections.abc import AsyncIterator, Callable
from importlib import resources
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.documents.places import LINED, place_of
from mmqa_jax.data.documents.read import ending_of
from mmqa_jax.data.schema import Source
from mmqa_jax.prompting.backends import Picture
from mmqa_jax.prompting.backends.openai_requests import read_picture
from mmqa_jax.runs.ask_corpus import AskedCorpus
from mmqa_jax.runs.originals import Originals
from mmqa_jax.runs.prepare import folder_notes
from mmqa_jax.serve import door
from mmqa_jax.serve.systems import Parts

_FILES = {"page.css": "text/css", "page.js": "text/javascript", "icon.svg": "image/svg+xml"}
# What browsers show without running anything of it; other files are saved.
_SHOWN = {
    ".pdf": "application/pdf", ".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg",
    ".webp": "image/webp", **dict.fromkeys(LINED, "text/plain; charset=utf-8"),
}  # fmt: skip
_AROUND = 3  # passages of the same document that are shown before and after one
# The page's own files alone: no script of a document or an answer is ever run.
_POLICY = "default-src 'self'; img-src 'self' blob: data:; frame-ancestors 'none'; base-uri 'none'"
_HEADERS = {"Content-Security-Policy": _POLICY, "Cache-Control": "no-cache"}


class PageApi:
    """Answers the routes of the page with the parts."""

    def __init__(self, parts: Parts):
        self._parts = parts
        folder = resources.files("mmqa_jax.serve") / "page"
        self._files = {name: (folder / name).read_bytes() for name in ("index.html", *_FILES)}

    async def page(self, request: Request) -> Response:
        """The page itself."""
        return Response(self._files["index.html"], media_type="text/html", headers=_HEADERS)

    async def file(self, request: Request) -> Response:
        """A file of the page: one of few, by name."""
        name = request.path_params["name"]
        if name not in _FILES:
            raise door.ApiError(404, "no such file.")
        return Response(self._files[name], media_type=_FILES[name], headers=_HEADERS)

    async def about(self, request: Request) -> Response:
        """What can be asked here."""
        parts = self._parts
        systems = [
            {
                "name": system.name,
                "label": system.label,
                "about": system.about,
                "pictures": system.takes_pictures,
                "examples": list(system.examples),
            }
            for system in parts.systems.values()
        ]
        corpus = parts.corpus
        return JSONResponse(
            {
                "title": parts.title,
                "systems": systems,
                "sources": 0 if corpus is None else len(corpus),
                "credits": [] if corpus is None else list(map(str, corpus.materials)),
                "unread": [] if corpus is None else folder_notes(corpus.manifest.get("origin", {})),
            }
        )

    async def ask(self, request: Request) -> Response:
        """An answer as server-sent events: those of `systems.py`, then `answer` or `error`."""
        pieces, visit = door.Pieces(), door.visit_of(request)
        fields = await visit.fields()
        question, name = fields.take("question", str), fields.take("system", str)
        url = fields.take("image", str, "")
        fields.end()
        if name not in self._parts.systems:
            known = ", ".join(self._parts.systems)
            raise door.ApiError(404, f"no system {name!r:.80}; there are: {known}.", param="system")
        system = self._parts.systems[name]
        picture = (await asyncio.to_thread(read_picture, url, "image")).data if url else None
        if picture is not None and not system.takes_pictures:
            raise door.ApiError(400, f"{system.label} takes no pictures; remove it.", param="image")
        asking = system.ask(question, picture, lambda kind, value: pieces.put((kind, value)))
        visit.works(asking)

        async def events() -> AsyncIterator[str]:
            try:
                async for kind, value in pieces.of(asking, visit):
                    yield _sent_event(kind, value)
                yield _sent_event("answer", await asyncio.wrap_future(asking.future))
            except Exception as error:
                yield _sent_event("error", door.refusal(error).to_json()["error"])

        return StreamingResponse(events(), media_type="text/event-stream", headers=_HEADERS)

    async def source(self, request: Request) -> Response:
        """A source, with what stands before and after it in the same document."""
        row = self._row(request.path_params["name"])
        assert self._parts.corpus is not None
        return JSONResponse(passage_around(self._parts.corpus, row))

    async def picture(self, request: Request) -> Response:
        """A source's picture, as it is encoded."""
        row = self._row(request.path_params["name"])
        assert self._parts.corpus is not None
        data = await asyncio.to_thread(self._parts.corpus.picture, row)
        if data is None:
            raise door.ApiError(404, "this source has no picture.")
        try:
            media_type = Picture(data).media_type
        except Exception as error:
            raise door.ApiError(
                415, "the picture is of a kind that browsers do not show."
            ) from error
        headers = {**_HEADERS, "Content-Security-Policy": "default-src 'none'"}
        return Response(data, media_type=media_type, headers=headers)

    async def page_picture(self, request: Request) -> Response:
        """The page of a PDF that a source stands on, and its size in points."""
        originals, source = self._original(request)
        if ending_of(source.extra["file"]) != ".pdf" or not source.extra.get("page"):
            raise door.ApiError(404, "this source stands on no page of a PDF.")
        page = await _read(originals.page, source.extra["file"], source.extra["page"])
        headers = {**_HEADERS, "X-Page-Size": f"{page.width:g} {page.height:g}"}
        return Response(page.png, media_type="image/png", headers=headers)

    async def original(self, request: Request) -> Response:
        """The file that a source was read from; what browsers would run is only kept by them."""
        originals, source = self._original(request)
        name = source.extra["file"]
        data = await _read(originals.read, name)
        kind = _SHOWN.get(ending_of(name))
        quoted = urllib.parse.quote(name.rpartition("/")[2])
        shown = "inline" if kind else "attachment"
        headers = {**_HEADERS, "Content-Disposition": f"{shown}; filename*=UTF-8''{quoted}"}
        if kind == _SHOWN[".pdf"]:  # whose viewer a sandbox shuts out
            del headers["Content-Security-Policy"]
        else:
            headers["Content-Security-Policy"] = "default-src 'none'; sandbox"
        return Response(data, media_type=kind or "application/octet-stream", headers=headers)

    def _original(self, request: Request) -> tuple[Originals, Source]:
        corpus = self._parts.corpus
        row = self._row(request.path_params["name"])
        if corpus is None or corpus.originals is None or not corpus.sources[row].extra.get("file"):
            raise door.ApiError(404, "this source has no file that can be opened.")
        return corpus.originals, corpus.sources[row]

    def _row(self, name: str) -> int:
        """A source is looked up by its id in the corpus: no path reaches the file system."""
        corpus = self._parts.corpus
        if corpus is None or name not in corpus.row:
            raise door.ApiError(404, "no such source.")
        return corpus.row[name]


async def _read(read: Callable[..., Any], *where: Any) -> Any:
    """What is read of an original file; it may have changed since the passages were."""
    try:
        return await asyncio.to_thread(read, *where)
    except UserError as error:
        raise door.ApiError(409, str(error)) from error


def passage_around(corpus: AskedCorpus, row: int) -> dict[str, Any]:
    """A source of a corpus, with what stands before and after it in the same document."""
    sources = corpus.sources
    source, first, last = sources[row], row, row
    while first > max(row - _AROUND, 0) and _follows(sources[first - 1], source):
        first -= 1
    while last < min(row + _AROUND, len(sources) - 1) and _follows(sources[last + 1], source):
        last += 1
    return {
        **_described(source),
        "rows": [
            {"cell": place["name"], "text": source.text[place["start"] : place["end"]]}
            for place in source.extra.get("places", ())
            if not place.get("name", "slide ").startswith("slide ")
        ],
        "original": corpus.originals is not None and source.extra.get("file") is not None,
        "before": [_described(before) for before in sources[first:row]],
        "after": [_described(after) for after in sources[row + 1 : last + 1]],
    }


def _follows(neighbor: Source, source: Source) -> bool:
    file = source.extra.get("file")
    return file is not None and neighbor.modality == "text" and neighbor.extra.get("file") == file


def _described(source: Source) -> dict[str, Any]:
    return {
        "id": source.id,
        "title": source.title,
        "text": source.text,
        "file": source.extra.get("file"),
        "page": source.extra.get("page"),
        "image": source.image is not None,
        **place_of(source.extra),
    }


def _sent_event(kind: str, value: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps(value)}\n\n"
