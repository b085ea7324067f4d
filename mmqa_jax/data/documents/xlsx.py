"""Excel's workbooks (.xlsx): what the cells of their visible sheets show.

Figures and dates are shown by the formats of their cells, formulas by the values that Excel kept.
"""

import bisect
import datetime
import decimal
import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any

from mmqa_jax.data.documents import office
from mmqa_jax.data.documents.document import Document, DocumentError, letters, one_line
from mmqa_jax.data.documents.office import MOST_CELLS, MOST_TEXT, attribute, number, shown_number

_REFERENCE = re.compile(r"([A-Z]{1,3})([0-9]{1,7})")
_COLUMNS = 2**14  # of a sheet
_COPY = "[Threaded comment]"  # what old programs are shown in place of a comment with replies
_TRUE = ("1", "true")


def read_xlsx(data: bytes) -> Document:
    """The rows of a workbook's sheets, whose names are headings, with their places (`Fees!A2:C2`).

    An empty row ends a table. Comments follow their rows; text boxes, charts and pictures their
    sheet. Hidden sheets, rows and columns are left out and counted.
    """
    return office.read(_Workbook, data, ".xlsx")


class _Workbook(office.Reading):
    """One reading of a workbook."""

    def __init__(self, package: office.Package) -> None:
        super().__init__(package)
        self._cells = self._cell_characters = 0
        main = package.main()
        self._root, self.related = package.xml(main), package.related(main)
        parts = {kind: package.xml(part) for kind, part in self.targets("sharedStrings", "styles")}
        self._strings = [_text(item) for item in parts.get("sharedStrings", ())]
        self._formats = _formats(parts["styles"]) if "styles" in parts else []
        properties = self._root.iterfind("workbookPr")
        self._from_1904 = any(attribute(about, "date1904") in _TRUE for about in properties)

    def read(self) -> Document:
        for sheet in self._root.iterfind("sheets/*"):
            name, workbook = sheet.get("name", ""), self.related
            if not (part := self.target(sheet, "id")):
                raise DocumentError(f"no .xlsx that can be read: sheet {name!r} is not in the file")
            self.related = self.package.related(part)
            self._sheet(name, part, sheet.get("state", "visible"))
            self.related = workbook
        self.set_title(self.package.title())
        return self.document()

    def _sheet(self, name: str, part: str, state: str) -> None:
        rows, merged, hidden = self._rows(part)
        count = sum(letters(text) for cells in rows.values() for text in cells.values())
        self.held += count
        if state != "visible":
            self.left_out["hidden sheets"] += count
            return
        self.part(name)
        self.held += letters(name)
        for row in hidden & rows.keys():
            self.left_out["hidden rows"] += sum(map(letters, rows.pop(row).values()))
        self._merge(rows, merged)
        self.sheet(name, rows, self._comments())
        for _, drawing in self.targets("drawing"):
            root, self.related = self.package.xml(drawing), self.package.related(drawing)
            self.held += office.held_letters(root, "t")
            self.shapes(root)

    def _rows(self, part: str) -> tuple[dict[int, dict[int, str]], list[str], set[int]]:
        """Row, from 1 -> column, from 0 -> what the cell shows; merged areas; hidden rows."""
        from lxml import etree

        rows: dict[int, dict[int, str]] = {}
        merged: list[str] = []
        hidden: set[int] = set()
        hidden_columns = bytearray(_COLUMNS)
        row = 0
        tags = ("{*}row", "{*}mergeCell", "{*}col")
        with self.package.open(part) as file:
            for _, element in etree.iterparse(file, tag=tags, **office.PARSING):
                if element.tag.endswith("mergeCell"):
                    merged.append(element.get("ref", ""))
                elif element.tag.endswith("col"):
                    if element.get("hidden") in _TRUE:
                        first = max(0, number(element.get("min", "")) - 1)
                        last = min(number(element.get("max", "")), _COLUMNS)
                        hidden_columns[first:last] = bytes([1]) * (last - first)
                else:
                    row = number(element.get("r", ""), row + 1)
                    cells = dict(self._shown(element))
                    for column in [c for c in cells if c < _COLUMNS and hidden_columns[c]]:
                        count = letters(cells.pop(column))
                        self.held += count
                        self.left_out["hidden columns"] += count
                    if any(cells.values()):
                        rows[row] = cells
                    if element.get("hidden") in _TRUE:
                        hidden.add(row)
                element.clear()
                while element.getprevious() is not None:
                    del element.getparent()[0]
        return rows, merged, hidden

    def _shown(self, row: Any) -> Iterator[tuple[int, str]]:
        """The columns of a row's cells, and what they show."""
        column = -1
        for cell in row:
            place = _REFERENCE.fullmatch(cell.get("r", ""))
            column = column_number(place[1]) if place else column + 1
            if text := self._cell(cell):
                self._count(1)
                self._cell_characters += len(text)
                if self._cell_characters > MOST_TEXT:
                    raise DocumentError(f"says more than {MOST_TEXT:,} characters; split it")
                yield column, text

    def _count(self, cells: int) -> None:
        self._cells += cells
        if self._cells > MOST_CELLS:
            raise DocumentError(f"more than {MOST_CELLS:,} cells; split it")

    def _cell(self, cell: Any) -> str:
        kind, text = cell.get("t", "n"), cell.findtext("{*}v") or ""
        if kind == "s":
            place = number(text, len(self._strings))
            return self._strings[place] if place < len(self._strings) else ""
        if kind == "inlineStr":
            return _text(cell.find("{*}is"))
        if kind == "b":
            return {"1": "TRUE", "0": "FALSE"}.get(text, text)
        if not text:
            count = letters(cell.findtext("{*}f") or "")
            self.held += count
            self.left_out["formulas without a value"] += count
            return ""
        if kind != "n":  # text of a formula, an error, a date in words
            return one_line(text)
        style = number(cell.get("s", ""))
        code = self._formats[style] if style < len(self._formats) else ""
        return one_line(shown_by(text, code, self._from_1904))

    def _merge(self, rows: dict[int, dict[int, str]], areas: Sequence[str]) -> None:
        """Repeats the text of merged cells in each row that they cover and that is not empty."""
        numbers = sorted(rows)
        for area in areas:
            ends = [_REFERENCE.fullmatch(end) for end in area.split(":")]
            if len(ends) != 2 or ends[0] is None or ends[1] is None:
                continue
            column, first, last = column_number(ends[0][1]), int(ends[0][2]), int(ends[1][2])
            text = rows.get(first, {}).get(column, "")
            covered = numbers[bisect.bisect(numbers, first) : bisect.bisect(numbers, last)]
            self._count(len(covered))
            for row in covered if text else ():
                rows[row][column] = self.merged(text, rows[row].get(column, ""))

    def _comments(self) -> office.Beside:
        """Returns a function that adds the comments of the sheet being read."""
        comments: office.Beside = {}
        for _, part in self.targets("comments", "threadedComment"):
            for comment in self.package.xml(part).iter("comment", "threadedComment"):
                place, text = (
                    _REFERENCE.fullmatch(comment.get("ref", "")),
                    _text(comment.find("text")),
                )
                if place and not text.startswith(_COPY):
                    add = functools.partial(self.hold, text)
                    comments.setdefault(int(place[2]), []).append((column_number(place[1]), add))
        return comments


def _text(item: Any) -> str:
    """The text of a string, without the readings that stand above its characters."""
    if item is None:
        return ""
    if item.tag == "text" and not len(item):
        return one_line(item.text or "")
    pieces = (e.text or "" for e in item.iter("{*}t") if not e.getparent().tag.endswith("rPh"))
    return one_line("".join(pieces))


def column_number(name: str) -> int:
    """A column's number, from 0, by its letters."""
    value = 0
    for letter in name:
        value = 26 * value + ord(letter) - ord("A") + 1
    return value - 1


# Formats of numbers (ECMA-376, part 1, 18.8.30 and 18.8.31)

# Those that files name by number. Where Excel follows the user's country, dates are written as
# ISO 8601 has them: no file says which country that is.
_BUILT_IN = {
    1: "0", 2: "0.00", 3: "#,##0", 4: "#,##0.00", 9: "0%", 10: "0.00%", 11: "0.00E+00",
    14: "yyyy-mm-dd", 15: "d-mmm-yy", 16: "d-mmm", 17: "mmm-yy", 18: "h:mm AM/PM",
    19: "h:mm:ss AM/PM", 20: "h:mm", 21: "h:mm:ss", 22: "yyyy-mm-dd h:mm", 37: "#,##0;(#,##0)",
    38: "#,##0;(#,##0)", 39: "#,##0.00;(#,##0.00)", 40: "#,##0.00;(#,##0.00)", 45: "mm:ss",
    46: "[h]:mm:ss", 47: "mm:ss.0", 48: "##0.0E+0",
}  # fmt: skip
# Repetitions end at the longest code, so that no code takes long.
_TOKEN = re.compile(
    r'"(?P<quoted>[^"]{0,255}+)"|\\(?P<escaped>.)|[_*].'
    r"|\[\$(?P<currency>[^\]-]{0,255}+)[^\]]{0,255}+\]"
    r"|\[(?P<elapsed>h+|m+|s+)\]|\[[^\]]{0,255}+\]"
    r"|(?P<date>AM/PM|A/P|y+|m+|d+|h+|s+(?:\.0+)?)"
    r"|(?P<figure>general|,{0,99}+[0#?][0#?,]*+(?:\.[0#?]*+,*+)?(?:E[+-]?[0#?]++)?|\.[0#?]++)"
    r"|(?P<plain>.)",
    re.IGNORECASE | re.DOTALL,
)
_SECTION = re.compile(r'(?:"[^"]{0,255}+"|\\.|\[[^\]]{0,255}+\]|[^;])*;?', re.DOTALL)
_CONDITION = re.compile(r"\[(<=|>=|<>|<|>|=)(-?[0-9.]+)\]")
_LONGEST_CODE = 255  # of a format, as Excel has it
_DAYS_TO_1904 = 1462
_DAYS = 2_958_466  # of dates: up to the year 9999
_PRECISE = decimal.Context(prec=400, rounding=decimal.ROUND_HALF_UP)


def _formats(styles: Any) -> list[str]:
    """The formats of cells by the number of their style."""
    codes = dict(_BUILT_IN)
    for element in styles.iter("numFmt"):
        codes[number(element.get("numFmtId", ""))] = element.get("formatCode", "")
    ids = [number(style.get("numFmtId", "")) for style in styles.iterfind("cellXfs/*")]
    return [codes.get(identity, "") for identity in ids]


def shown_by(text: str, code: str, from_1904: bool = False) -> str:
    """Returns what a cell shows of a figure by the code of its format; without one, the figure.

    Args:
      text: as the file holds it: 0.25, or 45356 for a date.
      code: `0%`, `yyyy-mm-dd`, `#,##0.00;[Red]-#,##0.00`; fractions are shown as decimals.
      from_1904: whether days are counted from 1904, as on old Macintoshes.
    """
    if not code or len(code) > _LONGEST_CODE:
        return shown_number(text)
    try:
        return _shown_by(float(text), code, from_1904)
    except (ValueError, ArithmeticError):  # no number, or one beyond all bounds
        return shown_number(text)


def _shown_by(value: float, code: str, from_1904: bool) -> str:
    text = repr(value)
    section, value = _section(code, value)
    tokens = [
        ("figure", "General") if token == "@" and kind == "plain" else (kind, token)
        for kind, token in ((match.lastgroup, match[match.lastgroup])
                            for match in _TOKEN.finditer(section) if match.lastgroup)
    ]  # fmt: skip
    kinds = [kind for kind, _ in tokens]
    if "date" in kinds or "elapsed" in kinds:
        days = value + (_DAYS_TO_1904 if from_1904 else 0)
        return _date(days, tokens) if 0 <= days < _DAYS else shown_number(text)
    figures = [token for kind, token in tokens if kind == "figure"]
    if "/" in section and len(figures) > 1:  # a fraction
        return shown_number(text)
    percents = sum(token == "%" for _, token in tokens)
    pieces = iter(_figures(abs(value) * 100**percents, figures))
    whole = "".join(next(pieces) if kind == "figure" else token for kind, token in tokens)
    return f"-{whole}" if value < 0 and any(digit in whole for digit in "123456789") else whole


def _figures(value: float, patterns: Sequence[str]) -> list[str]:
    """The digits for each pattern of a format; several share the digits of one number."""
    if len(patterns) < 2:
        return [_figure(value, pattern) for pattern in patterns]
    digits = _figure(value, "0" * sum(map(len, patterns)))
    groups: list[str] = []
    for pattern in reversed(patterns[1:]):
        groups.insert(0, digits[-len(pattern) :])
        digits = digits[: -len(pattern)]
    return [digits, *groups]


def _section(code: str, value: float) -> tuple[str, float]:
    """The part of a format that is for a value, and the value that it shows."""
    sections = [match[0].removesuffix(";") for match in _SECTION.finditer(code) if match[0]][:3]
    conditions = [_CONDITION.search(section) for section in sections]
    for section, condition in zip(sections, conditions, strict=True):
        if condition is not None:
            sign, bound = condition[1], float(condition[2])
            signs = "=" if value == bound else "<" if value < bound else ">"
            if signs in sign:
                return section, value
    if any(conditions):
        return next((s for s, c in zip(sections, conditions, strict=True) if not c), "0"), value
    if len(sections) > 2 and value == 0:
        return sections[2], value
    if len(sections) > 1 and value < 0:
        return sections[1], -value
    return (sections or [""])[0], value


def _figure(value: float, pattern: str) -> str:
    """A figure by its pattern: `#,##0.00`, `0.0E+0`; commas at the end divide by a thousand."""
    if pattern.lower() == "general":
        return shown_number(repr(value))
    pattern, _, exponent = pattern.upper().partition("E")
    thousands = len(pattern) - len(pattern.rstrip(","))
    whole, _, decimals = pattern.rstrip(",").partition(".")
    least, most = decimals.count("0"), len(decimals)
    if exponent:
        mantissa, power = f"{value:.{most}E}".split("E")
        sign = power[0] if power[0] == "-" or "+" in exponent else ""
        return f"{mantissa}E{sign}{int(power[1:]):0{exponent.count('0')}d}"
    exact = decimal.Decimal(repr(value)).scaleb(-3 * thousands, _PRECISE)
    rounded = exact.quantize(decimal.Decimal(1).scaleb(-most), context=_PRECISE)
    front, _, back = f"{rounded:{',' if ',' in whole else ''}.{most}f}".partition(".")
    while len(back) > least and back.endswith("0"):
        back = back[:-1]
    front = front.rjust(whole.count("0"), "0") if "0" in whole else front.lstrip("0")
    return f"{front}.{back}" if back else front


def _date(days: float, tokens: Sequence[tuple[str, str]]) -> str:
    """A date or time by its format; days are counted as Excel counts them, from 1900."""
    parts = "".join(token.lower() for kind, token in tokens if kind in ("date", "elapsed"))
    digits = next((len(t) - t.index(".") - 1 for k, t in tokens if k == "date" and "." in t), 0)
    seconds = round(days * 86_400, min(digits, 3))
    # Excel takes 1900 for a leap year: its days before March 1900 are one less than they should be.
    start = datetime.datetime(1899, 12, 30) + datetime.timedelta(days=int(days < 60))
    time = start + datetime.timedelta(seconds=seconds)
    hour = (time.hour - 1) % 12 + 1 if "am/pm" in parts or "a/p" in parts else time.hour
    pieces = []
    for place, (kind, token) in enumerate(tokens):
        name = token.lower()
        if kind == "elapsed":
            unit = {"h": 3600, "m": 60, "s": 1}[name[0]]
            pieces.append(f"{int(seconds // unit):0{len(name)}d}")
        elif kind != "date":
            pieces.append(token)
        elif name in ("am/pm", "a/p"):
            pieces.append(token.split("/")[time.hour >= 12])
        elif name[0] in "hs" or (name[0] == "m" and _is_minute(place, tokens)):
            figure = {"h": hour, "m": time.minute, "s": time.second}[name[0]]
            pieces.append(f"{figure:0{min(name.count(name[0]), 2)}d}")
            if name[0] == "s" and digits:
                pieces.append(f".{time.microsecond:06d}"[: digits + 1])
        else:
            forms = {
                "y": (f"{time:%y}", f"{time:%y}", f"{time:%Y}"),
                "m": (str(time.month), f"{time:%m}", f"{time:%b}", f"{time:%B}", f"{time:%b}"[0]),
                "d": (str(time.day), f"{time:%d}", f"{time:%a}", f"{time:%A}"),
            }[name[0]]
            pieces.append(forms[min(len(name), len(forms)) - 1])
    return "".join(pieces)


def _is_minute(place: int, tokens: Sequence[tuple[str, str]]) -> bool:
    """Tells whether an `m` means minutes: behind hours or before seconds."""
    before = [token for kind, token in tokens[:place] if kind in ("date", "elapsed")]
    behind = [token for kind, token in tokens[place + 1 :] if kind in ("date", "elapsed")]
    return (bool(before) and before[-1][0] in "hH") or (bool(behind) and behind[0][0] in "sS")
