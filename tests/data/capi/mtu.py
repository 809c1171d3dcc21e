"""A port's MTU is the one that its open device takes, whatever its link carries since then."""

import signal
import sys

from verbs import *

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
context = made("ibv_open_device", first_device())
pd = made("ibv_alloc_pd", context)
cq = made("ibv_create_cq", context, c.c_int(16), None, None, c.c_int(0))
qp = made("ibv_create_qp", pd, init(RC, cq, cq))


def active_mtu():
    port = c.create_string_buffer(256)
    assert call("ibv_query_port", context, c.c_uint8(1), port)[0] == 0
    return int.from_bytes(port[8:12], sys.byteorder)


assert active_mtu() == 3
sys.stderr.write("ready\n")
signal.sigwait({signal.SIGUSR1})
assert active_mtu() == 3
print("all as expected")
