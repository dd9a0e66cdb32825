"""The worker of the operators' tests."""

from tests.operators.conftest import root

__all__ = ["root"]
