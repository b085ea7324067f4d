"""Texts: plain, code, Markdown by pyromark, reStructuredText by docutils, JSON, Jupyter's
notebooks, tables of values divided by commas, semicolons, tabs or bars (.csv, .tsv); and mails.

Markdown and reStructuredText become HTML, of which a person's view is read (html.Page).
"""

from __future__ import annotations

import codecs
import csv
import email
import email.policy
import html
import io
import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from email.message import EmailMessage
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import ONE_A_LINE, parse_json
from mmqa_jax.data.documents import document
from mmqa_jax.data.documents.document import DocumentError, decoded, letters, one_line
from mmqa_jax.data.documents.html import Page, parsed
from mmqa_jax.data.documents.office import MOST_CELLS, Reading

_LONGEST_LINE = 400  # characters of code that people write
_DEEPEST_KEY = 8  # a key of JSON that is nested deeper stands in the text and is no heading
_MOST_FRONT_MATTER = 2**16  # characters
_DIRECTIVE = re.compile(r"^[ \t]*+\.\. (?:\|[^|\n]*+\| )?([\w:.+-]{1,80})::", re.MULTILINE)
_ROLE = re.compile(r":([\w:.+-]{1,80}):`|`:([\w:.+-]{1,80}):")
# Tabs and semicolons first: commas stand in figures and sentences, too.
_DELIMITERS = "\t;|,"
_SAMPLE = 2**16  # characters by which the delimiter is chosen
_LONGEST_VALUE = 2**17  # characters, as the csv module bounds it
_STATED = re.compile(r"sep=(.)\n")  # Excel's own first line
_TERMINAL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # colors of a notebook's tracebacks


def read_plain(data: bytes) -> document.Document:
    """A UTF-8 text."""
    page, text = Page(), decoded(data)
    page.held += letters(one_line(text))
    page.add_text(text)
    return page.document()


def read_code(data: bytes) -> document.Document:
    """Lines of a program or of settings, each with its number and its indentation."""
    page, text = Page(), decoded(data)
    for number, line in enumerate(text.expandtabs(4).split("\n"), start=1):
        words = one_line(line)
        page.held += letters(words)
        if words:
            written = " " * (len(line) - len(line.lstrip())) + words
            place = document.Place(0, len(written), line=number)
            # What a program has written on one line for programs is cut as a text is.
            page.add(written, is_row=len(written) <= _LONGEST_LINE, places=(place,))
    return page.document()


def read_markdown(data: bytes) -> document.Document:
    """A UTF-8 text in CommonMark with GitHub's tables, footnotes, Obsidian's links and HTML.

    The title is that of the front matter (YAML, or TOML between +++), of which nothing else is
    read.
    """
    page = Page()
    _add_markdown(page, decoded(data))
    return page.document()


def read_rst(data: bytes) -> document.Document:
    """A UTF-8 text in reStructuredText; no file is included, and directives of Sphinx are read."""
    import docutils.core
    import docutils.utils
    from docutils import nodes

    text = decoded(data)
    _admit_names(text)
    settings = {
        "_disable_config": True,
        "file_insertion_enabled": False,
        "raw_enabled": False,
        "halt_level": 6,  # never
        "report_level": 3,  # errors, which hold the text that is one
        "warning_stream": False,
        "embed_stylesheet": False,
        "syntax_highlight": "none",
        "math_output": "LaTeX",
        "output_encoding": "unicode",
    }
    page, errors = Page(), (docutils.utils.SystemMessage, ValueError, LookupError)
    with document.naming_damage("reStructuredText", *errors):
        tree = docutils.core.publish_doctree(text, settings_overrides=settings)
        for message in list(tree.findall(nodes.system_message)):
            blocks = [block.deepcopy() for block in message.findall(nodes.literal_block)]
            message.parent.replace(message, blocks)
        tree.transform_messages = []  # which name what stands in the text all the same
        tree.setdefault("title", " ")  # else the file's name, which is none here
        markup = docutils.core.publish_from_doctree(
            tree, writer="html5", settings_overrides=settings
        )
    page.add_markup(markup)
    return page.document()


def read_json(data: bytes) -> document.Document:
    """A value of JSON: `key: value` of each object in a line, below the keys that lead to it."""
    page = Page()
    _add_json(page, _json(decoded(data)))
    return page.document()


def read_json_lines(data: bytes) -> document.Document:
    """Values of JSON, one a line."""
    page = Page()
    for number, line in enumerate(decoded(data).split("\n"), start=1):
        if line.strip():
            _add_json(page, _json(line, f"line {number}", remedy=ONE_A_LINE))
    return page.document()


def read_notebook(data: bytes) -> document.Document:
    """A notebook's Markdown, code, and what its code wrote and drew."""
    import nbformat

    page = Page()
    with document.naming_damage("notebook", Exception):  # nbformat raises errors of many kinds
        notebook = nbformat.reads(decoded(data), as_version=4)
        page.set_title(str(notebook.metadata.get("title", "")))
        for cell in notebook.cells:
            _add_cell(page, cell)
    return page.document()


def _add_markdown(page: Page, text: str) -> None:
    import pyromark

    kinds = pyromark.Options
    options = (
        kinds.ENABLE_TABLES
        | kinds.ENABLE_FOOTNOTES
        | kinds.ENABLE_STRIKETHROUGH
        | kinds.ENABLE_TASKLISTS
        | kinds.ENABLE_DEFINITION_LIST
        | kinds.ENABLE_HEADING_ATTRIBUTES
        | kinds.ENABLE_MATH
        | kinds.ENABLE_WIKILINKS
    )
    # It would take what stands between two rules further below for front matter as well.
    front = kinds.ENABLE_YAML_STYLE_METADATA_BLOCKS | kinds.ENABLE_PLUSES_DELIMITED_METADATA_BLOCKS
    begins = text.startswith(("---", "+++"))
    kind = ""
    for event, place in pyromark.events_with_range(text, options=front) if begins else ():
        if "Start" in event:
            kind = event["Start"].get("MetadataBlock") if isinstance(event["Start"], dict) else None
            if not kind:
                break
        elif "Text" in event:
            title = _front_title(kind, event["Text"])
            page.set_title(title)
            page.add_left_out("front matter", letters(event["Text"]) - letters(title))
        else:
            text = text.encode()[place["end"] :].decode()  # places are bytes
            break
    page.add_markup(pyromark.html(text, options=options))


def _front_title(kind: str, text: str) -> str:
    """The title that front matter states; "" where it states none, or is damaged."""
    import yaml

    read = tomllib.loads if kind == "PlusesStyle" else yaml.safe_load
    try:
        fields = read(text) if len(text) <= _MOST_FRONT_MATTER else None
    except (yaml.YAMLError, ValueError, RecursionError):
        return ""
    title = fields.get("title") if isinstance(fields, Mapping) else None
    return one_line(title) if isinstance(title, str) else ""


def _admit_names(text: str) -> None:
    """Lets docutils read directives and roles that are not its own (Sphinx's) as their text.

    Its parser knows no other way than its tables of names.
    """
    from docutils import nodes
    from docutils.parsers.rst import Directive, directives, roles
    from docutils.parsers.rst.languages import en

    class AnyOption(dict):
        def __bool__(self) -> bool:
            return True

        def __missing__(self, name: str):
            return lambda argument: argument or ""

    class AnyDirective(Directive):
        """A directive of any name, which keeps its first line, its options and its content."""

        optional_arguments, final_argument_whitespace, has_content = 1, True, True
        option_spec = AnyOption()

        def run(self) -> list[nodes.Node]:
            container = nodes.container()
            for words in filter(None, (*self.arguments, *self.options.values())):
                container += nodes.paragraph("", "", nodes.Text(words))
            self.state.nested_parse(self.content, self.content_offset, container)
            return [container]

    def any_role(name, rawtext, text, line, inliner, options=None, content=None):
        return [nodes.inline(rawtext, nodes.unescape(text))], []

    for name in _DIRECTIVE.findall(text):
        if name.lower() not in en.directives or name.lower() == "raw":
            directives.register_directive(name.lower(), AnyDirective)
    for names in _ROLE.findall(text):
        name = "".join(names).lower()
        if name not in en.roles:
            roles.register_local_role(name, any_role)


def _json(text: str, place: str = "", remedy: str | None = None) -> Any:
    try:
        if remedy is not None:
            return parse_json(text, place, remedy=remedy, unique_keys=True)
        return parse_json(text, "the text", line=1, unique_keys=True)
    except UserError as error:
        raise DocumentError(str(error).rstrip(".")) from error


def _add_json(page: Page, value: Any) -> None:
    """Adds a value and all below it, in their order."""
    page.held += sum(map(letters, _strings(value)))
    stack: list[tuple[int, str, Any]] = [(0, "", value)]
    while stack:
        depth, key, value = stack.pop()
        if not isinstance(value, (dict, list)):
            page.add_text(f"{key}: {_scalar(value)}" if key else _scalar(value))
            continue
        if key and depth <= _DEEPEST_KEY:
            page.enter(depth, one_line(key))
        elif key:
            page.add_text(key)
        items = value.items() if isinstance(value, dict) else (("", item) for item in value)
        scalars, below = [], []
        for name, item in items:
            leaves = item if isinstance(item, list) else [item]
            if any(isinstance(leaf, (dict, list)) for leaf in leaves):
                below.append((depth + bool(name), name, item))
            else:
                text = ", ".join(map(_scalar, leaves))
                scalars.append(f"{one_line(name)}: {text}" if name else text)
        page.add_text("; ".join(scalars))
        stack += reversed(below)


def _strings(value: Any) -> Iterator[str]:
    """All keys and leaves of a value."""
    stack = [value]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            yield from map(one_line, value)
            stack += value.values()
        elif isinstance(value, list):
            stack += value
        else:
            yield one_line(_scalar(value))


def _scalar(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _add_cell(page: Page, cell: Mapping[str, Any]) -> None:
    if cell["cell_type"] == "markdown":
        source = cell["source"]
        for name, forms in cell.get("attachments", {}).items():
            for kind, encoded in forms.items():
                source = source.replace(f"(attachment:{name})", f"(data:{kind};base64,{encoded})")
        _add_markdown(page, source)
        return
    page.add_markup(f"<pre>{html.escape(cell['source'])}</pre>")
    for output in cell.get("outputs", ()):
        forms = output.get("data", {})
        text = _TERMINAL.sub("", output.get("text") or "\n".join(output.get("traceback", ())))
        error = f"{output.get('ename', '')}: {output.get('evalue', '')}".removesuffix(": ")
        if output["output_type"] == "error" and error not in text:
            text = f"{error}\n{text}"
        plain = one_line(forms.get("text/plain", ""))
        if markup := forms.get("text/html") or forms.get("image/svg+xml"):
            page.add_markup(markup)
        elif "text/markdown" in forms:
            _add_markdown(page, forms["text/markdown"])
        elif picture := next((kind for kind in forms if kind.startswith("image/")), ""):
            page.add_picture("", f"data:{picture};base64,{forms[picture]}")
        else:
            text, plain = text or plain, ""
        page.add_left_out("outputs in another form", letters(plain))
        if text:
            page.add_markup(f"<pre>{html.escape(text)}</pre>")


# Tables of values


def read_delimited(data: bytes, delimiter: str = "") -> document.Document:
    """The rows of a table, with their places as a spreadsheet names them (`A2:C2`).

    The text is UTF-8, or UTF-16 with its mark, as Excel writes "Unicode text".

    `delimiter`: between values; "": the one by which most lines have equally many values.
    """
    is_utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        text = decoded(data.decode("utf-16").encode() if is_utf16 else data)
    except UnicodeDecodeError as error:
        raise DocumentError("its UTF-16 is damaged; save the file as UTF-8") from error
    reading = Reading()
    reading.held = letters(one_line(text))
    if stated := _STATED.match(text):
        delimiter = stated[1]
        reading.left_out["names of delimiters"] = letters("sep")
        text = "\n" + text[stated.end() :]  # rows keep their numbers
    rows: dict[int, dict[int, str]] = {}
    for number, values in enumerate(_records(text, delimiter or _delimiter(text)), start=1):
        row = {column: one_line(value) for column, value in enumerate(values) if value.strip()}
        if any(row.values()):
            rows[number] = row
    reading.sheet("", rows, {})
    return reading.document()


def _records(text: str, delimiter: str) -> list[list[str]]:
    """The values of each line; quotation marks are letters where they do not come in pairs."""
    csv.field_size_limit(_LONGEST_VALUE)  # of the module, for all: others may have raised it
    for quoting in (csv.QUOTE_MINIMAL, csv.QUOTE_NONE):
        records, cells = [], 0
        try:
            for values in csv.reader(io.StringIO(text, ""), delimiter=delimiter, quoting=quoting):
                cells += len(values)
                if cells > MOST_CELLS:
                    raise DocumentError(f"more than {MOST_CELLS:,} cells; split it")
                records.append(values)
            return records
        except csv.Error as error:
            reason = one_line(str(error))
    raise DocumentError(f"no table of values that can be read ({reason})")


def _delimiter(text: str) -> str:
    """The delimiter by which most lines at the beginning have equally many values, above one."""
    sample = text[:_SAMPLE]

    def score(delimiter: str) -> tuple[int, int]:
        counts = Counter(len(values) for values in _records(sample, delimiter))
        return max(((lines, count) for count, lines in counts.items() if count > 1), default=(0, 0))

    return max(_DELIMITERS, key=score)


# Mails: .eml by the standard library, Outlook's .msg by python-oxmsg; bodies as HTML
# (html.Page).


_HEADERS = ("From", "To", "Cc", "Date")
_OTHER_FORM = "the same text in another form"


def read_eml(data: bytes) -> document.Document:
    """Reads subject, sender, date and text of a mail, and of the mails that it forwards."""
    page = Page()
    with document.naming_damage("mail"):
        message = email.message_from_bytes(data, policy=email.policy.default)
        if not any(message.get(name) for name in (*_HEADERS, "Subject", "Received", "Message-ID")):
            raise DocumentError("no mail: it has no header of one")
        page.set_title(_header(message, "Subject"))
        _add_mail(page, message, 1)
    return page.document()


def read_msg(data: bytes) -> document.Document:
    """A mail of Outlook's."""
    import oxmsg
    from oxmsg.domain import constants

    page = Page()
    # python-oxmsg and olefile raise errors of many kinds.
    with document.naming_damage("mail of Outlook's", Exception):
        message = oxmsg.Message.load(data)
        properties = message.properties
        page.set_title(message.subject or "")
        fields = {
            "From": message.sender or properties.str_prop_value(constants.PID_SENDER_NAME),
            "To": properties.str_prop_value(constants.PID_DISPLAY_TO),
            "Cc": properties.str_prop_value(constants.PID_DISPLAY_CC),
            "Date": message.sent_date,
        }
        _add_head(page, 1, message.subject or "", {k: str(v or "") for k, v in fields.items()})
        plain = message.body or ""
        if markup := properties.binary_prop_value(constants.PID_HTML):
            page.add_bytes(markup, properties.body_encoding)
        elif markup := properties.str_prop_value(constants.PID_BODY_HTML):
            page.add_markup(markup)
        else:
            _add_plain(page, plain)
        page.add_left_out(_OTHER_FORM, letters(one_line(plain)) if markup else 0)
        for attachment in message.attachments:
            name = attachment.file_name or attachment.properties.str_prop_value(
                constants.PID_DISPLAY_NAME
            )
            is_picture = (attachment.mime_type or "").startswith("image/")
            _add_attachment(page, name or "", attachment.file_bytes if is_picture else None)
    return page.document()


def _add_mail(page: Page, message: EmailMessage, level: int) -> None:
    fields = {name: _header(message, name) for name in _HEADERS}
    _add_head(page, level, _header(message, "Subject"), fields)
    pictures = {
        f"cid:{str(part['Content-ID']).strip(' <>')}": part
        for part in message.walk()
        if part["Content-ID"] and part.get_content_maintype() == "image"
    }
    page.open_link = lambda link: _bytes(pictures[link]) if link in pictures else None
    _add_part(page, message, level)


def _add_part(page: Page, part: EmailMessage, level: int) -> None:
    """Adds a part of a mail and the parts in it."""
    kind = part.get_content_type()
    parts = part.get_payload() if part.is_multipart() else []
    if kind == "multipart/alternative" and parts:
        forms = [{p.get_content_type() for p in form.walk()} for form in parts]
        richest = max(range(len(parts)), key=lambda n: ("text/html" in forms[n],
                                                        "text/plain" in forms[n], n))  # fmt: skip
        _add_part(page, parts[richest], level)
        for form in (*parts[:richest], *parts[richest + 1 :]):
            texts = [_text(p) for p in form.walk() if p.get_content_type() == "text/plain"]
            page.add_left_out(_OTHER_FORM, sum(letters(one_line(text)) for text in texts))
    elif kind == "message/rfc822":
        for mail in parts:
            _add_mail(page, mail, level + 1)
    elif parts:
        for each in parts:
            _add_part(page, each, level)
    elif part.get_content_maintype() not in ("text", "multipart") or part.is_attachment():
        is_shown = part.get_content_maintype() == "image" and not part["Content-ID"]
        _add_attachment(page, part.get_filename() or "", _bytes(part) if is_shown else None)
    elif kind == "text/html":
        page.add_bytes(_bytes(part), part.get_content_charset())
    else:
        _add_plain(page, _text(part))


def _add_head(page: Page, level: int, subject: str, fields: dict[str, str]) -> None:
    line = "; ".join(f"{name}: {one_line(value)}" for name, value in fields.items() if value)
    page.held += letters(one_line(subject))
    page.enter(level, one_line(subject))
    _add_plain(page, line)


def _add_plain(page: Page, text: str) -> None:
    page.held += letters(one_line(text))
    page.add_text(text)


def _add_attachment(page: Page, name: str, picture: bytes | None) -> None:
    if picture is not None:
        page.hold_figure(one_line(name), picture)
    elif name:
        _add_plain(page, f"Attachment: {one_line(name)}")


def _header(message: EmailMessage, name: str) -> str:
    try:
        return one_line(str(message.get(name) or ""))
    except Exception:  # the standard library's parser of headers raises errors of many kinds
        return ""


def _bytes(part: EmailMessage) -> bytes:
    return part.get_payload(decode=True) or b""


def _text(part: Any) -> str:
    """Returns a part's plain text in the encoding that it states, if browsers know it."""
    return parsed(b"<plaintext>" + _bytes(part), part.get_content_charset()).text
