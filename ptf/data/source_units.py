"""The pack units of a source: how its rows are read, how they are encoded, and one pass over all of them."""

from collections.abc import Iterator, Mapping

from ptf.data import tokenized
from ptf.data.encode import Encode, Encoder, SetAside, TooLong
from ptf.data.kinds import with_detected_kind
from ptf.data.sample import PackUnit
from ptf.data.sources.reader import Reader
from ptf.data.sources.rows import SourceSpec, rows_once
from ptf.data.tokenizer import Tokenizer
from ptf.data.unread import Unread


def opened(spec: SourceSpec, tokenizer: Tokenizer | None) -> tuple[Reader, SourceSpec]:
    """Return a reader of the source's rows, and the specification with what was detected."""
    if spec.kind != "tokenized":
        reader = Reader(spec.path)
        return reader, with_detected_kind(spec, reader)
    assert tokenizer is not None, "a tokenized source is read with the tokenizer that it must have been written with"
    return tokenized.reader(spec.path, tokenizer, spec.verify_up_to), spec


def encoder_of(
    name: str,
    spec: SourceSpec,
    encode: Encode,
    seq_len: int,
    too_long: TooLong,
    set_aside: SetAside | None = None,
    share_prefixes: bool = False,
    unread: Unread | None = None,
) -> Encoder:
    """Return the encoder that makes pack units of a source's rows."""
    if spec.kind == "tokenized":
        return Encoder(tokenized.decode, name, seq_len, too_long, kind=spec.kind, share_prefixes=share_prefixes)
    return Encoder(
        encode,
        name,
        seq_len,
        too_long,
        columns=spec.columns,
        kind=spec.kind,
        set_aside=set_aside,
        share_prefixes=share_prefixes,
        unread=unread,
    )


def pack_units_once(
    sources: Mapping[str, SourceSpec],
    *,
    encode: Encode,
    seq_len: int,
    too_long: TooLong = "error",
    tokenizer: Tokenizer | None = None,
    set_aside: SetAside | None = None,
) -> Iterator[PackUnit]:
    """Yield every pack unit of every source once, in file order: held-out data.

    Tokenized sources need `tokenizer`, to check that they were written with it. A bad row is an error unless
    `set_aside` takes it.
    """
    for name, spec in sources.items():
        reader, spec = opened(spec, tokenizer)
        encoder = encoder_of(name, spec, encode, seq_len, too_long, set_aside)
        for place in rows_once(reader, spec.limit):
            yield from encoder(place)
