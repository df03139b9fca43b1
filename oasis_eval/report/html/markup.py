"""HTML that is safe by construction: text is escaped unless it is `Html` already.

Names, completions and tracebacks come from strangers. They reach the page as text alone, with the
characters that would hide, reorder or break it (controls, bidirectional overrides, lone
surrogates) spelled out as escapes, so that the reader sees what is there.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable
from typing import TypeAlias

_LINE_BREAKS = re.compile("\r\n?|[\x85\u2028\u2029]")
_PLAIN = re.compile(r"[\w .,:;/()+*=-]*", re.ASCII)
"""What means the same in markup."""
_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn")
_JOINERS = "\u200c\u200d"
"""Part of ordinary Persian, Indic and emoji text."""
_ISLAND = {code: f"\\u{code:04x}" for code in (*map(ord, "<>&"), 0x2028, 0x2029)}
_VOID = frozenset({"meta", "input", "br", "link"})


class Html(str):
    """Markup; everything else that is put into an element is text."""

    __slots__ = ()


Child: TypeAlias = "Html | str | Iterable[Child] | None"
Attribute: TypeAlias = "str | int | float | bool | None"


def visible(text: str) -> str:
    r"""Return `text` with hidden characters as escapes (`\u202e`); line breaks and tabs stay."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_shown, _LINE_BREAKS.sub("\n", text)))


def _shown(character: str) -> str:
    if character in "\n\t" or character in _JOINERS:
        return character
    if unicodedata.category(character) not in _HIDDEN:
        return character
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def escape(text: str) -> Html:
    """Return text as markup that shows exactly `visible(text)`, in elements and attributes."""
    if _PLAIN.fullmatch(text):
        return Html(text)
    clean = visible(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return Html(clean.replace('"', "&quot;").replace("'", "&#39;"))


def markup(child: Child) -> Html:
    """Return a child of an element as markup."""
    if child is None:
        return Html("")
    if isinstance(child, Html):
        return child
    if isinstance(child, str):
        return escape(child)
    return Html("".join(markup(item) for item in child))


def element(name: str, /, *children: Child, **attributes: Attribute) -> Html:
    """Return an element.

    Args:
        name: Its tag.
        children: Markup, text to escape, None for nothing, or lists of these.
        attributes: `class_` is `class`, `data_v` is `data-v`; None and False leave one out, True
            gives it without a value.
    """
    parts = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        label = key.rstrip("_").replace("_", "-")
        parts.append(label if value is True else f'{label}="{escape(str(value))}"')
    opening = f"<{' '.join(parts)}>"
    if name in _VOID:
        return Html(opening)
    return Html(f"{opening}{markup(children)}</{name}>")


def named(text: str) -> Html:
    """Return a name of the records, kept apart from the reading direction around it."""
    return element("bdi", text)


def details(summary: Child, *children: Child, **attributes: Attribute) -> Html:
    """Return a part that is folded."""
    return element("details", element("summary", summary), *children, **attributes)


def island(identifier: str, value: object) -> Html:
    """Return `value` as JSON that no text in it can break out of."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    body = Html(text.translate(_ISLAND))
    return element("script", body, type="application/json", id=identifier)
