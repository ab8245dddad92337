"""Test suites for custom parts. Subclass a contract in a test file to run its tests on your part."""

try:
    import pytest  # noqa: F401
except ImportError as error:
    raise ImportError("rein.testing needs pytest, which is not installed; run pip install pytest") from error

from rein.testing.agent_contract import AgentContract
from rein.testing.buffer_contract import BufferContract
from rein.testing.environment_contract import EnvironmentContract, check_environment
from rein.testing.stateful import StatefulContract
from rein.testing.store import StoreContract

__all__ = [
    "AgentContract",
    "BufferContract",
    "EnvironmentContract",
    "StatefulContract",
    "StoreContract",
    "check_environment",
]
