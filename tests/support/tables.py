"""Reads the tables of docstrings, so that tests walk the rows that readers see."""


def rows_of(documented: object) -> list[tuple[str, ...]]:
    """The cells of each row of the table in a docstring, without its heading."""
    lines = [line.strip() for line in (documented.__doc__ or "").splitlines()]
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines if line.startswith("|")]
    assert set("".join(rows[1])) <= {"-"}, "the second line of a table separates its heading"
    return rows[2:]
