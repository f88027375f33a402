"""A table as plain text: the first column to the left, numbers to the right."""

from collections.abc import Sequence


def text_table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Lines of a table, headings first, each with its newline.

    Args:
        headings: of the columns.
        rows: texts of the cells.
        left: how many columns are aligned to the left.
    """
    lines = [headings, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(headings))]
    texts = (
        "  ".join(
            text.ljust(width) if i < left else text.rjust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
    return "".join(f"{text.rstrip()}\n" for text in texts)


def kib(count: float) -> str:
    """Bytes in KiB."""
    return f"{count / 1024:,.0f}"
