//! The rows: which programs run, in which modes, on which backends.

/// A program in a mode on a backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    /// Its name.
    pub program: &'static str,
    /// Its options.
    pub mode: &'static str,
    /// What carries the packets.
    pub netdev: &'static str,
    /// How it is run.
    pub shape: Shape,
}

impl Row {
    /// Whether its service loses messages, for which its program waits.
    pub(crate) fn may_lose(&self) -> bool {
        ["-c UC", "-c UD"].iter().any(|service| self.mode.contains(service))
    }
}

/// How a program is run, and what it has to say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// By itself. It prints all of these words.
    Alone(&'static [&'static str]),
    /// A script of sh(1) with and without `rocinante run`: it prints the same, these words among
    /// it, and ends in the same way.
    Alike(&'static str, &'static [&'static str]),
    /// By itself, until the link goes down and up and an address comes: it prints each event.
    Events,
    /// A server and a client.
    Between {
        /// Options that are needed wherever it runs.
        always: &'static str,
        /// How often, in the same namespaces.
        times: u32,
        /// What the client prints once it has measured.
        says: Says,
    },
    /// Two scripts of sh(1), a server's and a client's, with the server's address in `$THERE`.
    /// `exec` in the first gives the signals to the program.
    Pair {
        /// What runs until the client has ended; it ends then, or is ended.
        server: &'static str,
        /// Whether it ends by itself.
        ends: bool,
        /// What runs once the server listens.
        client: &'static str,
        /// What the client prints.
        says: Says,
    },
}

/// What a client prints once it has measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Says {
    /// A ping-pong: `1000 iters in 0.01 seconds`.
    Iterations,
    /// perftest: a row of figures that begins with the size, or is the size's alone.
    Figures,
    /// A line with this in it.
    Word(&'static str),
    /// Perhaps nothing: its status says all.
    Nothing,
}

/// The backends.
pub const NETDEVS: [&str; 3] = ["udp", "packet", "afxdp"];

/// rdma-core's ping-pongs. Those that can compare what they get do so (`-c`).
const PINGPONGS: [(&str, &[&str]); 4] = [
    ("ibv_rc_pingpong", &["", "-c", "-e -c", "-N -c", "-o -c", "-e -N -c"]),
    ("ibv_uc_pingpong", &["", "-e -c"]),
    ("ibv_ud_pingpong", &["", "-e -c"]),
    ("ibv_srq_pingpong", &["", "-e -c"]),
];

/// perftest's programs, and the modes of each beside those of [`PERFTEST_ALL`]. `-a` is every size,
/// which atomics do not have; WRITEs have no completions to sleep for (`-e`).
const PERFTEST: [(&str, &[&str]); 8] = [
    (
        "ib_send_bw",
        &["-a", "-q 4", "-b", "--report_gbits", "-e", "-c UC", "-c UD", "-r 512 --use-srq"],
    ),
    ("ib_send_lat", &["-a", "-c UC", "-c UD", "-r 512 --use-srq"]),
    ("ib_write_bw", &["-a", "-q 4", "-b", "--report_gbits"]),
    ("ib_write_lat", &["-a"]),
    ("ib_read_bw", &["-a", "-q 4", "-b", "--report_gbits", "-e"]),
    ("ib_read_lat", &["-a"]),
    ("ib_atomic_bw", &["-q 4", "-b", "--report_gbits", "-e"]),
    ("ib_atomic_lat", &[]),
];
const PERFTEST_ALL: [&str; 2] = ["", "-D 2"];

/// How often a connection is made, used once and ended.
const MANY: u32 = 1000;

/// All rows, in the order of the document.
#[must_use]
pub fn rows() -> Vec<Row> {
    let alone =
        |program, mode, words| Row { program, mode, netdev: "udp", shape: Shape::Alone(words) };
    let mut rows = vec![
        alone("ibv_devices", "", &["roce0", "roce1"]),
        alone("ibv_devinfo", "-v", &["hca_id:\troce0", "PORT_ACTIVE", "RoCE v2", "max_qp:"]),
        Row { program: "ibv_asyncwatch", mode: "", netdev: "udp", shape: Shape::Events },
    ];
    for (program, modes) in PINGPONGS {
        rows.extend(on_all(program, modes, "-g 0", 1, Says::Iterations));
    }
    let shape = Shape::Between { always: "-g 0", times: MANY, says: Says::Iterations };
    rows.push(Row { program: "ibv_rc_pingpong", mode: "-n 1 -c", netdev: "udp", shape });
    for (program, modes) in PERFTEST {
        let modes = [&PERFTEST_ALL, modes].concat();
        rows.extend(on_all(program, &modes, "", 1, Says::Figures));
    }
    rows.extend(managed());
    rows.extend(built());
    rows.extend(ordinary());
    rows
}

/// Programs that connect by rdma_cm, on stock librdmacm.
fn managed() -> Vec<Row> {
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
const MANAGED: [Managed; 6] = [
    (
        "rping",
        "-V",
        "exec rping -s -a $THERE",
        true,
        "exec rping -c -a $THERE -C 100 -V -v",
        Says::Word("rdma-ping-99"),
    ),
    (
        "ucmatose",
        "-c 10 -C 10",
        "exec ucmatose -c 10 -C 10",
        true,
        "exec ucmatose -c 10 -C 10 -s $THERE",
        Says::Word("return status 0"),
    ),
    (
        "udaddy",
        "-c 4",
        "exec udaddy -c 4",
        true,
        "exec udaddy -c 4 -s $THERE",
        Says::Word("return status 0"),
    ),
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
];

/// Others, on `udp`.
const MANAGED_ELSEWHERE: [Managed; 11] = [
    (
        "rping",
        "-P, 4 clients",
        "exec rping -s -P -a $THERE",
        false,
        // Its server loses a request that comes before it has begun with the last one.
        "for i in 1 2 3 4; do rping -c -a $THERE -C 2000 -V & all=\"$all $!\"; sleep 0.3; done; \
         for one in $all; do wait $one || exit 1; done",
        Says::Nothing,
    ),
    (
        "rstream",
        "-S 65536 -I 100",
        "exec rstream -S 65536 -I 100 -C 1",
        true,
        "exec rstream -S 65536 -I 100 -C 1 -s $THERE",
        Says::Word("64k"),
    ),
    (
        "riostream",
        "-S 4096 -I 100",
        "exec riostream -S 4096 -I 100 -C 1",
        true,
        "exec riostream -S 4096 -I 100 -C 1 -s $THERE",
        Says::Word("4k"),
    ),
    (
        "rcopy",
        "",
        "exec rcopy",
        false,
        "cd $(mktemp -d) && head -c 3000000 /dev/urandom > from && rcopy $PWD/from $THERE:$PWD/to \
         && cmp from to && echo alike",
        Says::Word("alike"),
    ),
    (
        "python3",
        "librspreload",
        "export LD_PRELOAD=$LD_PRELOAD:$RSOCKET; exec /usr/bin/python3 -c \"$ECHO_SERVER\"",
        true,
        "export LD_PRELOAD=$LD_PRELOAD:$RSOCKET; exec /usr/bin/python3 -c \"$ECHO_CLIENT\"",
        Says::Word("alike"),
    ),
    (
        "fi_pingpong",
        "-e msg",
        "exec fi_pingpong -p verbs -e msg -c",
        true,
        "exec fi_pingpong -p verbs -e msg -c $THERE",
        Says::Word("1m "),
    ),
    (
        "fi_pingpong",
        "-e rdm",
        "exec fi_pingpong -p 'verbs;ofi_rxm' -e rdm -c",
        true,
        "exec fi_pingpong -p 'verbs;ofi_rxm' -e rdm -c $THERE",
        Says::Word("1m "),
    ),
    (
        "fi_pingpong",
        "-e dgram",
        "exec fi_pingpong -p verbs -e dgram -c",
        true,
        "exec fi_pingpong -p verbs -e dgram -c $THERE",
        Says::Word("4k "),
    ),
    ("fio", "verb=write", FIO_SERVER, true, FIO_CLIENT, Says::Word("WRITE: bw=")),
    ("fio", "verb=read", FIO_SERVER, true, FIO_CLIENT, Says::Word("WRITE: bw=")),
    ("fio", "verb=send", FIO_RECEIVER, true, FIO_CLIENT, Says::Word("WRITE: bw=")),
];

/// The side whose memory is written and read, the one that receives, and the other side of either.
const FIO_SERVER: &str = "exec fio --name=s --ioengine=rdma --port=7590 --rw=read --bs=64k \
    --size=20m --iodepth=8";
const FIO_RECEIVER: &str = "exec fio --name=s --ioengine=rdma --port=7590 --verb=recv --rw=read \
    --bs=64k --size=20m --iodepth=16";
const FIO_CLIENT: &str = "exec fio --name=c --ioengine=rdma --hostname=$THERE --port=7590 --$MODE \
    --rw=write --bs=64k --size=20m --iodepth=8";

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

/// Programs that are not installed: [`programs`](crate::programs) has where they come from.
fn built() -> Vec<Row> {
    let between = Shape::Between { always: "", times: 1, says: Says::Iterations };
    let alone = Shape::Alone;
    let rows = [
        ("client.c", "-DOLDER", between),
        ("client.c", "-DNEWER", between),
        ("client.c", "-DDLVSYM", between),
        ("rc_pyverbs.py", "", between),
        ("ibverbs/loopback", "", alone(&["sent", "received"])),
        ("sideway/ibv_devinfo", "", alone(&["roce0", "roce1"])),
        ("sideway/show_gids", "", alone(&["roce0", "roce1"])),
        ("sideway/rc_pingpong", "-s 4096", between),
        ("sideway/rc_pingpong_split", "-s 4096", between),
    ];
    rows.map(|(program, mode, shape)| Row { program, mode, netdev: "udp", shape }).into()
}

/// Programs that know nothing of RDMA. The modes of Python are modules of its own tests.
fn ordinary() -> Vec<Row> {
    const PYTHON: &str = "cd $(mktemp -d) && /usr/bin/python3 $VERDICTS test.$MODE 2>&1";
    const GIT: &str = "cd $(mktemp -d) && export HOME=$PWD GIT_AUTHOR_DATE='2020-01-01T00:00:00Z' \
        GIT_COMMITTER_DATE='2020-01-01T00:00:00Z' && git init -q -b main . \
        && git config user.email a@b.c && git config user.name a && echo 1 > one && git add one \
        && git commit -qm first && git checkout -qb other && echo 2 >> one && git commit -qam two \
        && git checkout -q main && git merge --no-ff -m three other && git gc -q \
        && git clone -q . there && git -C there log --graph --stat && git fsck && git grep -n 2";
    const SHELL: &str = "ls -R /sys/class/net /sys/class/mem /sys/kernel/mm/transparent_hugepage; \
        cd /sys/class/net/lo && pwd -P && cat mtu type address; readlink -f /sys/class/mem/null; \
        find /sys/devices/system/cpu -maxdepth 2 | sort; [ -d /sys/fs ] && stat -c '%F %a' /sys/fs; \
        ls /dev | sort; cat /sys/no/such; test -r /sys/class/net/eth0/mtu && echo readable";
    let rows = [
        ("python3", "test_os", PYTHON, &["tests: "] as &[_]),
        ("python3", "test_subprocess", PYTHON, &["tests: "]),
        ("git", "", GIT, &["Merge: "]),
        ("sh", "/sys", SHELL, &["65536", "readable"]),
    ];
    let row = |(program, mode, script, words)| {
        let shape = Shape::Alike(script, words);
        Row { program, mode, netdev: "udp", shape }
    };
    rows.map(row).into()
}

fn on_all(
    program: &'static str,
    modes: &[&'static str],
    always: &'static str,
    times: u32,
    says: Says,
) -> Vec<Row> {
    let shape = Shape::Between { always, times, says };
    let of = |&mode| NETDEVS.map(|netdev| Row { program, mode, netdev, shape });
    modes.iter().flat_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_row_is_there_twice() {
        let rows = rows();
        for (at, row) in rows.iter().enumerate() {
            let same = |other: &Row| {
                (other.program, other.mode, other.netdev) == (row.program, row.mode, row.netdev)
            };
            assert!(!rows[..at].iter().any(same), "{row:?}");
        }
    }
}
