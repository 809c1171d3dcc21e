"""Signals at calls that block: EINTR by a handler without SA_RESTART, and the call goes on after one
with it. O_NONBLOCK of the program is obeyed, and set at any time."""

import os
import signal
import threading
import time

from verbs import *

device = first_device()
context = made("ibv_open_device", device)
idle = made("ibv_open_device", device)
channel = made("ibv_create_comp_channel", context)
made("ibv_create_cq", context, c.c_int(16), None, channel, c.c_int(0))
one, two, event = c.c_void_p(), c.c_void_p(), c.create_string_buffer(16)
CALLS = {
    "ibv_get_cq_event": lambda: call("ibv_get_cq_event", channel, c.byref(one), c.byref(two)),
    "ibv_get_async_event": lambda: call("ibv_get_async_event", context, event),
    "ibv_get_async_event, nothing open": lambda: call("ibv_get_async_event", idle, event),
}
FDS = dict(zip(CALLS, [word(channel + 8), word(context + 268), word(idle + 268)]))
handled = []
signal.signal(signal.SIGUSR1, lambda *_: handled.append(1))
# Which handler ran is not known: Python's own has no SA_RESTART.
signal.siginterrupt(signal.SIGINT, False)
# Faults do not interrupt a call. Their handlers, which other libraries have, say nothing of it.
signal.signal(signal.SIGSEGV, lambda *_: None)
main = threading.main_thread().ident


def kill_at(times):
    """Sends the signal at these times, the last without SA_RESTART."""
    start = time.monotonic()
    for at in times:
        time.sleep(max(0, start + at - time.monotonic()))
        signal.siginterrupt(signal.SIGUSR1, at == times[-1])
        signal.pthread_kill(main, signal.SIGUSR1)


for name, blocks in CALLS.items():
    for times in [(0.2,), (0.1, 0.2, 0.6)]:
        signal.siginterrupt(signal.SIGUSR1, len(times) == 1)
        handled.clear()
        thread = threading.Thread(target=kill_at, args=(times,))
        start = time.monotonic()
        thread.start()
        got = blocks()
        took = time.monotonic() - start
        thread.join()
        assert got == (-1, errno.EINTR), (name, times, got)
        assert times[-1] - 0.05 <= took < times[-1] + 10, (name, times, took)
        assert handled
    os.set_blocking(FDS[name], False)
    assert blocks() == (-1, errno.EAGAIN), name
    os.set_blocking(FDS[name], True)

# Destruction waits for events that were taken and not acknowledged, whatever signals come, as
# pthread_cond_wait(3) does in rdma-core.
pd = made("ibv_alloc_pd", context)
cq = made("ibv_create_cq", context, c.c_int(16), None, channel, c.c_int(0))
words = struct.pack("<QII", 0, 4, 1) + bytes(8)
srq = made("ibv_create_srq", pd, c.create_string_buffer(words, 24))


def broken(srq):
    """A queue pair in ERR."""
    init_with = init(RC, cq, cq)
    struct.pack_into("<Q", init_with, 24, srq)
    qp = made("ibv_create_qp", pd, init_with)
    bits = STATE | PKEY | PORT | ACCESS
    made("ibv_modify_qp", qp, attributes(qp_state=INIT, port_num=1), c.c_int(bits))
    made("ibv_modify_qp", qp, attributes(qp_state=ERR), c.c_int(STATE))
    return qp


assert operation(context, 104, c.c_int, c.c_void_p, c.c_int)(cq, 0) == 0
qps = [broken(0), broken(srq)]
request, bad = c.create_string_buffer(32), c.c_void_p()
post_recv(context)(qps[0], c.addressof(request), c.addressof(bad))
assert call("ibv_get_cq_event", channel, c.byref(one), c.byref(two)) == (0, 0)
assert one.value == cq
# IBV_EVENT_QP_LAST_WQE_REACHED.
assert call("ibv_get_async_event", context, event) == (0, 0)
assert (word(c.addressof(event), c.c_void_p), word(c.addressof(event) + 8)) == (qps[1], 16)


def signals_and(last):
    kill_at((0.1, 0.2, 0.3))
    time.sleep(0.1)
    last()


for name, handle, last in [
    ("ibv_destroy_qp", qps[1], lambda: call("ibv_ack_async_event", event)),
    ("ibv_destroy_qp", qps[0], None),
    ("ibv_destroy_cq", cq, lambda: call("ibv_ack_cq_events", cq, c.c_uint(1))),
]:
    thread = threading.Thread(target=signals_and, args=(last,)) if last else None
    handled.clear()
    start = time.monotonic()
    if thread:
        thread.start()
    assert call(name, handle)[0] == 0, name
    took = time.monotonic() - start
    if thread:
        thread.join()
        assert 0.35 <= took < 10 and handled, (name, took)
print("all as expected")
