"""Federations: whose data is whose."""
