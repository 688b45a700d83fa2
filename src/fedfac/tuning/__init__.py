"""Tuning Λ, τ and κ: by search (paper 5.3), or Λ by itself from two rounds (the paper's first open problem).

``plan`` says what is searched, ``stages`` keeps what was tried (the only place that knows optuna beside ``worker``),
``worker`` trains it, in as many processes as there are, and ``automatic`` picks Λ without a search.
"""
