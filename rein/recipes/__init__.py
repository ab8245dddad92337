"""Runs with a name: each module holds one plain function of the same name that returns a loop, ready to run."""
