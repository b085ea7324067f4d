"""Small documents for tests: PDF written by hand, Word's by python-docx, pictures by Pillow."""

import io
import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence

from PIL import Image


def picture(color: str = "red", size: tuple[int, int] = (96, 80), form: str = "PNG") -> bytes:
    """A picture of one color."""
    packed = io.BytesIO()
    Image.new("RGB", size, color).save(packed, form)
    return packed.getvalue()


def huge_png(side: int) -> bytes:
    """A PNG that claims so many black pixels a side, in few bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    pixels = zlib.compress(bytes(1000))
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    )


def pdf(
    pages: Sequence[Sequence[tuple[float, float, str]]],
    pictures: dict[int, tuple[float, bytes]] | None = None,
    encrypted: bool = False,
    box: str = "0 0 612 792",
) -> bytes:
    """A PDF in Helvetica.

    Args:
      pages: of each page its lines: size of the letters, height of the foot, both in points (the
        page has 792), and the text.
      pictures: page (from 0) -> height of the foot, and a JPEG that is shown 200 points wide.
      encrypted: claims to be.
      box: what is seen of every page: left, foot, right and top in points.
    """
    pictures = pictures or {}
    objects: list[bytes] = [b"", b"", b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"]
    kids = []
    for number, lines in enumerate(pages):
        drawn = b"".join(
            f"BT /F {size} Tf 72 {foot} Td ({text}) Tj ET\n".encode() for size, foot, text in lines
        )
        images = b""
        if number in pictures:
            foot, jpeg = pictures[number]
            width, height = Image.open(io.BytesIO(jpeg)).size
            about = f"/Type /XObject /Subtype /Image /Width {width} /Height {height}"
            about += " /ColorSpace /DeviceRGB /BitsPerComponent 8 /Filter /DCTDecode"
            objects.append(_stream(about, jpeg))
            images = b"/XObject << /I %d 0 R >>" % len(objects)
            drawn += b"q 200 0 0 150 72 %d cm /I Do Q\n" % foot
        objects.append(_stream("", drawn))
        content = len(objects)
        objects.append(
            b"<< /Type /Page /Parent 2 0 R /MediaBox [%s] /Contents %d 0 R "
            b"/Resources << /Font << /F 3 0 R >> %s >> >>" % (box.encode(), content, images)
        )
        kids.append(b"%d 0 R" % len(objects))
    objects[0] = b"<< /Type /Catalog /Pages 2 0 R >>"
    objects[1] = b"<< /Type /Pages /Count %d /Kids [%s] >>" % (len(kids), b" ".join(kids))
    trailer = b"/Root 1 0 R"
    if encrypted:
        objects.append(
            b"<< /Filter /Standard /V 1 /R 2 /P -4 /O <%s> /U <%s> >>" % (b"41" * 32, b"42" * 32)
        )
        trailer += b" /Encrypt %d 0 R /ID [<%s> <%s>]" % (len(objects), b"00" * 16, b"00" * 16)
    return _with_table(objects, trailer)


def pdf_of(
    pages: Sequence[tuple[str, str]],
    rotation: int = 0,
    picture: bytes | None = None,
    is_form: bool = False,
    unicode: Mapping[str, str] | None = None,
) -> bytes:
    """A PDF of letter size, of its operators.

    Args:
      pages: content, in which the font F is Helvetica and I the picture, and annotations by line.
      rotation: clockwise, in degrees, of every page as it is shown.
      picture: a JPEG.
      is_form: the annotations are fields of a form.
      unicode: letter of the font -> the character that it stands for, where that is another one.
    """
    maps = "".join(f"<{ord(a):02x}> <{ord(b):04x}>\n" for a, b in (unicode or {}).items())
    maps = f"begincmap\n1 begincodespacerange <00> <ff> endcodespacerange\n{len(unicode or ())} beginbfchar\n{maps}endbfchar\nendcmap"
    font = "<< /Type /Font /Subtype /Type1 /BaseFont /Courier /FirstChar 32 /LastChar 126"
    font += f" /Widths [{'600 ' * 95}] /ToUnicode 5 0 R >>"
    plain = "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"
    objects = [b"", b"", (font if unicode else plain).encode(), b"null", _stream("", maps.encode())]
    if picture:
        width, height = Image.open(io.BytesIO(picture)).size
        about = f"/Type /XObject /Subtype /Image /Width {width} /Height {height}"
        about += " /ColorSpace /DeviceRGB /BitsPerComponent 8 /Filter /DCTDecode"
        objects[3] = _stream(about, picture)
    kids, fields = [], []
    for content, added in pages:
        objects.append(_stream("", content.encode()))
        about = f"/Contents {len(objects)} 0 R /Annots ["
        for annotation in added.splitlines():
            objects.append(annotation.encode())
            fields.append(f"{len(objects)} 0 R")
            about += f" {fields[-1]}"
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Rotate {rotation} /Resources "
            f"<< /Font << /F 3 0 R >> /XObject << /I 4 0 R >> >> {about}] >>".encode()
        )
        kids.append(b"%d 0 R" % len(objects))
    form = f"/AcroForm << /Fields [{' '.join(fields)}] >>" if is_form else ""
    objects[0] = f"<< /Type /Catalog /Pages 2 0 R {form} >>".encode()
    objects[1] = b"<< /Type /Pages /Count %d /Kids [%s] >>" % (len(kids), b" ".join(kids))
    return _with_table(objects, b"/Root 1 0 R")


def _stream(about: str, data: bytes) -> bytes:
    return b"<< %s /Length %d >>\nstream\n%s\nendstream" % (about.encode(), len(data), data)


def _with_table(objects: Sequence[bytes], trailer: bytes) -> bytes:
    written = b"%PDF-1.4\n"
    places = []
    for number, content in enumerate(objects, start=1):
        places.append(len(written))
        written += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    return written + (
        b"xref\n0 %d\n0000000000 65535 f \n%strailer\n<< /Size %d %s >>\nstartxref\n%d\n%%%%EOF\n"
        % (len(objects) + 1, table, len(objects) + 1, trailer, len(written))
    )


def docx(fill=lambda document: None) -> bytes:
    """A document of Word's, as `fill` makes it of an empty one."""
    import docx as library

    document = library.Document()
    fill(document)
    packed = io.BytesIO()
    document.save(packed)
    return packed.getvalue()


def docx_bomb(unpacked: int) -> bytes:
    """A .docx whose text unpacks to so many spaces."""
    plain, packed = zipfile.ZipFile(io.BytesIO(docx())), io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as bomb:
        for member in plain.infolist():
            content = plain.read(member)
            if member.filename == "word/document.xml":
                content = content.replace(b"<w:body>", b"<w:body>" + b" " * unpacked)
            bomb.writestr(member.filename, content)
    return packed.getvalue()
