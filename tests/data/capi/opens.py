"""Opens the first device and a protection domain there. Prints the refused call, and its errno."""

import ctypes as c
import errno

from verbs import call, word


def refusal():
    devices, number = call("ibv_get_device_list", None)
    if not devices:
        return "ibv_get_device_list", number
    given = word(devices, c.c_void_p)
    # The second time it is refused for the same reason, which is printed once.
    for name in ["ibv_open_device", "ibv_alloc_pd"]:
        made, number = call(name, given)
        if not made:
            return name, call(name, given)[1]
        given = made
    return "nothing", 0


what, number = refusal()
print(what, errno.errorcode.get(number, number))
