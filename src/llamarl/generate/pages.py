"""Bookkeeping of the KV cache's pages on the host: which are free, and how many sequences hold each. The pages themselves
are in `kv_cache.py`."""

from __future__ import annotations

from collections.abc import Iterable

NO_PAGE = 0  # never handed out; rows without a sequence write there, and unused table entries point to it


class PagePool:
    """Hands out pages and counts their holders. Sequences may share a prompt's pages; the last release frees a page."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages  # pages that can be handed out
        self._free = list(range(num_pages, NO_PAGE, -1))
        self._holders = [0] * (num_pages + 1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        assert count <= self.num_free, f"{count} pages wanted, {self.num_free} free"
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        for page in pages:
            assert self._holders[page] > 0, f"page {page} belongs to nobody"
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is released twice"
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)


def pages_for(num_tokens: int, page_tokens: int) -> int:
    return -(-num_tokens // page_tokens)
