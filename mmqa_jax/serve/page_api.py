"""What the page asks for: the systems, an answer as it comes, a source with its surroundings."""

from __future__ import annotations

import asyncio
import base64
import binascii
import collections
import json
import urllib.parse
from collections.abc import AsyncIterator, Callable
from importlib import resources
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.documents.document import LINED, ending_of, place_of
from mmqa_jax.data.schema import Source
from mmqa_jax.prompting.backends import Message, Picture
from mmqa_jax.prompting.backends.json_fields import strings, wrong
from mmqa_jax.prompting.backends.openai_requests import read_picture
from mmqa_jax.runs.ask_corpus import AskedCorpus
from mmqa_jax.runs.originals import Originals
from mmqa_jax.runs.prepare import folder_notes
from mmqa_jax.serve import door
from mmqa_jax.serve.marked_text import elements_of
from mmqa_jax.serve.systems import Directions, Parts
from mmqa_jax.serve.uploads import ENDINGS, Uploads

_FILES = {
    "page.css": "text/css",
    "page.js": "text/javascript",
    "chat.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
_MOST_FILES = 1_000  # that the page lists
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
    """Answers the routes of the page with the parts.

    Args:
      uploads: documents that users may add.
    """

    def __init__(self, parts: Parts, uploads: int = 0):
        self._parts, self._uploads = parts, Uploads(parts, uploads)
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
        corpora, files, unread = parts.corpora, dict[str, int](), list[str]()
        for folder, corpus in corpora.items():
            begin = f"{folder}/" if folder else ""
            files |= {f"{begin}{file}": count for file, count in files_read(corpus).items()}
            notes = folder_notes(corpus.manifest.get("origin", {}))
            unread += [f"{folder}: {note}" if folder else note for note in notes]
        credits = (str(material) for corpus in corpora.values() for material in corpus.materials)
        return JSONResponse(
            {
                "title": parts.title,
                "systems": systems,
                "sources": sum(map(len, corpora.values())),
                "credits": list(dict.fromkeys(credits)),
                "files": files,
                "unread": unread,
                "uploads": self._uploads.left,
                "endings": list(ENDINGS),
            }
        )

    async def ask(self, request: Request) -> Response:
        """An answer as server-sent events: those of `systems.py`, then `answer` or `error`."""
        pieces, visit = door.Pieces(), door.visit_of(request)
        fields = await visit.fields()
        question, name = fields.take("question", str), fields.take("system", str)
        url = fields.take("image", str, "")
        history = _history(fields.take("history", list, []))
        fields.end()
        if name not in self._parts.systems:
            known = ", ".join(self._parts.systems)
            raise door.ApiError(404, f"no system {name!r:.80}; there are: {known}.", param="system")
        system = self._parts.systems[name]
        picture = (await asyncio.to_thread(read_picture, url, "image")).data if url else None
        if picture is not None and not system.takes_pictures:
            raise door.ApiError(400, f"{system.label} takes no pictures; remove it.", param="image")

        def tell(kind: str, value: Any) -> None:
            pieces.put((kind, value))

        asking = system.ask(question, picture, tell, Directions(history=history))
        visit.works(asking)

        async def events() -> AsyncIterator[str]:
            try:
                async for kind, value in pieces.of(asking, visit):
                    yield _sent_event(kind, value)
                row = await asyncio.wrap_future(asking.future)
                elements = elements_of(row["marked"] or row["answer"])
                yield _sent_event("answer", {**row, "elements": elements})
            except Exception as error:
                yield _sent_event("error", door.refusal(error).to_json()["error"])

        return StreamingResponse(events(), media_type="text/event-stream", headers=_HEADERS)

    async def upload(self, request: Request) -> Response:
        """Adds a document to the folder, as base64, and says what was read of it."""
        visit = door.visit_of(request)
        fields = await visit.fields()
        name, encoded = fields.take("name", str), fields.take("data", str)
        fields.end()
        try:
            data = base64.b64decode(encoded, validate=True)
        except binascii.Error as error:
            raise door.ApiError(400, f"data is broken base64 ({error}).", param="data") from error
        adding = visit.works(self._uploads.add(name, data))
        return JSONResponse(await asyncio.wrap_future(adding.future), headers=_HEADERS)

    async def source(self, request: Request) -> Response:
        """A source, with what stands before and after it in the same document."""
        return JSONResponse(passage_around(*self._place(request)))

    async def picture(self, request: Request) -> Response:
        """A source's picture, as it is encoded."""
        corpus, row = self._place(request)
        data = await asyncio.to_thread(corpus.picture, row)
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
        corpus, row = self._place(request)
        if corpus.originals is None or not corpus.sources[row].extra.get("file"):
            raise door.ApiError(404, "this source has no file that can be opened.")
        return corpus.originals, corpus.sources[row]

    def _place(self, request: Request) -> tuple[AskedCorpus, int]:
        """Looks a source up by its id in its folder's corpus: no path reaches the file system."""
        corpus = self._parts.corpora.get(request.query_params.get("folder", ""))
        name = request.path_params["name"]
        if corpus is None or name not in corpus.row:
            raise door.ApiError(404, "no such source.")
        return corpus, corpus.row[name]


def files_read(corpus: AskedCorpus) -> dict[str, int]:
    """How many sources each file gave, of the first files of a folder; none of another corpus."""
    files = [source.extra.get("file") for source in corpus.sources]
    counts = collections.Counter(file for file in files if isinstance(file, str))
    return dict(sorted(counts.items())[:_MOST_FILES])


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


def _history(rows: list[Any]) -> tuple[Message, ...]:
    """Messages of the questions before one, and of their answers, as the page kept them."""
    messages: list[Message] = []
    for number, row in enumerate(rows):
        texts = [row.get(key) for key in ("question", "answer")] if isinstance(row, dict) else []
        if len(texts) != 2 or not strings(texts):
            raise wrong(f"history[{number}]", row, "expected a question and its answer")
        messages += [Message("user", (texts[0],)), Message("assistant", (texts[1],))]
    return tuple(messages)


def _sent_event(kind: str, value: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps(value)}\n\n"
