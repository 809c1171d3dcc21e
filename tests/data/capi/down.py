"""A fault takes the port down, and queries say so until its end."""

import os

os.environ["ROCINANTE_FAULT"] = "event=PORT_ERR,at=100ms,for=3s"

from verbs import *

PORT_ACTIVE, PORT_ERR = 9, 10
context = made("ibv_open_device", first_device())


def states():
    port = c.create_string_buffer(256)
    made("ibv_query_port", context, c.c_uint8(1), port)
    return word(c.addressof(port)), port.raw[45]


def event():
    found = c.create_string_buffer(16)
    made("ibv_get_async_event", context, found)
    lib.ibv_ack_async_event(found)
    return word(c.addressof(found) + 8)


assert states() == (4, 5)
pd = made("ibv_alloc_pd", context)
assert (event(), states()) == (PORT_ERR, (1, 3))
assert (event(), states()) == (PORT_ACTIVE, (4, 5))
print("all as expected")
