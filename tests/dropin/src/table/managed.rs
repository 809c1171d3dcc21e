//! Programs that connect by rdma_cm, on stock librdmacm.

use super::{NETDEVS, PERFTEST, Row, Says, Shape};

pub(super) fn rows() -> Vec<Row> {
    let mut rows = Vec::new();
    for (program, mode, server, ends, client, says) in MANAGED {
        let shape = Shape::Pair { server, ends, client, says };
        rows.extend(NETDEVS.map(|netdev| Row { program, mode, netdev, shape }));
    }
    for (program, mode, server, ends, client, says) in MANAGED_ELSEWHERE {
        let shape = Shape::Pair { server, ends, client, says };
        rows.push(Row { program, mode, netdev: "udp", shape });
    }
    // `-R` connects the measured queue pairs by rdma_cm, `-z` exchanges their numbers over it.
    for (program, _) in PERFTEST {
        for mode in ["-R", "-z"] {
            let shape = Shape::Pair {
                server: "exec $PROGRAM $MODE -F",
                ends: true,
                client: "exec $PROGRAM $MODE -F $THERE",
                says: Says::Figures,
            };
            rows.extend(NETDEVS.map(|netdev| Row { program, mode, netdev, shape }));
        }
    }
    rows
}

/// A program, its mode, the server's script and whether it ends by itself, the client's script,
/// and what it prints.
type Managed = (&'static str, &'static str, &'static str, bool, &'static str, Says);

/// Those of rdmacm-utils that run on every backend.
const MANAGED: [Managed; 10] = [
    (
        "rping",
        "-V",
        "exec rping -s -a $THERE",
        true,
        "exec rping -c -a $THERE -C 100 -V -v",
        Says::Word("rdma-ping-99"),
    ),
    ("ucmatose", "-c 10 -C 10", SERVER, true, CLIENT, Says::Word("return status 0")),
    ("udaddy", "-c 4", SERVER, true, CLIENT, Says::Word("return status 0")),
    (
        "mckey",
        "",
        "exec mckey -m 239.1.1.1 -b $THERE",
        true,
        "sleep 0.5; exec mckey -m 239.1.1.1 -b $HERE -s",
        Says::Word("return status 0"),
    ),
    (
        "rdma_client",
        "",
        "exec rdma_server",
        true,
        "exec rdma_client -s $THERE",
        Says::Word("rdma_client: end 0"),
    ),
    (
        "cmtime",
        "-c 100",
        "exec cmtime",
        false,
        "exec cmtime -s $THERE -c 100",
        Says::Word("disconnect"),
    ),
    (
        "rping",
        "-P, 4 clients",
        "exec rping -s -P -a $THERE",
        false,
        // Its server loses a request that comes before it has begun with the last one.
        "for i in 1 2 3 4; do rping -c -a $THERE -C 2000 -V & all=\"$all $!\"; sleep 0.3; done; \
         for one in $all; do wait $one || exit; done",
        Says::Nothing,
    ),
    ("rstream", "-S 65536 -I 100", ONCE_SERVER, true, ONCE_CLIENT, Says::Word("64k")),
    ("riostream", "-S 4096 -I 100", ONCE_SERVER, true, ONCE_CLIENT, Says::Word("4k")),
    (
        "rcopy",
        "",
        "exec rcopy",
        false,
        "cd $(mktemp -d) && head -c 3000000 /dev/urandom > from && rcopy $PWD/from $THERE:$PWD/to \
         && cmp from to && echo alike",
        Says::Word("alike"),
    ),
];

/// Others, on `udp`.
const MANAGED_ELSEWHERE: [Managed; 10] = [
    (
        "python3",
        "librspreload",
        "export LD_PRELOAD=$LD_PRELOAD:$RSOCKET; exec /usr/bin/python3 -c \"$ECHO_SERVER\"",
        true,
        "export LD_PRELOAD=$LD_PRELOAD:$RSOCKET; exec /usr/bin/python3 -c \"$ECHO_CLIENT\"",
        Says::Word("alike"),
    ),
    (
        "python3",
        "librspreload, select",
        "export LD_PRELOAD=$LD_PRELOAD:$RSOCKET; exec /usr/bin/python3 -c \"$SELECT_SERVER\"",
        true,
        "export LD_PRELOAD=$LD_PRELOAD:$RSOCKET; exec /usr/bin/python3 -c \"$SELECT_CLIENT\"",
        Says::Word("alike"),
    ),
    ("iperf3", "librspreload", IPERF_SERVER, true, IPERF_CLIENT, Says::Word("iperf Done.")),
    ("iperf3", "librspreload -R", IPERF_SERVER, true, IPERF_CLIENT, Says::Word("iperf Done.")),
    ("fi_pingpong", "-e msg", FABRIC_SERVER, true, FABRIC_CLIENT, Says::Word("1m ")),
    (
        "fi_pingpong",
        "-e rdm",
        "exec fi_pingpong -p 'verbs;ofi_rxm' -e rdm -c",
        true,
        "exec fi_pingpong -p 'verbs;ofi_rxm' -e rdm -c $THERE",
        Says::Word("1m "),
    ),
    ("fi_pingpong", "-e dgram", FABRIC_SERVER, true, FABRIC_CLIENT, Says::Word("4k ")),
    ("fio", "verb=write", FIO_SERVER, true, FIO_CLIENT, Says::Word("WRITE: bw=")),
    ("fio", "verb=read", FIO_SERVER, true, FIO_CLIENT, Says::Word("WRITE: bw=")),
    ("fio", "verb=send", FIO_RECEIVER, true, FIO_CLIENT, Says::Word("WRITE: bw=")),
];

/// The mode is the options of either side, all or the most.
const SERVER: &str = "exec $PROGRAM $MODE";
const CLIENT: &str = "exec $PROGRAM $MODE -s $THERE";
const ONCE_SERVER: &str = "exec $PROGRAM $MODE -C 1";
const ONCE_CLIENT: &str = "exec $PROGRAM $MODE -C 1 -s $THERE";
const FABRIC_SERVER: &str = "exec $PROGRAM -p verbs $MODE -c";
const FABRIC_CLIENT: &str = "exec $PROGRAM -p verbs $MODE -c $THERE";

/// The side whose memory is written and read, the one that receives, and the other side of either.
const FIO_SERVER: &str = "exec fio --name=s --ioengine=rdma --port=7590 --rw=read --bs=64k \
    --size=20m --iodepth=8";
const FIO_RECEIVER: &str = "exec fio --name=s --ioengine=rdma --port=7590 --verb=recv --rw=read \
    --bs=64k --size=20m --iodepth=16";
const FIO_CLIENT: &str = "exec fio --name=c --ioengine=rdma --hostname=$THERE --port=7590 --$MODE \
    --rw=write --bs=64k --size=20m --iodepth=8";

/// iperf3 over sockets of librspreload, with the mode's option. It ends when so much has come, and
/// waits some 10 s before: librdmacm says of a new connection only when it wakes up by itself.
const IPERF_SERVER: &str = "export LD_PRELOAD=$LD_PRELOAD:$RSOCKET; exec iperf3 -s -1";
const IPERF_CLIENT: &str = "export LD_PRELOAD=$LD_PRELOAD:$RSOCKET; \
    exec iperf3 -c $THERE -n 64M ${MODE#librspreload}";

/// An echo over a socket, which librspreload makes one of rsockets: the server's Python, and the
/// client's. Python itself makes sockets with `SOCK_CLOEXEC`, which librspreload leaves alone.
pub(crate) const ECHO: [&str; 2] = [
    "
import ctypes, os, socket
listener = socket.socket(2, 1, 0, fileno=ctypes.CDLL(None).socket(2, 1, 0))
listener.bind((os.environ['THERE'], 9000))
listener.listen(1)
connection = socket.socket(2, 1, 0, fileno=ctypes.CDLL(None).accept(listener.fileno(), 0, 0))
while data := connection.recv(65536):
    connection.sendall(data)
",
    "
import ctypes, os, socket
connection = socket.socket(2, 1, 0, fileno=ctypes.CDLL(None).socket(2, 1, 0))
connection.connect((os.environ['THERE'], 9000))
for _ in range(20):
    data, back = os.urandom(50000), b''
    connection.sendall(data)
    while len(back) < len(data):
        back += connection.recv(65536)
    assert back == data
connection.close()
print('alike')
",
];

/// The same with select(2), of two connections at once: the server has no thread for either.
pub(crate) const SELECT: [&str; 2] = [
    "
import ctypes, os, select, socket
call = ctypes.CDLL(None)
listener = socket.socket(2, 1, 0, fileno=call.socket(2, 1, 0))
listener.bind((os.environ['THERE'], 9000))
listener.listen(2)
connections, ended = [], 0
while ended < 2:
    for one in select.select([listener, *connections], [], [])[0]:
        if one is listener:
            accepted = call.accept(listener.fileno(), 0, 0)
            connections.append(socket.socket(2, 1, 0, fileno=accepted))
        elif data := one.recv(65536):
            one.sendall(data)
        else:
            connections.remove(one)
            one.close()
            ended += 1
",
    "
import ctypes, os, select, socket
call = ctypes.CDLL(None)
connections = [socket.socket(2, 1, 0, fileno=call.socket(2, 1, 0)) for _ in range(2)]
for one in connections:
    one.connect((os.environ['THERE'], 9000))
for _ in range(20):
    data = {one: os.urandom(20000) for one in connections}
    back = dict.fromkeys(connections, b'')
    for one in connections:
        one.sendall(data[one])
    while waits := [one for one in connections if len(back[one]) < len(data[one])]:
        for one in select.select(waits, [], [])[0]:
            back[one] += one.recv(65536)
    assert back == data
for one in connections:
    one.close()
print('alike')
",
];
