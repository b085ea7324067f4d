"""Mails: .eml by the standard library, Outlook's .msg by python-oxmsg; bodies as HTML (html.Page).

Attachments are named, and pictures among them are figures; mails that are attached are read.
"""

from __future__ import annotations

import email
import email.policy
from email.message import EmailMessage
from typing import Any

from mmqa_jax.data.documents import document
from mmqa_jax.data.documents.document import DocumentError, letters, one_line
from mmqa_jax.data.documents.html import Page, parsed

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
