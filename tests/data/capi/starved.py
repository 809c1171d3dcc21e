"""libibverbs in a process that runs out of something, by ctypes. The argument says of what.

Each call gives an object or an errno; nothing crashes, hangs or prints, and what is there goes on.
"""

import ctypes as c
import errno
import os
import resource
import signal
import sys
import threading
import time

lib = c.CDLL("libibverbs.so.1", use_errno=True)
for name in ["get_device_list", "open_device", "alloc_pd", "reg_mr", "create_cq", "create_qp",
             "create_srq", "create_comp_channel"]:
    getattr(lib, "ibv_" + name).restype = c.c_void_p


def call(name, *arguments):
    c.set_errno(0)
    arguments = [c.c_void_p(a) if a is None or a > 1 << 32 else c.c_int(a) for a in arguments]
    return getattr(lib, name)(*arguments)


def opened(index=0):
    devices = call("ibv_get_device_list", None)
    assert devices
    context = call("ibv_open_device", c.c_void_p.from_address(devices + 8 * index).value)
    call("ibv_free_device_list", devices)
    return context


def queues(context, most):
    """Queues until there are no more; what the last call said."""
    made = []
    while len(made) < most:
        cq = call("ibv_create_cq", context, 4096, None, None, 0)
        if not cq:
            break
        made.append(cq)
    number = c.get_errno()
    for cq in made:
        assert lib.ibv_destroy_cq(c.c_void_p(cq)) == 0
    return len(made), number


def descriptors():
    context = opened()
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    channels = []
    while (channel := call("ibv_create_comp_channel", context)):
        channels.append(channel)
        assert len(channels) < 64
    assert c.get_errno() == errno.EMFILE, c.get_errno()
    # A second device cannot be opened, and says so; the list is as before, or says why not.
    other = opened_or_errno(1)
    assert other == errno.EMFILE, other
    assert lib.ibv_destroy_comp_channel(c.c_void_p(channels.pop())) == 0
    channel = call("ibv_create_comp_channel", context)
    assert channel, os.strerror(c.get_errno())
    for channel in channels + [channel]:
        assert lib.ibv_destroy_comp_channel(c.c_void_p(channel)) == 0
    assert queues(context, 3)[0] == 3


def opened_or_errno(index):
    devices = call("ibv_get_device_list", None)
    if not devices:
        return c.get_errno()
    context = call("ibv_open_device", c.c_void_p.from_address(devices + 8 * index).value)
    return 0 if context and call("ibv_create_cq", context, 1, None, None, 0) else c.get_errno()


def no_descriptor_at_all():
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 64))
    assert opened_or_errno(0) == errno.EMFILE
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    assert opened_or_errno(0) == 0


def memory():
    context = opened()
    assert queues(context, 1)[0] == 1
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    used = pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (24 << 20), resource.RLIM_INFINITY))
    made, number = queues(context, 1000)
    assert made < 1000 and number == errno.ENOMEM, (made, number)
    cq = call("ibv_create_cq", context, 1 << 20, None, None, 0)
    assert not cq and c.get_errno() == errno.ENOMEM, c.get_errno()
    assert queues(context, 1)[0] == 1


def memory_at_the_beginning():
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (4 << 20), -1))
    number = opened_or_errno(0)
    assert number in (errno.ENOMEM, errno.EAGAIN), number


def closed_descriptors():
    context = opened()
    channel = call("ibv_create_comp_channel", context)
    cq = call("ibv_create_cq", context, 16, None, channel, 0)
    assert cq
    os.closerange(3, 256)
    time.sleep(0.05)
    for _ in range(3):
        call("ibv_create_comp_channel", context)
        call("ibv_create_cq", context, 16, None, None, 0)
        assert call("ibv_get_device_list", None)


def forks():
    contexts = [opened(0), opened(1)]
    ends = threading.Event()

    def make():
        while not ends.is_set():
            for context in contexts:
                queues(context, 2)

    threads = [threading.Thread(target=make) for _ in range(2)]
    for thread in threads:
        thread.start()
    for turn in range(30):
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            # It lists, destroys what is its parent's, or only ends.
            if turn % 3 == 0:
                assert call("ibv_get_device_list", None)
            elif turn % 3 == 1:
                assert lib.ibv_close_device(c.c_void_p(contexts[0])) == 0
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0, turn
    ends.set()
    for thread in threads:
        thread.join()


globals()[sys.argv[1]]()
print("as expected")
