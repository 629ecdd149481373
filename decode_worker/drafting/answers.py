"""The recent answers of each tenant, to draft from: agents and templates repeat themselves. Pure: no IO.

Nothing crosses from one tenant to another, nor between cache salts: a draft changes no output, but that it was right
could be seen in the time.
"""

from collections import OrderedDict
from collections.abc import Sequence

from common.values.request import Work
from decode_worker.drafting.lookup import MIN_MATCH, SEPARATOR, Lookup

# Tenants whose answers are kept: those that were answered last.
MAX_TENANTS = 16
# Of each, twice so many tokens at most: when the newer half is full, the older one goes. About 150 bytes each.
MAX_HALF = 8192


class RecentAnswers:
    """Of one tenant."""

    def __init__(self) -> None:
        self.halves = (Lookup([]), Lookup([]))  # older, newer

    def add(self, token_ids: Sequence[int]) -> None:
        """One answer; of a very long one its end."""
        if len(token_ids) <= MIN_MATCH:
            return
        newer = self.halves[1]
        if len(newer.token_ids) + len(token_ids) >= MAX_HALF:
            self.halves = (newer, newer := Lookup([]))
        newer.token_ids += [SEPARATOR, *token_ids[-MAX_HALF:]]
        newer.update()
        newer.update()  # at most twice what one call takes


class TenantAnswers:
    """Of all tenants of a worker."""

    def __init__(self) -> None:
        self._answers: OrderedDict[tuple[str, bytes], RecentAnswers] = OrderedDict()

    def of(self, work: Work) -> RecentAnswers:
        """Those that a request may see."""
        key = (work.tenant, work.cache_salt)
        answers = self._answers.pop(key, None) or RecentAnswers()
        self._answers[key] = answers
        if len(self._answers) > MAX_TENANTS:
            self._answers.popitem(last=False)
        return answers
