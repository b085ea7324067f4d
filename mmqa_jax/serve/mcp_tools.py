"""The sources of a server as tools of an assistant, by the Model Context Protocol (MCP).

An assistant searches, opens passages with their surroundings, reads files, asks for answers, and
checks what it cites. The `mcp` package speaks the protocol, over HTTP (`/mcp`) or over stdio.
"""

from __future__ import annotations

import asyncio
import difflib
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
from mmqa_jax.serve.systems import FindPassages, Parts, ReadPassages, System

_MOST_CHARACTERS = 20_000  # of a file, in one reply
_MOST_SOURCES = 2_000  # whose passages `read` looks through for similar names of files


def mcp_server(parts: Parts) -> MCPServer:
    """The tools over the parts of a server; UserError where it has no sources."""
    if parts.corpus is None or not parts.systems:
        raise UserError("--mcp: its tools search sources; give --data=FOLDER or --workdir=DIR.")
    server = MCPServer(
        f"mmqa: {parts.title}",
        version=__version__,
        instructions=f"Search, read and cite the sources of {parts.title}. Answers name their "
        "sources by id, file and page; cite them so.",
        log_level="WARNING",
    )
    tools = _Tools(parts, parts.corpus)
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
    """The docstrings are what an assistant reads of the tools."""

    def __init__(self, parts: Parts, corpus: AskedCorpus):
        self._corpus = corpus
        self._systems = parts.systems
        preferred = [ReadPassages.name, *parts.systems]
        self._reader = next(parts.systems[name] for name in preferred if name in parts.systems)

    async def search(self, query: str) -> dict[str, Any]:
        """Finds the passages and pictures that answer a question best, by meaning and by words.
        Each has an id for open_page and cite."""
        row = await self._asked(self._systems[FindPassages.name], query)
        return {"sources": row["sources"], "is_near": row["found"]}

    async def ask(self, question: str) -> dict[str, Any]:
        """Answers a question from the sources; `[n]` in the answer are the numbers of its
        sources. `found` is false where no source answers it."""
        row = await self._asked(self._reader, question)
        return {
            "answer": row["marked"],
            "found": row["found"],
            "sources": row["sources"],
            "notes": row["notes"],
        }

    async def open_page(self, id: str) -> dict[str, Any]:
        """Opens a source by its id: its text, with the passages before and after it."""
        return passage_around(self._corpus, self._row(id))

    async def read(self, file: str, page: int | None = None) -> dict[str, Any]:
        """Reads a file of the sources, or one page of it."""
        sources = [source for source in self._corpus.sources if source.extra.get("file") == file]
        if not sources:
            names = {str(source.extra.get("file")) for source in self._corpus.sources}
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

    async def cite(self, id: str, quote: str = "") -> dict[str, Any]:
        """Says how to cite a source, and whether a quote stands in it word by word."""
        source = self._corpus.sources[self._row(id)]
        place = filter(None, (source.title, shown_place(source.extra)))
        quoted = " ".join(quote.split()) in " ".join(source.text.split()) if quote else None
        return {
            "citation": ", ".join(dict.fromkeys(place)) or source.id,
            **cited_place(source.text, source.extra, quote),
            "id": source.id,
            "quote_is_in_source": quoted,
            "credits": list(map(str, self._corpus.materials)),
        }

    async def _asked(self, system: System, question: str) -> dict[str, Any]:
        try:
            asking = system.ask(question, None, lambda kind, value: None)
        except (UserError, QueueFull, Closed) as error:
            raise ToolError(str(error)) from error
        try:
            return await asyncio.wrap_future(asking.future)
        except UserError as error:
            raise ToolError(str(error)) from error
        finally:
            asking.cancel()  # changes nothing where it is finished

    def _row(self, name: str) -> int:
        if name not in self._corpus.row:
            raise ToolError(f"there is no source {name!r:.200}; ids come from search and ask.")
        return self._corpus.row[name]
