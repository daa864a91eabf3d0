"""Names and sizes of block scales beside fp8 weights. No torch here."""

SCALE_SUFFIX = "_scale_inv"


def scale_rows(rows: int, block_rows: int, chunks: int = 1) -> int:
    """Rows of the scale grid of a tensor of ``rows`` rows; the grid restarts in each of ``chunks`` chunks.

    >>> scale_rows(13568, 128), scale_rows(13568, 128, chunks=4)
    (106, 108)
    """
    return chunks * -(-(rows // chunks) // block_rows)
