"""Disposable hosts to try Peerlane on: real systemd, SSH, apt and reboots; as virtual machines with simulated GPUs."""
