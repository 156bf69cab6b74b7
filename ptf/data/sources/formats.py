"""Opens a data file of any format.

Whatever the format, an open file returns blocks by number, and reports what it knows of their count.
"""

from typing import Any

from ptf.data.sources.blocks import DataFile, Tables, open_bytes
from ptf.data.sources.columnar import ArrowFile, ArrowStream, Parquet
from ptf.data.sources.csv_rows import Csv
from ptf.data.sources.json_array import open_json
from ptf.data.sources.jsonl import Compressed, Jsonl

COMPRESSED = (".jsonl.gz", ".jsonl.zst")
# The first bytes of Arrow's file format; its stream format, which `save_to_disk` writes, has no such mark.
ARROW_FILE = b"ARROW1"


def open_file(
    uri: str, lines_bytes: int, of_table: Tables, footers: dict[str, Any], columns: list[str] | None = None
) -> DataFile:
    """Open a data file, whose name gives its format.

    `lines_bytes` is the amount of text in a block of a format that has no blocks of its own. `of_table` makes the block
    of a row group of parquet, of some `columns` or of all, and `footers` caches the footer of each such file by its
    URI. Raises UserError where the file cannot be read.
    """
    if uri.endswith(".parquet"):
        return Parquet(uri, of_table, footers, columns)
    if uri.endswith((".arrow", ".feather")):
        with open_bytes(uri) as file:
            return ArrowFile(uri) if file.read(len(ARROW_FILE)) == ARROW_FILE else ArrowStream(uri)
    if uri.endswith(COMPRESSED):
        return Compressed(uri, lines_bytes)
    if uri.endswith(".csv"):
        return Csv(uri, lines_bytes)
    if uri.endswith(".json"):
        return open_json(uri, lines_bytes)
    return Jsonl(uri, lines_bytes)
