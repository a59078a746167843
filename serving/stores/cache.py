"""HistoryCache: histories in Redis, shared by the processes that share a store.

A cached history carries two tokens: that of its user and that of the whole store. A write replaces
the user's token before it is acknowledged, so an older history is never used again, whichever
process caches it and when. No lock is needed. A history that Redis does not have is read from the
store. If Redis is unreachable, only speed is lost: it is tried again after a second, and then all
cached histories are invalidated first, because Redis may have missed writes. The same holds for
every new connection: a server that was restarted from an older copy, or a replica that took over,
has older tokens.
"""

import hashlib
import json
import logging
import time
import uuid
from typing import Any

from recsys.errors import ConfigError

try:
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry
except ImportError as error:
    raise ConfigError(
        "a history cache needs redis; install the extra: pip install 'recbeam[redis]'"
    ) from error

from collections.abc import Callable, Iterable

from recsys.serving.stores.locations import place_of
from recsys.serving.stores.records import Observer, TypedHistory

logger = logging.getLogger("recsys.serving.stores")
TTL_S = 300  # also the longest that a process without a connection to Redis can leave it stale
TIMEOUT_S = 0.1
AWAY_S = 1.0


class HistoryCache:
    """Histories in Redis."""

    def __init__(self, url: str, store_id: str, observer: Observer | None = None) -> None:
        """Use the Redis at `url` for the store with this id; it is not connected yet."""
        place_of(url, "serve.history_cache")
        try:
            self._redis = redis.Redis.from_url(
                url,
                socket_timeout=TIMEOUT_S,
                socket_connect_timeout=TIMEOUT_S,
                retry=Retry(NoBackoff(), 0),
                decode_responses=True,
                redis_connect_func=self._connected,
            )
        except ValueError as error:
            raise ConfigError(f"serve.history_cache: {error}") from error
        self._prefix = f"recsys:{store_id}:"
        self._observer = observer
        # Number of writes that Redis missed, and how many of them were followed by an invalidation
        # of everything. A flag would not do: a write may be missed during the invalidation.
        self._missed = 1  # possibly, before this process
        self._settled = 0
        self._away_until = 0.0
        self._is_away = False

    def history(
        self, user_id: str, limit: int, read: Callable[[str, int], TypedHistory | None]
    ) -> TypedHistory | None:
        """A user's history of at most `limit` items, which `read` reads if Redis has none."""
        key = f"{self._user_key(user_id)}:history:{limit}"
        tokens, cached = self._look(user_id, key)
        hit = tokens is not None and cached is not None and cached[0] == tokens
        if self._observer is not None:
            self._observer.history_cache(hit=hit)
        if hit:
            if cached[1] is None:
                return None
            items, types, disliked, earlier = cached[1]
            pairs = tuple((item, name) for item, name in earlier)
            return TypedHistory(items, types, tuple(disliked), pairs)
        history = read(user_id, limit)
        if tokens is not None and self._usable():
            try:
                self._redis.set(key, json.dumps([tokens, history]), ex=TTL_S)
                self._answered()
            except redis.RedisError as error:
                self._failed(error)
        return history

    def invalidate(self, users: Iterable[str]) -> None:
        """Invalidate these users' histories."""
        if time.monotonic() < self._away_until:
            self._missed += 1
            return
        try:
            with self._redis.pipeline(transaction=False) as pipeline:
                for user_id in users:
                    pipeline.set(self._user_key(user_id), uuid.uuid4().hex, ex=2 * TTL_S)
                pipeline.execute()
            self._answered()
        except redis.RedisError as error:
            self._missed += 1
            self._failed(error)

    def invalidate_all(self) -> None:
        """Invalidate every history."""
        self._missed += 1
        self._usable()

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()

    def _look(self, user_id: str, key: str) -> tuple[str | None, Any]:
        """The tokens of now, None if Redis cannot be used, and what is cached under the key."""
        if not self._usable():
            return None, None
        names = f"{self._prefix}all", self._user_key(user_id)
        try:
            *tokens, cached = self._redis.mget(*names, key)
            if None in tokens:
                with self._redis.pipeline(transaction=False) as pipeline:
                    for name in names:
                        pipeline.set(name, uuid.uuid4().hex, nx=True, ex=2 * TTL_S)
                    pipeline.mget(*names)
                    tokens = pipeline.execute()[-1]
            self._answered()
        except redis.RedisError as error:
            self._failed(error)
            return None, None
        if self._missed != self._settled:  # a new connection: what it says may be old
            return None, None
        return ":".join(map(str, tokens)), None if cached is None else json.loads(cached)

    def _usable(self) -> bool:
        """Whether Redis can be used; missed writes are first followed by an invalidation."""
        if time.monotonic() < self._away_until:
            return False
        missed = self._missed
        if missed == self._settled:
            return True
        try:
            self._redis.set(f"{self._prefix}all", uuid.uuid4().hex)
        except redis.RedisError as error:
            self._failed(error)
            return False
        self._settled = missed
        self._answered()
        return missed == self._missed

    def _connected(self, connection: Any) -> None:
        """Prepare a new connection; whether writes are missing on the server is not known."""
        connection.on_connect()
        self._missed += 1

    def _user_key(self, user_id: str) -> str:
        # Ids are hashed: they may be long, and Redis shall not hold a list of users.
        return self._prefix + hashlib.blake2b(user_id.encode(), digest_size=16).hexdigest()

    def _answered(self) -> None:
        if self._is_away:
            self._is_away = False
            logger.info("history cache: Redis is back")

    def _failed(self, error: Exception) -> None:
        self._away_until = time.monotonic() + AWAY_S
        if not self._is_away:
            self._is_away = True
            logger.warning("history cache: %s; histories are read from the store", error)
