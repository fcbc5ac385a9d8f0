"""Small kernels whose blocks meet in memory."""

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def add_atomically(total_ptr, times: tl.constexpr):  # type: ignore[no-untyped-def]
    for _ in range(times):
        tl.atomic_add(total_ptr, 1, sem="relaxed", scope="gpu")


@triton.jit  # type: ignore[untyped-decorator]
def add_plainly(total_ptr, times: tl.constexpr):  # type: ignore[no-untyped-def]
    for _ in range(times):
        tl.store(total_ptr, tl.load(total_ptr, volatile=True) + 1)


@triton.jit  # type: ignore[untyped-decorator]
def pass_message(data_ptr, flag_ptr, got_ptr, SEND: tl.constexpr, RECEIVE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Block 0 writes data, then a flag; block 1 waits for the flag, then reads the data."""
    if tl.program_id(0) == 0:
        tl.store(data_ptr + tl.arange(0, 4), tl.arange(0, 4) + 5)
        tl.atomic_xchg(flag_ptr, 1, sem=SEND, scope="gpu")
    else:
        early = tl.load(data_ptr + tl.arange(0, 4))
        while tl.atomic_add(flag_ptr, 0, sem=RECEIVE, scope="gpu") == 0:
            pass
        tl.store(got_ptr + tl.arange(0, 4), tl.load(data_ptr + tl.arange(0, 4)) + early * 0)


@triton.jit
def wait_forever(flag_ptr):  # type: ignore[no-untyped-def]
    while tl.load(flag_ptr, volatile=True) == 0:
        pass


@triton.jit
def block_fails(flag_ptr):  # type: ignore[no-untyped-def]
    tl.store(flag_ptr + tl.program_id(0), 1)
    tl.static_assert(tl.program_id(0) != 1, "block 1 fails")
