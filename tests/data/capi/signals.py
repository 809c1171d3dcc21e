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
print("all as expected")
