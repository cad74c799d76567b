"""From the recorded output of benchmarks to measurements, each with the rung of the evidence ladder that it reached."""
