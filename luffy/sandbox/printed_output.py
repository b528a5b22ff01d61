"""What a call prints: its start and its end are kept, the rest is counted."""


class PrintedOutput:
    """Collects bytes in bounded memory."""

    def __init__(self, shown_bytes: int) -> None:
        self._shown = shown_bytes
        self._head = bytearray()
        self._tail = bytearray()
        self._tail_size = shown_bytes - shown_bytes // 2
        self.size = 0
        """Bytes printed so far, those left out included."""

    def add(self, chunk: bytes) -> None:
        """Take up what was printed next."""
        self.size += len(chunk)
        room = self._shown - self._tail_size - len(self._head)
        self._head += chunk[:room]
        self._tail += chunk[room:]
        if len(self._tail) > 2 * self._tail_size:  # not at each chunk, which would copy the tail for every line
            del self._tail[: -self._tail_size]

    def text(self) -> str:
        """Everything, or the start, how much was left out, and the end."""
        if self.size <= self._shown:
            return (self._head + self._tail).decode(errors="replace")
        left_out = self.size - self._shown
        return f"{self.start()}\n[... {left_out} bytes of output left out ...]\n{_end(self._tail[-self._tail_size :])}"

    def start(self) -> str:
        """The start alone: all that does not depend on when an endless output was stopped."""
        return _without_half_characters(self._head)


def _without_half_characters(head: bytearray) -> str:
    for cut in range(min(4, len(head))):  # a character has at most four bytes
        try:
            return head[: len(head) - cut].decode()
        except UnicodeDecodeError:
            continue
    return head.decode(errors="replace")


def _end(tail: bytearray) -> str:
    start = 0
    while start < min(3, len(tail)) and tail[start] & 0xC0 == 0x80:  # the rest of a character that was cut
        start += 1
    return tail[start:].decode(errors="replace")
