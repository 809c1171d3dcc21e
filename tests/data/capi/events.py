"""Two contexts that make no object take the events of their port, by a blocking call and by epoll,
and say each on standard error with the GID table."""

import os
import select
import sys
import threading

from verbs import *

device = first_device()
contexts = [made("ibv_open_device", device) for _ in range(2)]


def table(context):
    entries = c.create_string_buffer(32 * 16)
    count = lib.ibv_query_gid_table(c.c_void_p(context), entries, c.c_size_t(16), c.c_uint32(0),
                                    c.c_size_t(32))
    assert count >= 0, os.strerror(-count)
    rows = [struct.unpack_from("<16sI", entries, 32 * at) for at in range(count)]
    # Each entry has its index, and a hole has none.
    for at in range(16):
        there = [address for address, index in rows if index == at]
        entry = c.create_string_buffer(32)
        got = lib._ibv_query_gid_ex(c.c_void_p(context), c.c_uint32(1), c.c_uint32(at), entry,
                                    c.c_uint32(0), c.c_size_t(32))
        kind = c.c_int(7)
        made("ibv_query_gid_type", context, c.c_uint8(1), c.c_uint(at), c.byref(kind))
        assert (got, kind.value) == ((0, 1) if there else (errno.ENODATA, 0)), (at, got, kind)
        assert gid(context, at) == (there[0] if there else bytes(16))
    return " ".join(f"{index}={'.'.join(map(str, address[12:]))}" for address, index in rows)


def say(who, event):
    sys.stderr.write(f"{who} ({word(c.addressof(event) + 8)}) {table(contexts[who])}\n")


def blocked():
    while True:
        event = c.create_string_buffer(16)
        made("ibv_get_async_event", contexts[0], event)
        say(0, event)
        lib.ibv_ack_async_event(event)


fd = word(contexts[1] + 268)
os.set_blocking(fd, False)
event = c.create_string_buffer(16)
value, number = call("ibv_get_async_event", contexts[1], event)
assert (value, number) == (-1, errno.EAGAIN)
epoll = select.epoll()
epoll.register(fd, select.EPOLLIN | select.EPOLLET)
threading.Thread(target=blocked, daemon=True).start()
sys.stderr.write(f"ready {table(contexts[1])}\n")
while True:
    epoll.poll()
    while call("ibv_get_async_event", contexts[1], event)[0] == 0:
        say(1, event)
