# An optional package: whatever is imported from it is Any.
from typing import Any

def __getattr__(name: str) -> Any: ...
