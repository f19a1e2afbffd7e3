"""Announcements among the ranks that write a checkpoint: in this process, or through the store of their job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]


class Posts(Protocol):
    """Key-value store in which ranks announce what they have written."""

    def post(self, key: str, text: str) -> None:
        """Store a text."""
        ...

    def read(self, keys: Sequence[str]) -> list[str] | None:
        """Return the texts of keys; None if there are not all of them yet."""
        ...

    def remove(self, keys: Sequence[str]) -> None:
        """Forget keys, of which some may not be there."""
        ...


class LocalPosts:
    """Announcements between stages of one process."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def post(self, key: str, text: str) -> None:
        """Store a text."""
        self._texts[key] = text

    def read(self, keys: Sequence[str]) -> list[str] | None:
        """Return the texts of keys; None if there are not all of them yet."""
        return [self._texts[key] for key in keys] if all(key in self._texts for key in keys) else None

    def remove(self, keys: Sequence[str]) -> None:
        """Forget keys, of which some may not be there."""
        for key in keys:
            self._texts.pop(key, None)


class StorePosts:
    """Announcements through the job's store; reads never block, as the store serves one caller per process at a time.

    Args:
        store: may hold announcements under other names, from workers that failed and were restarted.
        name: keeps this object's announcements apart.
    """

    def __init__(self, store: Store, name: str) -> None:
        self._store = PrefixStore(f"penstock/checkpoint/{name}", store)

    def post(self, key: str, text: str) -> None:
        """Store a text."""
        self._store.set(key, text)

    def read(self, keys: Sequence[str]) -> list[str] | None:
        """Return the texts of keys; None if there are not all of them yet. However many keys, a look is one request."""
        if not self._store.check(list(keys)):
            return None
        if self._store.has_extended_api():  # type: ignore[attr-defined]
            return [text.decode() for text in self._store.multi_get(list(keys))]
        return [self._store.get(key).decode() for key in keys]

    def remove(self, keys: Sequence[str]) -> None:
        """Forget keys, of which some may not be there."""
        for key in keys:
            self._store.delete_key(key)
