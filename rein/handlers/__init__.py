"""Plug-ins, each a plain function of a loop; `docs/handlers.md` shows every one in use."""
