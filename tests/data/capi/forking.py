"""Forks while threads of the program list and open devices, and one of the library is asked for the
counters: each child lists, opens and ends in time."""

import glob
import os
import signal
import socket
import tempfile
import threading
import traceback

folder = tempfile.TemporaryDirectory()
os.environ["ROCINANTE_PATHS"] = folder.name + "/root"

from verbs import *

lib.ibv_get_device_name.restype = c.c_char_p


def name(device):
    return lib.ibv_get_device_name(c.c_void_p(device))


def devices():
    count = c.c_int()
    found = made("ibv_get_device_list", c.byref(count))
    all_of_them = [word(found + 8 * at, c.c_void_p) for at in range(count.value)]
    call("ibv_free_device_list", found)
    return all_of_them


def use(device):
    context = made("ibv_open_device", device)
    made("ibv_dealloc_pd", made("ibv_alloc_pd", context))
    made("ibv_close_device", context)


def asks():
    [path] = glob.glob(f"{folder.name}/counters-*/live/{os.getpid()}-0")
    with socket.socket(socket.AF_UNIX) as question:
        question.connect(path)
        question.recv(1)


known = devices()
names = [name(it) for it in known]
# It stays open.
made("ibv_alloc_pd", made("ibv_open_device", known[0]))
ends = threading.Event()


def again(what):
    while not ends.is_set():
        what()


threads = [threading.Thread(target=again, args=[what], daemon=True)
           for what in (asks, devices, lambda: use(known[0]), lambda: use(known[1]))]
for thread in threads:
    thread.start()


def child_does(turn):
    signal.alarm(20)
    # The devices of its parent are still devices, and have the same names.
    again_named = [[name(it) for it in some] for some in (known, devices())]
    assert again_named == [names, names], again_named
    if turn % 4:
        use(known[turn % 2])
    c.CDLL(None).exit(0)


for turn in range(40):
    child = os.fork()
    if child == 0:
        try:
            child_does(turn)
        finally:
            traceback.print_exc()
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0, turn
ends.set()
for thread in threads:
    thread.join()
folder.cleanup()
print("all as expected")
