"""Words of a captured text: cleaned, placed, and put together again where a terminal broke them.

It is: what can be undone without knowing the tool: colour codes, quotes, fences, table bars, HTML, hard line wraps.
It is not: a reader of matrices (`matrix.py`); nothing is refused here.
"""

from __future__ import annotations

import html
import re
from dataclasses import dataclass, replace

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-_]")
_TAG = re.compile(r"</?[a-zA-Z][^<>\n]*>")
_QUOTE = re.compile(r"^(?:[ \t]*>)+[ ]?(?=[ \t]*(?:GPU|NIC|mlx|[0-9a-f]{4}:))", re.IGNORECASE)
_RULER = re.compile(r"^[-=+:*_~|`]{2,}$|^[|`]$")
_GPU = re.compile(r"\bGPU[ ]?\[?(\d+(?:/\d+)?)\]?(?=[\s:]|$)", re.IGNORECASE)

_LABEL = re.compile(r"^(?:GPU\d+(?:/\d+)?|[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f])$", re.IGNORECASE)
_CELL = re.compile(r"^(?:X|S|SELF|NV\d+|SYS|SOC|NODE|PHB|PXB|PIX|MDF|XL(?:\d+|\*)|XGMI|PCIE)$", re.IGNORECASE)
_ODD = re.compile(r"^(?:UNKNOWN|ERR(?:OR)?!?|FAIL(?:ED)?|NONE|\?+)$", re.IGNORECASE)
_STATUS = re.compile(r"^(?:OK|CNS|GNS|TNS|NS|DR|U)$")
_NIC = re.compile(r"^[A-Za-z][\w.\-]*\d\w*$")
_NIC_END = re.compile(r"^\w{1,12}$")
_NUMBER = re.compile(r"^(?:[-,]?\d[\d,\-]*|\[?N/A\]?)$", re.IGNORECASE)
_COLUMN = re.compile(r"^(?:CPU|NUMA|GPU|Affinity|Node|ID)(?:[-_]?(?:NUMA|Affinity|Node|ID))*$", re.IGNORECASE)

_NARROWEST_WRAP = 40
"""Terminals narrower than this are not met; a shorter line was not cut by one."""


@dataclass(frozen=True)
class Token:
    """One word.

    Attributes:
        text: the word.
        line: number of its line in `Words.lines`.
        start, end: columns in that line.
    """

    text: str
    line: int
    start: int
    end: int

    @property
    def is_label(self) -> bool:
        """Names a GPU: GPU3, a tile GPU0/1, or a PCI address."""
        return bool(_LABEL.match(self.text))

    @property
    def is_cell(self) -> bool:
        """Names a path or the device itself."""
        return bool(_CELL.match(self.text))

    @property
    def is_status(self) -> bool:
        """A cell of a peer-to-peer capability matrix."""
        return bool(_STATUS.match(self.text))

    @property
    def is_odd(self) -> bool:
        """What a tool prints in place of a path that it could not find out."""
        return bool(_ODD.match(self.text))

    @property
    def is_nic(self) -> bool:
        """May name a network port: a word that starts with a letter and holds a digit."""
        return bool(_NIC.match(self.text)) and not self.is_cell and not self.is_label

    @property
    def is_number(self) -> bool:
        """A number, a list of ranges, or N/A."""
        return bool(_NUMBER.match(self.text))

    @property
    def is_column(self) -> bool:
        """Part of the name of an affinity column."""
        return bool(_COLUMN.match(self.text))


@dataclass(frozen=True)
class Words:
    """A cleaned text.

    Attributes:
        lines: its lines, tabs kept.
        tokens: its words in order; rulers and fences are left out.
    """

    lines: tuple[str, ...]
    tokens: tuple[Token, ...]


def read_words(text: str) -> Words:
    """Clean `text` and cut it into words."""
    lines = tuple(_clean(text).splitlines())
    tokens: list[Token] = []
    for number, line in enumerate(lines):
        found = [Token(m.group(), number, m.start(), m.end()) for m in re.finditer(r"\S+", line)]
        found = [token for token in found if not _RULER.match(token.text)]
        if tokens and found and _broken(lines, tokens[-1], found[0]):
            tokens[-1] = replace(found[0], text=tokens[-1].text + found[0].text)
            del found[0]
        tokens.extend(found)
    return Words(lines, tuple(tokens))


def _clean(text: str) -> str:
    text = text.replace("\ufeff", "").replace("\r\n", "\n").replace("\r", "\n")
    text = _ANSI.sub("", text)
    text = html.unescape(_TAG.sub("\t", text)).replace("\xa0", " ")
    lines = (_QUOTE.sub("", line).replace("|", " \t") for line in text.split("\n"))
    return "\n".join(re.sub(r",[ ]+(?=\d)", ",", _GPU.sub(r"GPU\1", line)) for line in lines)


def _broken(lines: tuple[str, ...], a: Token, b: Token) -> bool:
    """Whether `a`, the last word of a line, and `b`, the first of the next, are halves of one word.

    A hard wrap leaves no space on either side. Halves of a GPU or a path are known by what they make together; halves
    of a port's name only if the text around was cut at one width. Numbers are left to who knows how many there are.
    """
    if a.line + 1 != b.line or b.start > 0 or a.end != len(lines[a.line]):
        return False
    if len(lines[a.line].expandtabs()) < _NARROWEST_WRAP:
        return False
    whole = replace(a, text=a.text + b.text)
    if whole.is_cell or whole.is_label or whole.is_column:
        return not (_is_known(a) and _is_known(b))
    if _is_known(b) or _is_known(a) or any(_LABEL.match(word) for word in lines[b.line].split()):
        return False
    if not _cut_at_one_width(lines, a.line):
        return False
    return not a.is_number and whole.is_nic and bool(_NIC_END.match(b.text)) and not (a.is_nic and b.is_nic)


def _is_known(token: Token) -> bool:
    return token.is_cell or token.is_label or token.is_column


def _cut_at_one_width(lines: tuple[str, ...], number: int) -> bool:
    """Whether line `number` is as long as any near it, and more of them are just as long than a little shorter."""
    widths = [len(line.expandtabs()) for line in lines[max(0, number - 40) : number + 40]]
    longest = len(lines[number].expandtabs())
    return longest == max(widths) and widths.count(longest) > sum(longest - 10 <= w < longest for w in widths)
