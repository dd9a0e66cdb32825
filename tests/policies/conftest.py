"""Gives Airflow a home of its own before it is imported."""

from tests import airflow_unit  # noqa: F401
