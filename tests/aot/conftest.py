"""The processes that compile. They are apart from the tests' own, in which Triton's interpreter may be on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from tests.aot import workers


@pytest.fixture(scope="session")
def pool() -> Iterator[ProcessPoolExecutor]:
    with workers.pool() as pool:
        yield pool
        pool.shutdown(cancel_futures=True)


@pytest.fixture
def there(pool: ProcessPoolExecutor) -> Callable[..., Any]:
    """Call a function of `workers` in one of the processes; its exception comes back."""
    return lambda function, *args, **kwargs: pool.submit(function, *args, **kwargs).result()
