"""From facts to plans: what a role should write, install or start, computed before anything is touched."""
