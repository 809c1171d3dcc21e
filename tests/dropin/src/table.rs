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

/// How a program is run, and what it has to say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// By itself. It prints all of these words.
    Alone(&'static [&'static str]),
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
}

/// What a client prints once it has measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Says {
    /// A ping-pong: `1000 iters in 0.01 seconds`.
    Iterations,
    /// perftest: a row of figures that begins with the size, or is the size's alone.
    Figures,
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
    rows
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
