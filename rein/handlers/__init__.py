"""Plug-ins: each a plain function of a loop, in a file of its own; `docs/handlers.md` shows every one in use."""
