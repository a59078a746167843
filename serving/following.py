"""Following a store's journal: a process makes the changes that other processes have written."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from recsys.serving.stores.records import StoreError

LOOK_S = 1.0  # between two looks at the journal


async def follow(
    changing: asyncio.Lock, catch_up: Callable[[], Awaitable[object]], logger: logging.Logger
) -> None:
    """Call `catch_up` every `LOOK_S` seconds while holding `changing`, until cancelled.

    Failures are logged and do not end it.
    """
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            async with changing:
                await catch_up()
        except StoreError:
            pass  # the store logs it, and when it works again
        except Exception:
            logger.exception("changes of other processes could not be read")
