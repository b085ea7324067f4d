"""The sources of a server as tools of an assistant, by the Model Context Protocol (MCP).

An assistant searches, opens passages with their surroundings, reads files, asks for answers, and
checks what it cites. The `mcp` package speaks the protocol, over HTTP (`/mcp`) or over stdio.
"""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Sequence
from typing import Any

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from starlette.applications import Starlette

from mmqa_jax import __version__
from mmqa_jax.core.errors import UserError
from mmqa_jax.data.documents.document import cited_place, shown_place
from mmqa_jax.decoding.online import Closed, QueueFull
from mmqa_jax.runs.ask_corpus import AskedCorpus
from mmqa_jax.serve.page_api import passage_around
from mmqa_jax.serve.systems import AnswerRow, Asking, FindPassages, Parts, ReadPassages, System

_MOST_CHARACTERS = 20_000  # of a file, in one reply
_MOST_FOUND = 10  # sources of all folders together, in one reply
_MOST_SOURCES = 2_000  # whose passages `read` looks through for similar names of files


def mcp_server(parts: Parts) -> MCPServer:
    """The tools over the parts of a server; UserError where it has no sources."""
    if not parts.corpora or not parts.systems:
        raise UserError("--mcp: its tools search sources; give --data=FOLDER or --workdir=DIR.")
    tools = _Tools(parts)
    server = MCPServer(
        f"mmqa: {parts.title}",
        version=__version__,
        instructions=f"Search, read and cite the sources of {', '.join(tools.folders)}. Answers "
        "name their sources by id, folder, file and page; cite them so.",
        log_level="WARNING",
    )
    if FindPassages.name in parts.systems:
        server.add_tool(tools.search)
    for tool in (tools.open_page, tools.read, tools.cite, tools.ask):
        server.add_tool(tool)
    return server


def mcp_application(server: MCPServer, body: int) -> Starlette:
    """The tools over HTTP; the door in front of it checks names, origins and keys.

    Args:
      body: bytes of a request, at most.
    """
    from mcp.server.transport_security import TransportSecuritySettings

    return server.streamable_http_app(
        json_response=True,
        stateless_http=True,
        max_request_body_size=body,
        transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),
    )


class _Tools:
    """The docstrings are what an assistant reads of the tools.

    Attributes:
      folders: by the names that it gives them, the first one by its title; see `Parts.corpora`.
    """

    def __init__(self, parts: Parts):
        self._corpora, self._systems = parts.corpora, parts.systems
        self.folders = {folder or parts.title: folder for folder in parts.corpora}

    async def search(self, query: str, folder: str = "") -> dict[str, Any]:
        """Finds the passages and pictures that answer a question best, by meaning and by words, in
        a folder, or in all. Each has an id for open_page and cite."""
        rows = await self._asked(self._within(FindPassages.name, folder), query)
        sources = [source for row in rows for source in row["sources"]]
        if len(rows) > 1:
            sources.sort(key=lambda source: -source["score"])
        best = enumerate(sources[:_MOST_FOUND], start=1)
        numbered = [{**source, "number": number} for number, source in best]
        return {"sources": self._told(numbered), "is_near": any(row["found"] for row in rows)}

    async def ask(self, question: str, folder: str = "") -> dict[str, Any]:
        """Answers a question from the sources of a folder, or of the one with the nearest of all;
        `[n]` in the answer are the numbers of its sources. `found` is false where no source answers
        it. A `quote` answers better than the words, of which the model is not sure."""
        finders = self._within(FindPassages.name, folder)
        systems = self._within(ReadPassages.name, folder) or finders or [*self._systems.values()]
        if len(finders) > 1:
            rows = await self._asked(finders, question)
            near = [max((s["score"] for s in row["sources"]), default=-1.0) for row in rows]
            systems = [systems[near.index(max(near))]]
        (row,) = await self._asked(systems[:1], question)
        return {
            "answer": row["marked"],
            "found": row["found"],
            "sources": self._told(row["sources"]),
            "quote": row.get("quote"),
            "notes": row["notes"],
        }

    async def open_page(self, id: str, folder: str = "") -> dict[str, Any]:
        """Opens a source by its id: its text, with the passages before and after it."""
        return passage_around(*self._place(id, folder))

    async def read(self, file: str, page: int | None = None, folder: str = "") -> dict[str, Any]:
        """Reads a file of the sources, or one page of it."""
        every = [s for name in self._names(folder) for s in self._corpora[name].sources]
        sources = [source for source in every if source.extra.get("file") == file]
        if not sources:
            names = {str(source.extra.get("file")) for source in every}
            near = difflib.get_close_matches(file, sorted(names)[:_MOST_SOURCES], n=3, cutoff=0.4)
            similar = f"; similar names are {', '.join(near)}" if near else ""
            raise ToolError(f"there is no file {file!r:.200}{similar}.")
        pages = sorted({source.extra["page"] for source in sources if source.extra.get("page")})
        if page is not None:
            sources = [source for source in sources if source.extra.get("page") == page]
            if not sources:
                raise ToolError(f"{file} has no page {page}; pages with text: {pages}.")
        text = "\n\n".join(source.text for source in sources)
        cut = len(text) > _MOST_CHARACTERS
        return {"file": file, "pages": pages, "text": text[:_MOST_CHARACTERS], "is_cut": cut}

    async def cite(self, id: str, quote: str = "", folder: str = "") -> dict[str, Any]:
        """Says how to cite a source, and whether a quote stands in it word by word."""
        corpus, row = self._place(id, folder)
        source = corpus.sources[row]
        place = filter(None, (source.title, shown_place(source.extra)))
        quoted = " ".join(quote.split()) in " ".join(source.text.split()) if quote else None
        return {
            "citation": ", ".join(dict.fromkeys(place)) or source.id,
            **cited_place(source.text, source.extra, quote),
            "id": source.id,
            "quote_is_in_source": quoted,
            "credits": list(map(str, corpus.materials)),
        }

    async def _asked(self, systems: Sequence[System], question: str) -> list[AnswerRow]:
        askings: list[Asking] = []
        try:
            for system in systems:
                askings.append(system.ask(question, None, lambda kind, value: None))
            return [await asyncio.wrap_future(asking.future) for asking in askings]
        except (UserError, QueueFull, Closed) as error:
            raise ToolError(str(error)) from error
        finally:
            for asking in askings:
                asking.cancel()  # changes nothing where it is finished

    def _told(self, rows: Sequence[AnswerRow]) -> list[AnswerRow]:
        """Rows of sources with the names of their folders."""
        names = {folder: name for name, folder in self.folders.items()}
        return [{**row, "folder": names[row["folder"]]} for row in rows]

    def _names(self, folder: str) -> list[str]:
        """The folder of a name; "": all."""
        if folder and folder not in self.folders:
            raise ToolError(f"there is no folder {folder!r:.200}, but {', '.join(self.folders)}.")
        return [self.folders[folder]] if folder else [*self._corpora]

    def _within(self, kind: str, folder: str) -> list[System]:
        """The systems of a kind in a folder, or in all."""
        names = [f"{kind}:{name}" if name else kind for name in self._names(folder)]
        return [self._systems[name] for name in names if name in self._systems]

    def _place(self, name: str, folder: str) -> tuple[AskedCorpus, int]:
        """A source by its id: its corpus, and its row there."""
        every = [self._corpora[place] for place in self._names(folder)]
        held = [corpus for corpus in every if name in corpus.row]
        if not held:
            raise ToolError(f"there is no source {name!r:.200}; ids come from search and ask.")
        if len(held) > 1:
            raise ToolError(f"several folders have a source {name!r:.200}; name one of them, too.")
        return held[0], held[0].row[name]
