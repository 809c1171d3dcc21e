# A file of FUSE that another process has open, and whose server answers all but FLUSH. When this
# process, the server, ends, the kernel ends the waits for it. Prints "held".
import ctypes, os, struct, time

CLONE_NEWNS, MS_REC, MS_PRIVATE, PR_SET_PDEATHSIG, SIGKILL = 0x20000, 0x4000, 0x40000, 1, 9
LOOKUP, GETATTR, OPEN, FLUSH, INIT, ENOSYS = 1, 3, 14, 25, 26, 38

libc = ctypes.CDLL(None, use_errno=True)


def call(function, *arguments):
    if function(*arguments) != 0:
        raise OSError(ctypes.get_errno(), function.__name__)


def attributes(inode):
    mode = 0o40755 if inode == 1 else 0o100644
    return struct.pack("<6Q10I", inode, 0, 0, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


call(libc.unshare, CLONE_NEWNS)
call(libc.mount, b"none", b"/", None, MS_REC | MS_PRIVATE, None)
device = os.open("/dev/fuse", os.O_RDWR)
options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
call(libc.mount, b"test", b"/mnt", b"fuse", 0, options)
if os.fork() == 0:
    os.close(device)
    libc.prctl(PR_SET_PDEATHSIG, SIGKILL)
    held = os.open("/mnt/file", os.O_RDONLY)
    print("held", flush=True)
    time.sleep(600)
while True:
    _, operation, unique, node = struct.unpack("<IIQQ", os.read(device, 1 << 17)[:24])
    body, error = b"", 0
    if operation == INIT:
        body = struct.pack("<6I", 7, 31, 0, 0, 0, 4096).ljust(64, b"\0")
    elif operation == LOOKUP:
        body = struct.pack("<4Q2I", 2, 0, 1000, 1000, 0, 0) + attributes(2)
    elif operation == GETATTR:
        body = struct.pack("<Q2I", 1000, 0, 0) + attributes(node)
    elif operation == OPEN:
        body = struct.pack("<Q2I", 1, 0, 0)
    elif operation == FLUSH:
        continue
    else:
        error = -ENOSYS
    os.write(device, struct.pack("<IiQ", 16 + len(body), error, unique) + body)
