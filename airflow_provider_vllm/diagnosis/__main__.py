"""`python -m airflow_provider_vllm.diagnosis LOG`: diagnoses one log of a vLLM server."""

from __future__ import annotations

import argparse
import sys

from airflow_provider_vllm.diagnosis.command import add_arguments, run


def main() -> int:
    """Reads the command line and returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m airflow_provider_vllm.diagnosis",
        description="Names the root cause in the log of a vLLM server.",
    )
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
