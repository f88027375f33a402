"""What other packages say while they are imported, and what is no news to anyone who runs `qrl`.

torchao tries to load GPU kernels that were built for other machines, and registers two enums in a
way that torch will no longer need.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

NO_NEWS = {
    "torchao": "Failed to load ",
    "torch.utils._pytree": "Calling register_constant() on Enum subclasses is deprecated",
}


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Import without these messages."""

    def is_news(record: logging.LogRecord) -> bool:
        return NO_NEWS[record.name] not in record.getMessage()

    loggers = [logging.getLogger(name) for name in NO_NEWS]
    for logger in loggers:
        logger.addFilter(is_news)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_news)
