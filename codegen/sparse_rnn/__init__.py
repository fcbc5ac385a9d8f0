"""Sparse persistent recurrences (Zhu et al. 2018, "Sparse Persistent RNNs", arXiv 1804.10223).

The non-zero recurrent weights stay on chip for all timesteps. The layers, low to high: ``layout``
(which slot holds which non-zero), ``deal`` and ``order`` (bank-aware), ``banks`` (the model of
shared memory), ``pack`` (the words), ``plan`` (what fits on a device), ``recurrence`` (the op).
"""
