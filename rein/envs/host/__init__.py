"""Environments that are stepped on the host: simulators of any API, in this process, in threads or in processes."""
