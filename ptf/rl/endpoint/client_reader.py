"""A stream reader that knows at any time whether its client is gone, and whether there is anything unread."""

import asyncio
from typing import Any


class ClientReader(asyncio.StreamReader):
    """Reads what a client sends."""

    ended = False  # the client has closed its side, even if bytes of it are unread
    received = taken = 0  # bytes

    def feed_data(self, data: Any) -> None:
        """Take bytes from the transport."""
        self.received += len(data)
        super().feed_data(data)

    def feed_eof(self) -> None:
        """Note the end of what the client sends."""
        self.ended = True
        super().feed_eof()

    async def take(self, most: int) -> bytes:
        """Return at most so many bytes, none at the end. Raises OSError if the connection was reset."""
        data = await self.read(most)
        self.taken += len(data)
        return data

    @property
    def unread(self) -> bool:
        """Return whether bytes have come that were not taken."""
        return self.received > self.taken

    @property
    def gone(self) -> bool:
        """Return whether the client has closed or reset the connection."""
        return self.ended or self.exception() is not None
