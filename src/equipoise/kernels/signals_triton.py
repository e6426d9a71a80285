"""How kernels of several ranks take turns: signals in each other's memory, and bounded waits for them.

An operation has a channel and counts its runs, on the device. Its n-th run on a rank tells every peer that it has begun
(with a number for them, if it has one) and that it has ended. Words on a rank's pad are written by one peer each, so
they only grow; one word of each says that it has abandoned the group, and whoever waits for it in vain then ends.
Releases and acquires are of system scope: what a program has written before its signal, other ranks' programs read
after their wait, and so do later kernels of their streams.

Layout of the control words (int64) and of the pads: `kernels/peers.py`. P ranks.
"""

import time

import triton
import triton.language as tl

from equipoise.kernels.triton_support import is_interpreted

WORDS = tl.constexpr(32)
TICKET = tl.constexpr(16)
LEFT = tl.constexpr(512)
"""Row of a pad, behind those of the channels, with the words of ranks that have abandoned the group."""
NUMBER_BITS = tl.constexpr(20)
"""A signal is the run's number times 2**20, plus the number for the peers."""


if is_interpreted():

    def give_way() -> None:
        """A wait takes the processor from the rank that it waits for."""
        time.sleep(1e-3)

else:

    @triton.jit
    def give_way():
        """Nothing: others run beside a kernel that waits."""
        pass


@triton.jit
def pad_words(pads_ptr, owner, channel, is_end: tl.constexpr, P: tl.constexpr):
    """The words of one channel on one rank's pad."""
    return tl.load(pads_ptr + owner).to(tl.pointer_type(tl.int64)) + (channel * 2 + is_end) * P


@triton.jit
def current_run(control_ptr, channel):
    """Number of the run that is under way: every program reads it before the last one counts it."""
    return tl.load(control_ptr + (channel + 1) * WORDS, volatile=True) + 1


@triton.jit
def signal_peers(pads_ptr, channel, rank, value, is_end: tl.constexpr, P: tl.constexpr, P_PAD: tl.constexpr):
    """Tells every rank, this one too; all that the program wrote before is seen by those who have waited."""
    tl.debug_barrier()
    peer = tl.arange(0, P_PAD)
    pad = tl.load(pads_ptr + peer, mask=peer < P, other=0).to(tl.pointer_type(tl.int64))
    word = pad + (channel * 2 + is_end) * P + rank
    tl.atomic_xchg(word, tl.zeros([P_PAD], tl.int64) + value, mask=peer < P, sem="release", scope="sys")


@triton.jit
def wait_for_peers(
    control_ptr, pads_ptr, channel, rank, run, is_end: tl.constexpr, P: tl.constexpr, P_PAD: tl.constexpr
):
    """Returns when every rank has signalled this run. When one has abandoned the group or the limit is reached, it
    reports that."""
    peer = tl.arange(0, P_PAD)
    word = pad_words(pads_ptr, rank, channel, is_end, P) + peer
    goal = run << NUMBER_BITS
    limit = tl.load(control_ptr, volatile=True)
    # Plain reads while it is not there: atomic ones queue up, and each would order all memory accesses.
    seen = tl.load(word, mask=peer < P, other=0, volatile=True)
    left_ptr = tl.load(pads_ptr + rank).to(tl.pointer_type(tl.int64)) + LEFT * P + peer
    spins = tl.zeros([], tl.int64)
    is_open = tl.min(tl.where(peer < P, seen, goal), 0) < goal
    while is_open & (spins < limit):
        has_left = tl.load(left_ptr, mask=peer < P, other=0, volatile=True)
        seen = tl.load(word, mask=peer < P, other=0, volatile=True)
        is_late = (peer < P) & (seen < goal)
        is_open = (tl.max(is_late.to(tl.int64), 0) > 0) & (tl.max(tl.where(is_late, has_left, 0), 0) == 0)
        spins += 1
        give_way()
    seen = tl.atomic_add(word, tl.zeros([P_PAD], tl.int64), mask=peer < P, sem="acquire", scope="sys")
    late = tl.min(tl.where((peer < P) & (seen < goal), peer, P), 0)
    if late < P:
        has_left = tl.load(left_ptr, mask=peer < P, other=0, volatile=True)
        left = tl.min(tl.where((seen < goal) & (has_left > 0), peer, P), 0)
        give_up(control_ptr, channel, tl.where(left < P, left, late), run, left < P)
    tl.debug_barrier()


@triton.jit
def give_up(control_ptr, channel, peer, run, has_left):
    """Tells the host, once, and ends all later waits. `has_left`: the peer has abandoned the group."""
    if tl.load(control_ptr, volatile=True) > 0:
        tl.store(control_ptr, tl.zeros([], tl.int64))
        status = tl.load(control_ptr + 1).to(tl.pointer_type(tl.int64))
        tl.store(status + 1, peer.to(tl.int64))
        tl.store(status + 2, run)
        tl.store(status + 5, has_left.to(tl.int64))
        tl.debug_barrier()
        tl.store(status, channel + 1 + run * 0)


@triton.jit
def arrives_last(control_ptr, channel, num_programs):
    """Whether this program is the last of its kernel; what the others wrote is then seen by it and its signals."""
    tl.debug_barrier()
    ticket = tl.atomic_add(control_ptr + (channel + 1) * WORDS + TICKET, 1, sem="acq_rel", scope="sys")
    tl.debug_barrier()
    return ticket == num_programs - 1


@triton.jit
def end_run(control_ptr, pads_ptr, channel, rank, run, num_programs, P: tl.constexpr, P_PAD: tl.constexpr):
    """At the end of every program: the last one tells the peers, waits for all of theirs, and counts the run."""
    if arrives_last(control_ptr, channel, num_programs):
        signal_peers(pads_ptr, channel, rank, run << NUMBER_BITS, True, P, P_PAD)
        wait_for_peers(control_ptr, pads_ptr, channel, rank, run, True, P, P_PAD)
        tl.store(control_ptr + (channel + 1) * WORDS + TICKET, tl.zeros([], tl.int64))
        tl.store(control_ptr + (channel + 1) * WORDS, run)


@triton.jit(do_not_specialize=["channel", "rank"])
def wait_kernel(control_ptr, pads_ptr, channel, rank, P: tl.constexpr, P_PAD: tl.constexpr):
    """A wait for a signal that nobody gives: to learn how long a spin takes."""
    wait_for_peers(control_ptr, pads_ptr, channel, rank, current_run(control_ptr, channel), True, P, P_PAD)


@triton.jit(do_not_specialize=["rank"])
def abandon_kernel(pads_ptr, rank, P: tl.constexpr):
    """One program per peer tells it; signals that were given stay."""
    pad = tl.load(pads_ptr + tl.program_id(0)).to(tl.pointer_type(tl.int64))
    tl.atomic_xchg(pad + LEFT * P + rank, tl.full([], 1, tl.int64), sem="release", scope="sys")
