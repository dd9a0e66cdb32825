"""Set-up, demo and test stack: what `make` runs. Nothing here is part of the installed package."""
