"""Apache Airflow provider for vLLM."""

__version__ = "0.1.0"
