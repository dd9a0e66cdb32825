"""What `preflight` looks at, one subject per module; each gives findings and changes nothing."""
