"""The queue of requests that are not admitted, in rank order."""

from __future__ import annotations

import heapq

from interlock.engine.request import Request, State


class WaitingQueue:
    """A heap by ``Request.rank``. An aborted request is skipped when it comes to the top."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Request]] = []
        self._count = 0
        self.tokens = 0

    def __len__(self) -> int:
        return self._count

    def push(self, request: Request) -> None:
        heapq.heappush(self._heap, (request.rank, request))
        self._count += 1
        self.tokens += request.num_tokens

    def head(self) -> Request | None:
        """The request to admit next, left in the queue."""
        while self._heap and self._heap[0][1].state is not State.WAITING:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Request:
        request = self.head()
        if request is None:
            raise IndexError("the queue is empty")
        heapq.heappop(self._heap)
        self.forget(request)
        return request

    def forget(self, request: Request) -> None:
        """Take a waiting request out of the count; its entry is dropped when it comes to the top."""
        self._count -= 1
        self.tokens -= request.num_tokens
