"""The shapes that every other room speaks: evidence, facts, findings. Knows nothing of Ansible."""
