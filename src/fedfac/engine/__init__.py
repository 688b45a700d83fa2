"""Engines run a cohort: in process, or over a network. They all speak the protocol in ``protocol``."""
