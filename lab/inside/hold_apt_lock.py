"""Runs inside a lab host as root: takes the lock that apt and dpkg take, and holds it for the given seconds."""

import fcntl
import sys
import time
from pathlib import Path

with Path("/var/lib/dpkg/lock-frontend").open("r+b") as handle:
    fcntl.lockf(handle, fcntl.LOCK_EX)
    time.sleep(float(sys.argv[1]))
