#!/bin/sh
# The guest's first process: mounts, modules, and then the program that the host talks to.
export PATH=/usr/bin:/usr/sbin:/bin:/sbin HOME=/root
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev 2>/dev/null
mkdir -p /dev/pts /dev/shm
mount -t devpts pts /dev/pts
mount -t tmpfs shm /dev/shm
mount -t tmpfs tmp /tmp
mount -t tmpfs run /run
mount -t bpf bpf /sys/fs/bpf 2>/dev/null
ln -sf /proc/self/fd /dev/fd
for module in virtio_mmio virtio_net virtio_console virtio_rng 9pnet_virtio 9p; do modprobe -q $module 2>/dev/null; done
ulimit -l unlimited
ulimit -n 65536
ip link set lo up
sysctl -qw net.core.rmem_max=16777216 net.core.wmem_max=16777216 2>/dev/null
mount -t 9p -o trans=virtio,version=9p2000.L,msize=262144,cache=loose,ro host /host
mount -t 9p -o trans=virtio,version=9p2000.L,msize=262144,cache=none share /share 2>/dev/null
/host/rocinante-interop control
echo "the control program ended"
reboot -f
