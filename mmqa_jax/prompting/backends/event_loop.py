"""An event loop beside the caller's own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any


class EventLoop:
    """An event loop in its own thread, so that callers may run one too (notebooks)."""

    def start(self) -> EventLoop:
        """Starts the loop; a `with` block does so too, and closes it."""
        self._loop = asyncio.new_event_loop()
        # A daemon, so that Ctrl-C does not wait for answers.
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        """Cancels what is under way, and ends the loop."""
        self.run(self._cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> EventLoop:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> concurrent.futures.Future:
        """Starts a coroutine."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Runs a coroutine and waits for its result."""
        return self.submit(coroutine).result()

    async def _cancel_all(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
