"""Reads LaTeX by pylatexenc: its text becomes HTML, whose visible text is read (html.Page).

No macro is executed and no file is included.
"""

import dataclasses
import html
import re
from collections.abc import Iterable, Iterator
from typing import Any

from pylatexenc import latex2text, latexwalker, macrospec

from mmqa_jax.core.errors import decimal_number
from mmqa_jax.data.documents.document import Document, decoded, letters, naming_damage
from mmqa_jax.data.documents.html import Page

# Environments of code, which are read as LaTeX's own.
_CODE = re.compile(r"\\(begin|end)\{(?:lstlisting|minted|Verbatim|alltt)\}(?:\[[^\]\n]{0,400}+\])?")
_BEGIN, _END = r"\begin{document}", r"\end{document}"
_ROW, _CELL, _RULE = "\x01", "\x02", "\x03"  # the ends of a table's rows and cells, and its rules
_SPAN = re.compile("\x04([0-9]{1,6}) ([0-9]{1,6})\x04")  # the columns and rows that a cell covers

# Arguments of commands and environments that pylatexenc knows otherwise or not at all.
_COMMANDS = {
    "caption": "*[{", "captionof": "{*[{", "paragraph": "*[{", "subparagraph": "*[{", "part": "*[{",
    "bibitem": "[{", "multicolumn": "{{{", "multirow": "[{[{[{", "href": "{{", "thanks": "{",
    "includegraphics": "*[[{", "graphicspath": "{", "citeauthor": "*[[{", "citeyear": "*[[{",
    "parencite": "*[[{", "textcite": "*[[{", "pageref": "{", "nameref": "{", "index": "{",
    "bibliographystyle": "{", "pagestyle": "{", "thispagestyle": "{", "addbibresource": "{",
    "footnotetext": "[{", "cmidrule": "{",
}  # fmt: skip
_ENVIRONMENTS = {
    "longtable": "[{", "tabulary": "{{", "wrapfigure": "[{[{", "minipage": "[[[{", "multicols": "{",
    "subfigure": "[{", "thebibliography": "{",
}  # fmt: skip
# What the page that LaTeX sets does not show: names of places and of files, and lengths.
_UNSEEN = frozenset({
    "label", "ref", "autoref", "cref", "Cref", "eqref", "pageref", "nameref", "index",
    "bibliography", "input", "bibliographystyle", "documentclass", "usepackage", "RequirePackage",
    "selectlanguage", "setlength", "addlength", "setcounter", "addcounter", "hypersetup",
    "pagestyle", "thispagestyle", "graphicspath", "include", "addbibresource", "hspace", "vspace",
    "newcommand", "renewcommand", "providecommand", "newenvironment", "renewenvironment",
    "cmidrule", "provideenvironment", "DeclareMathOperator", "hphantom", "vphantom", "phantom",
})  # fmt: skip
# Commands with arguments that are no text, which `_COMMAND_TEXTS` leaves out.
_PLACES = frozenset({
    "includegraphics", "href", "multicolumn", "multirow", "\\", "bibitem", "captionof",
})  # fmt: skip
_RULES = frozenset({"hline", "toprule", "midrule", "bottomrule"})
_TABLES = frozenset({"tabular", "tabular*", "tabularx", "tabulary", "longtable"})
_DRAWINGS = frozenset({"tikzpicture", "pgfpicture", "picture", "comment"})
# Environments whose optional argument is seen: a name in brackets.
_NAMED = frozenset({"theorem", "lemma", "proof", "definition", "corollary", "proposition"})
# What becomes of a command's arguments (from 1), and of an environment's content.
_COMMAND_TEXTS = {
    "part": "<h1>%(3)s</h1>", "chapter": "<h1>%(3)s</h1>", "section": "<h2>%(3)s</h2>",
    "subsection": "<h3>%(3)s</h3>", "subsubsection": "<h4>%(3)s</h4>",
    "paragraph": "<h5>%(3)s</h5>", "subparagraph": "<h6>%(3)s</h6>",
    "caption": "<figcaption>%(3)s</figcaption>", "captionof": "<p>%(4)s</p>",
    "footnote": " [%(2)s]", "footnotetext": " [%(2)s]", "thanks": " [%(1)s]", "href": "%(2)s",
    "url": "%(1)s", "bibitem": "<p>[%(2)s] ", "includegraphics": '<img src="%(4)s" alt="">',
    "cite": "[%(4)s]", "citet": "[%(4)s]", "citep": "[%(4)s]", "parencite": "[%(4)s]",
    "textcite": "[%(4)s]", "citeauthor": "[%(4)s]", "citeyear": "[%(4)s]",
}  # fmt: skip
_ENVIRONMENT_TEXTS = {
    "itemize": "<ul>%s</ul>", "enumerate": "<ol>%s</ol>", "description": "<ul>%s</ul>",
    **dict.fromkeys(("figure", "figure*", "wrapfigure", "table", "table*", "subfigure"),
                    "<figure>%s</figure>"),
    **dict.fromkeys(("abstract", "quote", "quotation", "center", "thebibliography", "minipage"),
                    "<div>%s</div>"),
}  # fmt: skip


def read_tex(data: bytes) -> Document:
    """A UTF-8 text in LaTeX: sections, lists, tables, formulas' letters, figures with captions."""
    text = _CODE.sub(r"\\\1{verbatim}", decoded(data)).replace("}{", "} {")
    before, begin, body = text.partition(_BEGIN)
    if before.count(r"\begin{verbatim}") > before.count(r"\end{verbatim}"):
        begin = ""  # the one that was found is an example
    reader, page = _Reader(), Page()
    with naming_damage("LaTeX", latexwalker.LatexWalkerError, LookupError, ValueError, TypeError):
        if begin:
            reader.read(before)  # its definitions and its title
            reader.unseen = letters(before) - letters("".join(reader.head.values()))
        markup = reader.read(body.partition(_END)[0] if begin else text)
    if title := reader.head.get("title"):
        markup = f"<title>{title.replace('<br>', ' ')}</title>{markup}"
    page.add_markup(markup)
    page.add_left_out("commands, comments and definitions", reader.unseen)
    document = page.document()
    return dataclasses.replace(document, letters=max(document.letters, reader.held + reader.unseen))


class _Reader(latex2text.LatexNodes2Text):
    """Makes HTML of LaTeX.

    Attributes:
      unseen: letters of what no person sees.
      held: letters of what a person sees, counted apart.
    """

    def __init__(self) -> None:
        self._parsed = latexwalker.get_default_latex_context_db()
        self._parsed.add_context_category(
            "mmqa",
            macros=[macrospec.MacroSpec(name, spec) for name, spec in _COMMANDS.items()],
            environments=[macrospec.EnvironmentSpec(*item) for item in _ENVIRONMENTS.items()],
            prepend=True,
        )
        texts = latex2text.get_default_latex_context_db()
        texts.add_context_category(
            "mmqa",
            macros=[latex2text.MacroTextSpec(*item) for item in _COMMAND_TEXTS.items()],
            environments=[
                latex2text.EnvironmentTextSpec(*item) for item in _ENVIRONMENT_TEXTS.items()
            ],
            prepend=True,
        )
        super().__init__(latex_context=texts, math_mode="text")
        self.head: dict[str, str] = {}  # HTML of the title, author and date
        self.unseen = self.held = 0
        self._defined: dict[str, Any] = {}  # command without arguments -> what it stands for
        self._expanding = False
        self._tables = 0  # that are open
        self._formulas = 0  # that are open

    def read(self, text: str) -> str:
        """HTML of LaTeX."""
        walker = latexwalker.LatexWalker(text, latex_context=self._parsed, tolerant_parsing=True)
        nodes = walker.get_latex_nodes()[0]
        self.held = sum(map(letters, _texts(nodes)))
        return self.nodelist_to_text(nodes)

    def chars_node_to_text(self, node: Any, textcol: int = 0) -> str:
        return re.sub(r"\n\s*\n", "\n<p>", html.escape(node.chars, quote=False))

    def comment_node_to_text(self, node: Any) -> str:
        self.unseen += letters(node.comment)
        return node.comment_post_space

    def specials_node_to_text(self, node: Any) -> str:
        if node.specials_chars == "&" and self._tables:
            return _CELL
        return super().specials_node_to_text(node)

    def math_node_to_text(self, node: Any) -> str:
        self._formulas += 1
        text = super().math_node_to_text(node)
        self._formulas -= 1
        return text

    def macro_node_to_text(self, node: Any) -> str:
        name = node.macroname
        arguments = (node.nodeargd and node.nodeargd.argnlist) or []
        if name in ("newcommand", "renewcommand", "providecommand") and arguments[2] is None:
            self._defined[arguments[1].latex_verbatim().strip("{}\\ ")] = arguments[4]
        if name in _UNSEEN:
            self.unseen += letters(node.latex_verbatim()) - letters(name)
            return ""
        if name in ("title", "author", "date"):
            self.head[name] = self.node_arg_to_text(node, 0)
            return ""
        if name == "maketitle":
            title, *rest = (self.head.get(key, "") for key in ("title", "author", "date"))
            return f"<h1>{title}</h1><p>{'<p>'.join(rest)}<p>"
        if name == "item":
            label = self._groupnodecontents_to_text(arguments[0]) if arguments else ""
            return f"<li>{label} "
        if name == "\\":
            return _ROW if self._tables else "<br>"
        if name in _RULES:
            return _RULE if self._tables else ""
        if name in ("multicolumn", "multirow"):
            number = decimal_number(self.node_arg_to_text(node, int(name == "multirow")).strip())
            text = self._groupnodecontents_to_text(arguments[-1])
            spans = (number or 1, 1) if name == "multicolumn" else (1, number or 1)
            return f"\x04{spans[0]} {spans[1]}\x04{text}"
        if (body := self._defined.get(name)) is not None and not self._expanding:
            self._expanding = True  # one level deep, so that no text grows beyond bounds
            text = self._groupnodecontents_to_text(body) + node.macro_post_space
            self._expanding = False
            return text
        text = super().macro_node_to_text(node)
        if not text:  # a command that pylatexenc leaves out, or does not know
            text = "".join(map(self._groupnodecontents_to_text, filter(None, arguments)))
        return text or (f"{name} " if self._formulas and name.isalpha() else "")

    def environment_node_to_text(self, node: Any) -> str:
        name = node.environmentname
        if name in _DRAWINGS:
            self.unseen += letters(node.latex_verbatim())
            return ""
        if name == "verbatim":
            open_end = "".join(inner.latex_verbatim() for inner in node.nodelist)
            code = node.nodeargd.verbatim_text if node.nodeargd else open_end
            return f"<pre>{html.escape(code)}</pre>"
        if name in _NAMED:
            arguments = (node.nodeargd and node.nodeargd.argnlist) or []
            label = "".join(map(self._groupnodecontents_to_text, arguments))
            return f"<div>{label} {self.nodelist_to_text(node.nodelist)}</div>"
        if name not in _TABLES:
            return super().environment_node_to_text(node)
        self._tables += 1
        content = self.nodelist_to_text(node.nodelist)
        self._tables -= 1
        return _table(content)


def _texts(nodes: Iterable[Any]) -> Iterator[str]:
    """All characters of a tree that a person sees."""
    stack = [*nodes]
    while stack:
        node = stack.pop()
        name = getattr(node, "macroname", "") or getattr(node, "environmentname", "")
        if node is None or name in _UNSEEN or name in _DRAWINGS:
            continue
        yield getattr(node, "chars", "")
        stack += getattr(node, "nodelist", None) or ()
        is_command = isinstance(node, latexwalker.LatexMacroNode) and name not in _PLACES
        if (is_command or name in _NAMED or name == "verbatim") and node.nodeargd:
            stack += node.nodeargd.argnlist or ()


def _table(content: str) -> str:
    """HTML of a table; its first row is its header if a rule follows."""
    rows = content.split(_ROW)
    has_header = len(rows) > 2 and rows[1].lstrip().startswith(_RULE)
    covered: dict[int, int] = {}  # column -> rows below that a cell covers
    lines = []
    for number, row in enumerate(rows):
        line, column = "<tr>", 0
        for cell in row.replace(_RULE, "").split(_CELL):
            span = _SPAN.search(cell)
            across, down = (int(span[1]), int(span[2])) if span else (1, 1)
            if covered.get(column, 0) and not cell.strip():
                covered[column] -= 1
            else:
                covered[column] = down - 1
                tag = "th" if has_header and number == 0 else "td"
                line += f"<{tag} colspan={across} rowspan={down}>{_SPAN.sub('', cell)}</{tag}>"
            column += across
        lines.append(line)
    return f"<table>{''.join(lines)}</table>"
