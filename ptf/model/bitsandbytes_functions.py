"""The functions of bitsandbytes that convert to 4 and 8 bits and back, for NF4 weights and AdamW's 8-bit moments."""

import functools
import logging
from typing import Any

from ptf.errors import UserError


@functools.cache
def bitsandbytes_functions(key: str) -> Any:
    """Return bitsandbytes' functions; raises UserError, which says that `key` of the config needs them, if it is not
    installed."""
    # it warns of kernels for the CPU that it would download, and that nothing here calls
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        import bitsandbytes.functional as functions
    except ImportError as error:
        raise UserError(f"{key} needs bitsandbytes: pip install 'ptf[bitsandbytes]'") from error
    return functions
