"""Shared code of environments: simulation in torch, seeding, contract checks, spaces and drawing."""
