"""Square tables of a captured text: a header that names devices, then one row for each.

It is: a reader of any such table (`nvidia-smi topo -m`, `rocm-smi --showtopo`, `amd-smi topology`, `xpu-smi topology
-m`), by these rules only:

- A header is a run of distinct names that starts with a GPU, perhaps affinity columns, then a row.
- A row is a name of the header followed by as many cells as the header has names; a row goes on in the next line
  while cells are missing and the line starts with a cell. Text before the name, and after the cells, is not read.
- Anything else (prompts, prose, legends, other tables, blank lines) is passed over.

It is not: a judge of what the cells mean (`links.py`, `amd.py`), and it does not guess: `Table.problem` says why a
table cannot be used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from parallax.plugins.topology.text.tokens import Token, Words


class CaptureError(ValueError):
    """A captured text must not be used; the message gives the reason."""


@dataclass
class Table:
    """One table as written.

    Attributes:
        title: the last line of text above the header.
        names: devices in the header's order; the first `gpus` are GPUs, the rest network ports.
        gpus: how many names are GPUs.
        columns: affinity columns after the names: "cpu", "numa", "gpu numa".
        starts: where the headings of `columns` start in the header's line.
        rows: name -> cells by the header's order, perhaps fewer than the header has names.
        values: name -> column -> text; blanks and N/A are left out.
        foreign: names of rows that the header lacks.
        crowded: names of rows with more cells than the header has names.
        differing: names of rows that were found twice with different cells.
        ends: name of the row with which the text ends before its affinity is complete.
    """

    title: str
    names: list[str]
    gpus: int
    columns: list[str]
    starts: list[int]
    rows: dict[str, list[str]] = field(default_factory=dict)
    values: dict[str, dict[str, str]] = field(default_factory=dict)
    foreign: list[str] = field(default_factory=list)
    crowded: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    ends: str | None = None

    def problem(self) -> str | None:
        """Why the part between GPUs cannot be trusted; None when it is whole."""
        gpus = self.names[: self.gpus]
        if any(name not in gpus for name in self.names if _is_gpu(name)):
            return "a GPU is named after a network port in the header: its columns are out of order"
        if self.foreign:
            return f"there are rows of {_list(self.foreign)}, which the header lacks: part of the header was cut"
        missing = [name for name in gpus if name not in self.rows]
        if missing:
            return f"the header names {self.gpus} GPUs, but the rows of {_list(missing)} are missing: cut short?"
        short = [name for name in gpus if len(self.rows[name]) < self.gpus]
        if short:
            cells = ", ".join(str(len(self.rows[name])) for name in short)
            return f"rows of {_list(short)} have {cells} cells for {self.gpus} GPUs: cut short?"
        if self.crowded:
            return f"rows of {_list(self.crowded)} have more cells than the header has names ({len(self.names)})"
        if self.differing:
            return f"rows of {_list(self.differing)} are there twice with different cells: two hosts mixed?"
        return None

    def is_short(self) -> bool:
        """Whether the row of some GPU has fewer cells than the header has names."""
        return any(len(self.rows.get(name, ())) < len(self.names) for name in self.names[: self.gpus])

    def gaps(self) -> list[str]:
        """Rows of network ports, and cells towards them, that are missing."""
        ports = self.names[self.gpus :]
        lost = [name for name in ports if name not in self.rows]
        short = [name for name in self.names if len(self.rows.get(name, self.names)) < len(self.names)]
        found = [f"rows of {_list(lost)} are missing"] if lost else []
        found += [f"the text ends inside the row of {self.ends}"] if self.ends else []
        return found + ([f"rows of {_list(short)} are cut short"] if short else [])


def read_tables(words: Words) -> list[Table]:
    """All tables of the text, in order."""
    tables: list[Table] = []
    i = 0
    while i < len(words.tokens):
        header = _header_at(words, i)
        if header is not None:
            table, i = header
            tables.append(table)
        else:
            i = _read_row(words, i, tables[-1]) if tables else i + 1
    return tables


def _header_at(words: Words, i: int) -> tuple[Table, int] | None:
    """The table whose header starts at token `i`, and the token after the header; None when none does."""
    tokens = words.tokens
    if not tokens[i].is_label:
        return None
    names = [_name(tokens[i])]
    j = i + 1
    while j < len(tokens) and (tokens[j].is_label or tokens[j].is_nic) and _name(tokens[j]) not in names:
        if tokens[j].line != tokens[j - 1].line and _row_in(tokens, j, names):
            break
        names.append(_name(tokens[j]))
        j += 1
    if len(names) == 1 and j < len(tokens) and _is_cell_like(tokens[j]) and tokens[j].line == tokens[i].line:
        return None
    end = j
    while j < len(tokens) and tokens[j].is_column:
        j += 1
    if j >= len(tokens) or not _row_in(tokens, j, names):
        return None
    columns = _columns(tokens[end:j])
    title, gpus = _title(words, tokens[i]), sum(map(_is_gpu, names))
    return Table(title, names, gpus, list(columns), list(columns.values())), j


def _row_in(tokens: Sequence[Token], j: int, names: Sequence[str]) -> bool:
    """Whether the line of token `j` holds the start of a row, at `j` or behind a prefix."""
    line = tokens[j].line
    while j + 1 < len(tokens) and tokens[j].line == line:
        if _name(tokens[j]) in names:
            return _is_cell_like(tokens[j + 1])
        j += 1
    return False


def _read_row(words: Words, i: int, table: Table) -> int:
    """Put the row that starts at token `i`, if one does, into `table`; the next token to look at."""
    tokens = words.tokens
    name = _name(tokens[i])
    known = name in table.names
    if i + 1 >= len(tokens) or not (known or tokens[i].is_label):
        return i + 1
    first = tokens[i + 1]
    if not (_is_cell_like(first) if known else first.is_cell or first.is_status):
        return i + 1
    size, j = len(table.names), i + 1
    while j < len(tokens) and j - i - 1 < size and _goes_on(words, i, j, table):
        j += 1
    cells = [token.text.upper() for token in tokens[i + 1 : j]]
    if not known:
        table.foreign.append(name)
        return j
    if name in table.rows:
        if table.rows[name] != cells:
            table.differing.append(name)
        return j
    table.rows[name] = cells
    if len(cells) == size and j < len(tokens) and tokens[j].line == tokens[j - 1].line and tokens[j].is_cell:
        table.crowded.append(name)
    if _is_gpu(name) and len(cells) == size:
        table.values[name], j = _read_values(words, j, table)
        most = max(map(len, table.values.values()))
        table.ends = name if j >= len(tokens) and len(table.values[name]) < most else None
    return j


def _goes_on(words: Words, start: int, j: int, table: Table) -> bool:
    """Whether token `j` is another cell of the row that starts at token `start`."""
    token, before = words.tokens[j], words.tokens[j - 1]
    if token.is_label or token.text in table.names:
        return False
    if token.is_number and token.text != "0" and any(t.is_cell for t in words.tokens[start + 1 : j]):
        return False  # numbers after paths are the affinity: a cell of this row was lost
    if token.line == before.line:
        return True
    return token.line == before.line + 1 and (token.is_cell or token.is_status or _is_cell_like(token))


def _read_values(words: Words, j: int, table: Table) -> tuple[dict[str, str], int]:
    """Affinity after the last cell of a row (token `j - 1`), by column, and the next token to look at.

    As many values as columns belong to them in order; with one more, the two at the end and the start of a line are
    halves of one. With fewer, a tab moves to the next column; without tabs each takes the heading nearest to it.
    """
    tokens, last, columns, first = words.tokens, words.tokens[j - 1], table.columns, j
    while j < len(tokens) and j - first <= len(columns) and _is_value(words, j):
        j += 1
    found = [token.text for token in tokens[first:j]]
    breaks = [k for k in range(1, len(found)) if tokens[first + k].line != tokens[first + k - 1].line]
    if len(found) > len(columns):
        if columns and len(breaks) == 1:
            found[breaks[0] - 1 : breaks[0] + 1] = [found[breaks[0] - 1] + found[breaks[0]]]
        else:
            del found[len(columns) :]
            j = first + len(columns)
    places = list(range(len(found)))
    rest = words.lines[last.line][last.end :]
    if len(found) < len(columns) and not breaks and tokens[j - 1].line == last.line:
        starts = [token.start for token in tokens[first:j]]
        places = _by_tabs(rest, len(columns)) if "\t" in rest else _nearest(starts, table.starts)
    pairs = zip(places, found, strict=False)
    return {columns[place]: text for place, text in pairs if "N/A" not in text.upper()}, j


def _is_value(words: Words, j: int) -> bool:
    """Whether token `j` is one more value of the row before it: in the same line, or in a line of nothing else."""
    token, before = words.tokens[j], words.tokens[j - 1]
    if not token.is_number or token.line > before.line + 1:
        return False
    line = words.lines[token.line]
    return token.line == before.line or all(Token(word, 0, 0, 0).is_number for word in line.split())


def _by_tabs(rest: str, count: int) -> list[int]:
    """Columns of the words in `rest`, which starts with the tab before the first column."""
    fields = rest.removeprefix(" ").split("\t")[1:]
    filled = [place for place, text in enumerate(fields) if text.strip()]
    return [min(place, count - 1) for place in filled]


def _columns(tokens: Sequence[Token]) -> dict[str, int]:
    """Affinity columns by their headings, "cpu", "numa" and "gpu numa", and where those start."""
    text, starts = "", {}
    for token in tokens:
        starts[len(text)] = token.start
        text += re.sub(r"[-_]", " ", token.text.lower()) + " "
    found: dict[str, int] = {}
    for match in re.finditer(r"(gpu numa|cpu|numa)(?: ?(?:affinity|node|id))*", text):
        found.setdefault(match[1], starts[match.start()])
    return found


def _nearest(starts: Sequence[int], headings: Sequence[int]) -> list[int]:
    """Headings, in order, that lie nearest to `starts`.

    Values are shorter than headings, so a value drifts to the left of its own: to the right counts double.
    """

    def distance(choice: Iterable[int]) -> int:
        gaps = [headings[k] - start for k, start in zip(choice, starts, strict=True)]
        return sum(gap if gap >= 0 else -2 * gap for gap in gaps)

    return list(min(combinations(range(len(headings)), len(starts)), key=distance))


def _title(words: Words, header: Token) -> str:
    """The nearest line above that is not blank."""
    above = (line.strip(" \t=-_*#:") for line in reversed(words.lines[: header.line]))
    return next((line for line in above if line), "")


def _name(token: Token) -> str:
    if not token.is_label:
        return token.text
    return token.text.lower() if ":" in token.text else token.text.upper()


def _is_gpu(name: str) -> bool:
    return Token(name, 0, 0, 0).is_label


def _is_cell_like(token: Token) -> bool:
    return token.is_cell or token.is_status or token.is_number or token.is_odd


def _list(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) < 5 else f"{', '.join(names[:3])} and {len(names) - 3} more"
