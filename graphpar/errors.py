"""All exceptions and warnings of graphpar.

What the user can mend derives from :class:`GraphparError`; a fault of graphpar itself is an
:class:`InternalError`. Notes (``add_note``) carry the user's source line, the node and the pass.
"""

from __future__ import annotations


class GraphparError(Exception):
    """Base of the errors that a user can mend."""


class InputError(GraphparError, ValueError):
    """An argument of the public interface is wrong; the message says what is legal."""


class TraceError(GraphparError, RuntimeError):
    """``torch.export`` could not trace the model."""


class PartitionError(GraphparError, RuntimeError):
    """No partition of the program satisfies what was asked for."""


class MeshError(GraphparError, RuntimeError):
    """Processes, groups or device meshes do not fit the program."""


class CheckpointError(GraphparError, RuntimeError):
    """A checkpoint is incomplete, or does not fit the model; the message names the tensor."""


class CapacityError(GraphparError, ValueError):
    """A sparse recurrence does not fit the format or the device; the message says what would."""


class KernelError(GraphparError, RuntimeError):
    """A generated kernel cannot run here, or gave up waiting for another block."""


class UnsupportedError(KernelError):
    """This machine cannot run a generated kernel; the message says what could."""


class WatchdogError(KernelError):
    """A block of a kernel waited in vain for another one."""


class RankMismatchError(MeshError):
    """Ranks hold different programs."""


class InternalError(Exception):
    """A fault of graphpar: a pass broke an invariant of the program."""


class VerifyError(InternalError):
    """The verifier refuses a program."""


class GraphparWarning(UserWarning):
    """Something works, but not in the way the user may expect."""
