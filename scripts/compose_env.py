"""Writes `.env` with fresh secrets for docker-compose.yaml, readable by its owner alone.

Enters: nothing. Leaves: `.env` in the checkout. An existing one is kept: its secrets open the
database that the volumes hold.
"""

from __future__ import annotations

import base64
import secrets
from pathlib import Path

from scripts.airflow_config import write_private
from scripts.set_up import ROOT

SECRETS = {
    "POSTGRES_PASSWORD": lambda: secrets.token_urlsafe(32),
    "REDIS_PASSWORD": lambda: secrets.token_urlsafe(32),
    "AIRFLOW_FERNET_KEY": lambda: base64.urlsafe_b64encode(secrets.token_bytes(32)).decode(),
    "AIRFLOW_API_SECRET_KEY": lambda: secrets.token_urlsafe(32),
    "AIRFLOW_JWT_SECRET": lambda: secrets.token_urlsafe(64),
}


def write_env(path: Path) -> bool:
    """Write the file; False where there is one already."""
    if path.exists():
        return False
    write_private(path, "".join(f"{name}={make()}\n" for name, make in SECRETS.items()))
    return True


if __name__ == "__main__":
    target = ROOT / ".env"
    print(f"{target}: {'written' if write_env(target) else 'kept'}")
