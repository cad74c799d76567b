"""Disposable hosts to try Peerlane on: real systemd, SSH, apt and reboots, no GPU."""
