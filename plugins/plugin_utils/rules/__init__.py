"""Verdicts: each rule is a small pure function over a fleet of snapshots."""
