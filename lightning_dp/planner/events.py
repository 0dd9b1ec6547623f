"""A discrete-event simulation of tasks, what they wait for, and the resources that they share."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

FREE = -1
"""The resource of tasks that need none: they start as soon as nothing holds them up."""


class Schedule:
    """Tasks with durations. A resource runs one task at a time, and of those that are ready the most urgent.

    Tasks are numbered in the order in which they are added. A task can only wait for earlier ones, so that there is no
    circle.
    """

    def __init__(self) -> None:
        # One list for each property, because a list of objects takes ten times the memory for a million tasks.
        self._durations: list[float] = []
        self._resources: list[int] = []
        self._priorities: list[float] = []
        self._num_awaited: list[int] = []
        self._followers: list[list[int] | None] = []
        self._num_resources = 0

    def __len__(self) -> int:
        return len(self._durations)

    def resource(self) -> int:
        """Return a new resource: a stream of a device, a link, a thread."""
        self._num_resources += 1
        return self._num_resources - 1

    def add(
        self, duration_s: float, after: Iterable[int] = (), resource: int = FREE, priority: float | None = None
    ) -> int:
        """Add a task, and return its number.

        Args:
            duration_s: how long it occupies its resource.
            after: numbers of the tasks that must end before it starts.
            resource: what it occupies.
            priority: of ready tasks the one with the smallest number starts first; by default, the one added first.
        """
        number = len(self._durations)
        awaited = set(after)
        assert all(0 <= other < number for other in awaited), "a task waits for earlier ones"
        self._durations.append(duration_s)
        self._resources.append(resource)
        self._priorities.append(number if priority is None else priority)
        self._num_awaited.append(len(awaited))
        self._followers.append(None)
        for other in awaited:
            followers = self._followers[other]
            if followers is None:
                self._followers[other] = [number]
            else:
                followers.append(number)
        return number

    def run(self) -> list[float]:
        """Return the time at which each task ends. All begin at 0."""
        ends = [0.0] * len(self)
        num_awaited = list(self._num_awaited)
        ready: list[list[tuple[float, int]]] = [[] for _ in range(self._num_resources)]
        is_busy = [False] * self._num_resources
        running: list[tuple[float, int]] = []
        touched: set[int] = set()

        def release(number: int, now_s: float) -> None:
            resource = self._resources[number]
            if resource == FREE:
                heapq.heappush(running, (now_s + self._durations[number], number))
            else:
                heapq.heappush(ready[resource], (self._priorities[number], number))
                touched.add(resource)

        def start(now_s: float) -> None:
            for resource in touched:
                if ready[resource] and not is_busy[resource]:
                    is_busy[resource] = True
                    _, number = heapq.heappop(ready[resource])
                    heapq.heappush(running, (now_s + self._durations[number], number))
            touched.clear()

        for number, count in enumerate(num_awaited):
            if count == 0:
                release(number, 0.0)
        start(0.0)
        while running:
            now_s = running[0][0]
            # First everything that ends now, then the choices of the resources, among all that is ready by now.
            while running and running[0][0] == now_s:
                _, number = heapq.heappop(running)
                ends[number] = now_s
                if self._resources[number] != FREE:
                    is_busy[self._resources[number]] = False
                    touched.add(self._resources[number])
                for follower in self._followers[number] or ():
                    num_awaited[follower] -= 1
                    if num_awaited[follower] == 0:
                        release(follower, now_s)
            start(now_s)
        return ends
