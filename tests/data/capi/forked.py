"""A child of fork that lives on keeps nothing of its parent's device alive; its copies of objects
return at once; and it opens the device anew."""

import os
import socket
import time

from verbs import *


def objects():
    context = made("ibv_open_device", first_device())
    pd = made("ibv_alloc_pd", context)
    channel = made("ibv_create_comp_channel", context)
    cq = made("ibv_create_cq", context, c.c_int(16), None, channel, c.c_int(0))
    qp = made("ibv_create_qp", pd, init(RC, cq, cq))
    memory = c.create_string_buffer(4096)
    mr = made("ibv_reg_mr", pd, memory, c.c_size_t(4096), c.c_int(1))
    srq = made("ibv_create_srq", pd, c.create_string_buffer(bytes(8) + bytes([4, 0, 0, 0, 1]), 32))
    return {"context": context, "pd": pd, "channel": channel, "cq": cq, "qp": qp, "mr": mr,
            "srq": srq, "memory": memory}


def own(pipe, until, died):
    """Opens the device, forks a child, and ends. The child outlives it."""
    have = objects()
    address = socket.inet_ntop(socket.AF_INET, gid(have["context"], 0)[12:])
    if os.fork():
        os._exit(0)
    # Its parent's end is seen by a pipe that only the parent and the main process have.
    start = time.monotonic()
    for name, arguments in [
        ("ibv_alloc_pd", [have["context"]]),
        ("ibv_create_cq", [have["context"], c.c_int(1), None, None, c.c_int(0)]),
        ("ibv_get_async_event", [have["context"], c.create_string_buffer(16)]),
    ]:
        assert call(name, *arguments)[1] == errno.EIO, name
    some = c.create_string_buffer(256)
    for name, arguments in [
        ("ibv_create_qp", [have["pd"], init(RC, have["cq"], have["cq"])]),
        ("ibv_create_srq", [have["pd"], some]),
        ("ibv_create_ah", [have["pd"], some]),
        ("ibv_reg_mr", [have["pd"], have["memory"], c.c_size_t(64), c.c_int(1)]),
        ("ibv_rereg_mr", [have["mr"], c.c_int(4), None, None, c.c_size_t(0), c.c_int(1)]),
        ("ibv_resize_cq", [have["cq"], c.c_int(32)]),
        ("ibv_modify_qp", [have["qp"], some, c.c_int(1)]),
        ("ibv_query_qp", [have["qp"], some, c.c_int(1), c.create_string_buffer(256)]),
        ("ibv_modify_srq", [have["srq"], some, c.c_int(2)]),
        ("ibv_query_srq", [have["srq"], some]),
        ("ibv_attach_mcast", [have["qp"], some, c.c_int(0)]),
        ("ibv_detach_mcast", [have["qp"], some, c.c_int(0)]),
    ]:
        assert call(name, *arguments)[1] == errno.EIO, (name, call(name, *arguments))
    wc = c.create_string_buffer(64)
    assert poll_cq(have["context"])(have["cq"], 1, wc) == -errno.EIO
    for post in (post_send, post_recv):
        assert post(have["context"])(have["qp"], some, some) == errno.EIO, post
    for name, kind in [("destroy_qp", "qp"), ("destroy_srq", "srq"), ("destroy_cq", "cq"), ("dereg_mr", "mr"),
                       ("destroy_comp_channel", "channel"), ("dealloc_pd", "pd"),
                       ("close_device", "context")]:
        assert call(f"ibv_{name}", have[kind])[0] == 0, name
    assert time.monotonic() - start < 5
    os.write(pipe, address.encode())
    os.read(until, 1)
    # The device is free: this child and another open it anew, one after the other.
    objects()
    if os.fork() == 0:
        os._exit(0)
    os.wait()
    os.write(pipe, b"opened")
    os.read(until, 1)
    os._exit(0)


ends, goes = os.pipe(), os.pipe()
parent = os.fork()
if parent == 0:
    os.close(ends[0])
    os.close(goes[1])
    own(ends[1], goes[0], None)
os.close(ends[1])
os.waitpid(parent, 0)
address = os.read(ends[0], 64).decode()
assert address, "the child failed"
# The parent has ended, and its child lives on.
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as port:
    port.bind((address, 4791))
os.write(goes[1], b".")
assert os.read(ends[0], 64) == b"opened"
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as port:
    try:
        port.bind((address, 4791))
        raise AssertionError("the child has the port")
    except OSError as error:
        assert error.errno == errno.EADDRINUSE
os.write(goes[1], b".")
print("all as expected")
