"""Turns between tenants, fair by tokens. Pure: no IO.

Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): each tenant's counter
grows with what is done for it, and the next turn is that of the smallest. A tenant that has nothing here has neither
credit nor debt: it comes in at the smallest counter of those that are here. One alone gets everything.
"""

import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from typing import TypeVar

# A token that is generated counts as much as so many prompt tokens, as in the paper.
OUTPUT_WEIGHT = 2

ItemT = TypeVar("ItemT")


class FairShares:
    """Owns the counters of the tenants that have something here."""

    def __init__(self) -> None:
        self._counters: dict[str, int] = {}

    def begin(self, tenants: Collection[str]) -> None:
        """These have something here, and no others."""
        if self._counters.keys() != set(tenants):
            floor = min((count for tenant, count in self._counters.items() if tenant in tenants), default=0)
            here = {tenant: count for tenant, count in self._counters.items() if tenant in tenants}
            self._counters = here | {tenant: floor for tenant in tenants if tenant not in here}

    def charge(self, tenant: str, num_tokens: int) -> None:
        """So much was done for a tenant."""
        if tenant in self._counters:
            self._counters[tenant] += num_tokens

    def in_turn(self, lines: Mapping[str, Iterable[ItemT]]) -> Iterator[ItemT]:
        """The items of the lines of tenants that are here, each time the next of the one that has had least.

        What is charged between two items counts at once. An item that is passed over stays behind in its line.
        """
        places = {tenant: -place for place, tenant in enumerate(self._counters)}  # of equals, who came last is first
        heap = [(self._counters[tenant], places[tenant], tenant) for tenant in lines]
        heapq.heapify(heap)
        rest = {tenant: iter(line) for tenant, line in lines.items()}
        while heap:
            _, place, tenant = heapq.heappop(heap)
            for item in islice(rest[tenant], 1):
                yield item
                heapq.heappush(heap, (self._counters[tenant], place, tenant))
