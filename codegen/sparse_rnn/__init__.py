"""Sparse persistent recurrences (Zhu et al. 2018, "Sparse Persistent RNNs", arXiv 1804.10223).

The non-zero recurrent weights stay on chip for all timesteps.

- The op: ``recurrence`` (registration, autograd), ``cells``, ``stepwise`` (by sparse products of
  the library), ``pattern``; ``decide`` says where it pays off.
- Weights: ``pack``, with ``layout``, ``deal``, ``order`` and the model of ``banks``.
- Kernels: ``plan`` what fits on ``devices`` within ``limits``; ``emit*`` the text from a ``spec``;
  ``reference`` and ``fast`` (``fast_part``) prepare, with an ``exchange``, and ``launch``.
  ``kernels`` says which recurrences run by them, and keeps patterns while their ``owners`` live.
- Proof without a GPU: ``interleave``, ``gluon_shim`` and ``interpreted`` run the text in Triton's
  interpreter; ``compile``, ``sass`` and ``static_checks`` look at the machine code.
"""
