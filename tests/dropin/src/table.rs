//! The rows: which programs run, in which modes, on which backends.

mod managed;

pub(crate) use self::managed::{ECHO, SELECT};

/// UCX on the transport that is the mode's first word, and `$1` is the second.
macro_rules! ucx {
    () => {
        "set -- $MODE; export UCX_NET_DEVICES=roce0:1 UCX_TLS=$1,self; shift; "
    };
}

/// mpirun, whose ranks have UCX on our device and nothing else. They wait for each other without a
/// processor of their own; else the first rank of each container would be bound to the same one.
macro_rules! mpi {
    () => {
        "export TMPDIR=$(mktemp -dp $XDG_RUNTIME_DIR); export HOME=$TMPDIR; cd $HOME; \
         export UCX_TLS=rc_v,self UCX_NET_DEVICES=roce0:1; \
         MPIRUN='mpirun --allow-run-as-root --oversubscribe --mca pml ucx --mca osc ucx \
         --mca btl self --mca mpi_yield_when_idle 1 --bind-to none -x UCX_TLS -x UCX_NET_DEVICES'; "
    };
}

/// The options of mpirun for every other rank in the other container, and the script that goes
/// there in the place of ssh.
macro_rules! away {
    () => {
        "echo 'shift; exec /usr/bin/python3 -c \"$MPI_ASK\" \"$*\"' > ask; \
         AWAY=\"--leave-session-attached -H $HERE:4,$THERE:4 --map-by node \
         --mca oob_tcp_if_include eth0\"; export OMPI_MCA_plm_rsh_agent=\"sh $PWD/ask\"; "
    };
}

/// The other container: the server that `$MPI_ASK` asks.
pub(crate) const MPI_AWAY: &str = "export TMPDIR=$(mktemp -dp $XDG_RUNTIME_DIR); export HOME=$TMPDIR; \
    exec /usr/bin/python3 -c \"$MPI_SERVE\"";

/// Python in the place of sshd and ssh: a shell for the command that comes.
pub(crate) const REMOTE: [&str; 2] = [
    "
import os, socket
listener = socket.create_server(('', 7000))
asked = listener.accept()[0].makefile().read()
listener.close()
os.execv('/bin/sh', ['sh', '-c', asked])
",
    "
import os, socket, sys
socket.create_connection((os.environ['THERE'], 7000)).sendall(sys.argv[1].encode())
",
];

/// A program in a mode on a backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    /// Its name.
    pub program: &'static str,
    /// Its options.
    pub mode: &'static str,
    /// The backend.
    pub netdev: &'static str,
    /// How it is run.
    pub shape: Shape,
}

impl Row {
    /// Whether it has no other side.
    #[must_use]
    pub fn is_alone(&self) -> bool {
        matches!(self.shape, Shape::Alone(_))
    }

    /// Whether its service loses messages, for which its program waits.
    pub(crate) fn may_lose(&self) -> bool {
        ["-c UC", "-c UD"].iter().any(|service| self.mode.contains(service))
    }
}

/// How a program is run, and its expected output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// By itself. It prints all of these words.
    Alone(&'static [&'static str]),
    /// A script of sh(1) with and without `rocinante run`: it prints the same, these words among
    /// it, and ends in the same way.
    Alike(&'static str, &'static [&'static str]),
    /// A script of sh(1) in one container, and its output.
    Script(&'static str, Says),
    /// By itself, until the link goes down and up and an address comes: it prints each event.
    Events,
    /// A server and a client.
    Between {
        /// Options that are needed wherever it runs.
        always: &'static str,
        /// How often, in the same namespaces.
        times: u32,
        /// The client's output once it has measured.
        says: Says,
    },
    /// Two scripts of sh(1), a server's and a client's, with the server's address in `$THERE`.
    /// `exec` in the first gives the signals to the program.
    Pair {
        /// The script that runs until the client has ended; it ends then, or is ended.
        server: &'static str,
        /// Whether it ends by itself.
        ends: bool,
        /// The script that runs once the server listens.
        client: &'static str,
        /// The client's output.
        says: Says,
    },
}

/// The output of a client once it has measured.
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

/// rdma-core's ping-pongs. Those that can compare the received data do so (`-c`).
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
        rows.extend(on_all(program, &[&PERFTEST_ALL, modes].concat(), "", 1, Says::Figures));
    }
    rows.extend(managed::rows());
    rows.extend(hpc());
    rows.extend(built());
    rows.extend(ordinary());
    rows
}

/// UCX, what runs over it, and qperf. UCX may use our device only, and no shared memory; by `rc_v`
/// it connects over datagrams and sends by RC, which `rc_verbs` alone cannot.
fn hpc() -> Vec<Row> {
    let mut rows = Vec::new();
    let words = &["Device: roce0:1", "Transport: rc_verbs", "Transport: ud_verbs"];
    let shape = Shape::Alone(words);
    rows.push(Row { program: "ucx_info", mode: "-d", netdev: "udp", shape });
    let words = &["provider: verbs", "domain: roce0", "FI_EP_MSG", "FI_EP_DGRAM", "FI_EP_RDM"];
    let shape = Shape::Alone(words);
    rows.push(Row { program: "fi_info", mode: "", netdev: "udp", shape });
    let on = |netdevs: &'static [&'static str], program, mode, shape| {
        netdevs.iter().map(move |netdev| Row { program, mode, netdev, shape })
    };
    for mode in UCX_MODES {
        let shape = Shape::Pair {
            server: concat!(ucx!(), "exec ucx_perftest"),
            ends: true,
            client: concat!(ucx!(), "exec ucx_perftest $THERE -t $1 -s 4096 -n 1000 -w 50"),
            says: Says::Word("Final:"),
        };
        rows.extend(on(&["udp", "packet"], "ucx_perftest", mode, shape));
    }
    for mode in ["rc_v -q", "ud_v -q"] {
        let shape = Shape::Pair {
            server: concat!(ucx!(), "exec io_demo $1 -d 65536"),
            ends: false,
            client: concat!(ucx!(), "exec io_demo $1 -d 65536 -i 2000 -o read,write $THERE 2>&1"),
            says: Says::Word("Client exit with status 'OK'"),
        };
        rows.push(Row { program: "io_demo", mode, netdev: "udp", shape });
    }
    for mode in QPERF {
        let server = "exec qperf";
        let client = "exec qperf -cm1 -t 1 $THERE $MODE";
        let shape = Shape::Pair { server, ends: false, client, says: Says::Word(" = ") };
        rows.push(Row { program: "qperf", mode, netdev: "udp", shape });
    }
    let bytes = Says::Word("every byte as it was sent");
    for mode in ["-n 2", "-n 8"] {
        let shape = Shape::Script(concat!(mpi!(), "exec $MPIRUN $MODE $MPI"), bytes);
        rows.extend(on(&["udp", "packet"], "mpi.c", mode, shape));
    }
    let between = |client, says| Shape::Pair { server: MPI_AWAY, ends: true, client, says };
    for mode in ["-n 2, two containers", "-n 8, two containers"] {
        let client = concat!(mpi!(), away!(), "exec $MPIRUN $AWAY ${MODE%,*} $MPI");
        rows.extend(on(&["udp", "packet"], "mpi.c", mode, between(client, bytes)));
    }
    let client =
        concat!(mpi!(), away!(), "exec $MPIRUN $AWAY -n 2 NPopenmpi -i -u 200000 -o np 2>&1");
    // The last of its 31 sizes.
    let says = Says::Word("196609 bytes");
    rows.extend(on(&["udp", "packet"], "NPopenmpi", "-i", between(client, says)));
    let client = concat!(
        mpi!(),
        away!(),
        "echo \"$HPCC\" > hpccinf.txt; $MPIRUN $AWAY --wdir $PWD -n 2 hpcc && cat hpccoutf.txt"
    );
    let says = Says::Word("Success=1");
    rows.push(Row { program: "hpcc", mode: "", netdev: "udp", shape: between(client, says) });
    rows
}

/// Transport and test of ucx_perftest.
const UCX_MODES: [&str; 10] = [
    "rc_v tag_lat",
    "rc_v tag_bw",
    "rc_v ucp_put_lat",
    "rc_v ucp_get",
    "rc_v ucp_am_lat",
    "ud_v tag_lat",
    "ud_v tag_bw",
    "ud_v ucp_put_lat",
    "ud_v ucp_get",
    "ud_v ucp_am_lat",
];

/// qperf's tests that can meet by rdma_cm.
const QPERF: [&str; 11] = [
    "rc_bi_bw",
    "rc_bw",
    "rc_lat",
    "rc_rdma_read_bw",
    "rc_rdma_read_lat",
    "rc_rdma_write_bw",
    "rc_rdma_write_lat",
    "rc_rdma_write_poll_lat",
    "rc_compare_swap_mr",
    "rc_fetch_add_mr",
    "ver_rc_compare_swap",
];

/// Programs that are not installed: [`programs`](crate::programs) has where they come from.
fn built() -> Vec<Row> {
    let between = Shape::Between { always: "", times: 1, says: Says::Iterations };
    // Servers are under valgrind, too: both sides have to end with status 0. A library with debug
    // assertions has reports of its own.
    let pingpong = Shape::Between { always: "-g 0 -n 100", times: 1, says: Says::Iterations };
    let rping = Shape::Pair {
        server: "exec valgrind -q --error-exitcode=9 rping -s -a $THERE -C 10",
        ends: true,
        client: "exec valgrind -q --error-exitcode=9 rping -c -a $THERE -C 10",
        says: Says::Nothing,
    };
    let alone = Shape::Alone;
    let rows = [
        ("client.c", "-DOLDER", between),
        ("client.c", "-DNEWER", between),
        ("client.c", "-DDLVSYM", between),
        ("client.c", "-fsanitize=address", between),
        ("client.c", "-fsanitize=thread", between),
        ("client.c", "-fsanitize=undefined", between),
        ("client.c", "clang -fsanitize=address", between),
        ("client.c", "clang -fsanitize=thread", between),
        ("valgrind", "-q --error-exitcode=9 ibv_rc_pingpong", pingpong),
        ("valgrind", "-q --error-exitcode=9 ibv_ud_pingpong", pingpong),
        ("valgrind", "rping", rping),
        ("loaders.c", "libibverbs.so.1", alone(&["works"])),
        ("loaders.c", "libibverbs.so", alone(&["works"])),
        ("loaders.c", "deepbind", alone(&["works"])),
        ("loaders.c", "dlmopen", alone(&["works"])),
        ("loaders.c", "system", alone(&["works"])),
        ("loaders.c", "others", alone(&["works"])),
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
