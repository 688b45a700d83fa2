"""Choosing a method, Λ and τ for the user: a few cheap rounds of each candidate, judged on validation samples.

``candidates`` says what is tried, ``trials`` trains it by halving and decides, ``choice`` is what comes out, and
``choose`` is the way in, from Python or from a config.
"""
