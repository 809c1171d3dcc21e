//! Finds the processes that hold a port: for the message of a failed bind, and for diagnosis.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::tuning::udp::NAMED_MAX;

/// A UDP socket of this network namespace, as the kernel shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeldSocket {
    /// Its bound address.
    pub address: SocketAddr,
    /// Bytes of kernel memory in its receive queue.
    pub queued_bytes: u64,
    /// Datagrams that the kernel dropped because the receive queue was full (or because a filter or
    /// the checksum refused them).
    pub drops: u64,
    /// Id and command of the processes that have it open, as far as visible.
    pub holders: Vec<(u32, String)>,
    /// Whether one of them reads frames from a packet socket as well, as the backend `packet` does.
    /// This socket then only guards its port: its drops, which the kernel also counts as
    /// `InErrors`, are copies of datagrams that the packet socket got.
    pub guards: bool,
}

/// The sockets on UDP `port` in the calling thread's network namespace.
#[must_use]
pub fn sockets(port: u16) -> Vec<HeldSocket> {
    let rows = rows(&UDP).into_iter().filter(|row| row.port == port);
    let readers = holders(&packet_sockets());
    let held = |row: Row| {
        let holders = holders(&[row.inode]);
        HeldSocket {
            address: SocketAddr::new(row.ip, row.port),
            queued_bytes: row.queued_bytes,
            drops: row.drops,
            guards: holders.iter().any(|holder| readers.contains(holder)),
            holders,
        }
    };
    rows.map(held).collect()
}

/// The inodes of the packet sockets of this network namespace: the last column of /proc/net/packet.
fn packet_sockets() -> Vec<u64> {
    let table = fs::read_to_string("/proc/thread-self/net/packet").unwrap_or_default();
    let rows = table.lines().skip(1);
    rows.filter_map(|row| row.split_ascii_whitespace().nth(8)?.parse().ok()).collect()
}

/// Id and command of the processes that listen on TCP `address`:`port`, or prevent others from
/// doing so, as far as visible.
#[must_use]
pub fn tcp_listeners(address: IpAddr, port: u16) -> Vec<(u32, String)> {
    /// `TCP_LISTEN` of include/net/tcp_states.h.
    const LISTEN: u8 = 10;
    let rows = rows(&["/proc/thread-self/net/tcp", "/proc/thread-self/net/tcp6"]).into_iter();
    let inodes: Vec<u64> = rows
        .filter(|row| row.state == LISTEN && row.is_in_the_way(address, port))
        .map(|row| row.inode)
        .collect();
    holders(&inodes)
}

/// Id and command of the processes that keep others from UDP `address`:`port`, as far as visible.
pub(super) fn of(address: IpAddr, port: u16) -> Vec<(u32, String)> {
    holders(&inodes(address, port))
}

/// Id and command of the processes that have a socket with this abstract name (unix(7)), as far as
/// visible.
pub(crate) fn of_name(name: &str) -> Vec<(u32, String)> {
    let table = fs::read_to_string("/proc/thread-self/net/unix").unwrap_or_default();
    // `Num RefCount Protocol Flags Type St Inode Path`, with `@` before such a name.
    let inode = |row: &str| {
        let fields: Vec<&str> = row.split_ascii_whitespace().collect();
        let is_it = fields.get(7)?.strip_prefix('@') == Some(name);
        if is_it { fields[6].parse().ok() } else { None }
    };
    holders(&table.lines().skip(1).filter_map(inode).collect::<Vec<u64>>())
}

/// Some processes in words: `pid 7 (sleep 3), pid 9 (cat) and 2 more`.
pub(crate) fn listed(holders: &[(u32, String)]) -> String {
    let named = holders.iter().take(NAMED_MAX);
    let named: Vec<String> = named.map(|(pid, command)| format!("pid {pid} ({command})")).collect();
    match holders.len().saturating_sub(NAMED_MAX) {
        0 => named.join(", "),
        more => format!("{} and {more} more", named.join(", ")),
    }
}

/// What to do about `EADDRINUSE` for UDP `address`:`port`: names the processes that hold it, as far
/// as `/proc` shows them.
pub(super) fn hint(address: IpAddr, port: u16) -> String {
    let holders = of(address, port);
    if holders.is_empty() {
        return format!(
            "UDP/{port} is held by a process that is not visible from here, or by the kernel (the \
             rdma_rxe module holds it for all addresses: `rdma link` shows its devices): find it \
             with `ss -ulpn 'sport = :{port}'` as root, or use another address"
        );
    }
    let mut hint = format!("UDP/{port} is held by {}", listed(&holders));
    if holders.iter().any(|(pid, _)| *pid == std::process::id()) {
        hint.push_str(": this process has it open already: close that device first");
    } else {
        hint.push_str(": stop it, or use another address");
    }
    hint
}

/// Not /proc/net, which shows the first thread's namespace: this thread can be in another one.
const UDP: [&str; 2] = ["/proc/thread-self/net/udp", "/proc/thread-self/net/udp6"];

/// The inodes of the sockets of this network namespace that conflict with `address`:`port`.
fn inodes(address: IpAddr, port: u16) -> Vec<u64> {
    let rows = rows(&UDP).into_iter();
    rows.filter(|row| row.is_in_the_way(address, port)).map(|row| row.inode).collect()
}

/// A row of a table of sockets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Row {
    ip: IpAddr,
    port: u16,
    state: u8,
    queued_bytes: u64,
    inode: u64,
    drops: u64,
}

impl Row {
    fn is_in_the_way(&self, address: IpAddr, port: u16) -> bool {
        self.port == port && conflicts(self.ip, address)
    }
}

fn rows(tables: &[&str]) -> Vec<Row> {
    let tables = tables.iter().filter_map(|path| fs::read_to_string(path).ok());
    tables
        .flat_map(|table| table.lines().skip(1).filter_map(parse_row).collect::<Vec<_>>())
        .collect()
}

/// Whether a socket bound to `bound` prevents another from binding `wanted` (same port).
fn conflicts(bound: IpAddr, wanted: IpAddr) -> bool {
    match (bound, wanted) {
        // A socket on :: takes IPv4 too unless it is IPv6-only, which /proc does not show.
        (IpAddr::V6(b), IpAddr::V4(_)) => b.is_unspecified(),
        (IpAddr::V4(_), IpAddr::V6(_)) => false,
        (b, w) => b == w || b.is_unspecified() || w.is_unspecified(),
    }
}

/// A row of /proc/net/udp, udp6, tcp or tcp6:
/// `sl local_address rem_address st tx:rx tr:tm->when retrnsmt uid timeout inode …`;
/// rows of UDP end with `ref pointer drops`.
fn parse_row(row: &str) -> Option<Row> {
    let fields: Vec<&str> = row.split_ascii_whitespace().collect();
    let field = |at: usize| fields.get(at).copied();
    let (ip, port) = field(1)?.split_once(':')?;
    let state = u8::from_str_radix(field(3)?, 16).ok()?;
    let (_, queued) = field(4)?.split_once(':')?;
    let queued_bytes = u64::from_str_radix(queued, 16).ok()?;
    let inode = field(9)?.parse().ok()?;
    let drops = field(12).and_then(|drops| drops.parse().ok()).unwrap_or(0);
    // Each group of 8 digits is a 32-bit word in the machine's byte order.
    let mut bytes = [0_u8; 16];
    let words = ip.len() / 8;
    for (i, at) in bytes.chunks_exact_mut(4).take(words).enumerate() {
        let word = u32::from_str_radix(ip.get(i * 8..i * 8 + 8)?, 16).ok()?;
        at.copy_from_slice(&word.to_ne_bytes());
    }
    let ip = match ip.len() {
        8 => IpAddr::V4(Ipv4Addr::new(bytes[0], bytes[1], bytes[2], bytes[3])),
        32 => IpAddr::V6(Ipv6Addr::from(bytes)),
        _ => return None,
    };
    let port = u16::from_str_radix(port, 16).ok()?;
    Some(Row { ip, port, state, queued_bytes, inode, drops })
}

/// Pid and command of the processes that have one of these sockets open.
fn holders(inodes: &[u64]) -> Vec<(u32, String)> {
    if inodes.is_empty() {
        return Vec::new();
    }
    let links: Vec<String> = inodes.iter().map(|inode| format!("socket:[{inode}]")).collect();
    let Ok(processes) = fs::read_dir("/proc") else { return Vec::new() };
    let mut found: Vec<(u32, String)> = processes
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|pid: &u32| has_open(*pid, &links))
        .map(|pid| (pid, command(pid)))
        .collect();
    found.sort_unstable();
    found
}

fn has_open(pid: u32, links: &[String]) -> bool {
    let has_open = |thread: String| {
        // Fails for other users' processes: they are not visible.
        let descriptors = fs::read_dir(format!("{thread}/fd")).ok()?;
        let mut targets = descriptors.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
        let first = targets.next()?;
        let is_one = |link: &std::path::PathBuf| {
            link.to_str().is_some_and(|link| links.iter().any(|it| it == link))
        };
        Some(is_one(&first) || targets.any(|link| is_one(&link)))
    };
    // A first thread that has ended shows no descriptors, though the others have them.
    has_open(format!("/proc/{pid}"))
        .unwrap_or_else(|| threads(pid).any(|thread| has_open(thread) == Some(true)))
}

/// The directories of a process's threads.
fn threads(pid: u32) -> impl Iterator<Item = String> {
    let entries = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten();
    entries.filter_map(|entry| entry.ok()?.path().to_str().map(str::to_owned))
}

/// Whether one of these processes is about to end, or any process is if none is named: its sockets
/// will be closed once its threads have run again, which takes long on a busy machine.
pub(super) fn is_ending(holders: &[(u32, String)]) -> bool {
    let ends = |pid: u32| {
        threads(pid).any(|thread| {
            let read = |file| fs::read_to_string(format!("{thread}/{file}")).unwrap_or_default();
            thread_ends(&read("stat"), &read("status"))
        })
    };
    if !holders.is_empty() {
        return holders.iter().any(|(pid, _)| ends(*pid));
    }
    let Ok(processes) = fs::read_dir("/proc") else { return false };
    processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).any(ends)
}

/// Whether a thread is on its way out, by its `stat` and `status` (proc_pid_stat(5)): the kernel
/// has begun to end it, or SIGKILL waits for it. One that has ended has closed its descriptors.
fn thread_ends(stat: &str, status: &str) -> bool {
    /// `PF_EXITING` of the kernel's linux/sched.h.
    const EXITING: u64 = 4;
    let killed = 1_u64 << (libc::SIGKILL - 1);
    // The name may contain anything.
    let Some((_, fields)) = stat.rsplit_once(')') else { return false };
    let mut fields = fields.split_ascii_whitespace();
    if matches!(fields.next(), None | Some("Z" | "X")) {
        return false;
    }
    let is_exiting = fields.nth(5).and_then(|flags| flags.parse().ok()).unwrap_or(0) & EXITING != 0;
    let pending = |line: &str| {
        let signals = line.strip_prefix("SigPnd:").or_else(|| line.strip_prefix("ShdPnd:"))?;
        u64::from_str_radix(signals.trim(), 16).ok()
    };
    is_exiting || status.lines().filter_map(pending).any(|signals| signals & killed != 0)
}

/// The command line of a process, shortened; else its name.
fn command(pid: u32) -> String {
    const CHARS_MAX: usize = 80;
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let line = String::from_utf8_lossy(&line).replace('\0', " ");
    let line = line.trim();
    let name = if line.is_empty() {
        fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default()
    } else {
        line.to_owned()
    };
    // The text comes from another process and goes to a terminal.
    let printable = name.trim().chars().map(|c| if c.is_control() { '?' } else { c });
    let mut short: String = printable.clone().take(CHARS_MAX).collect();
    if printable.count() > CHARS_MAX {
        short.push('…');
    }
    short
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader};
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn rows_of_proc_net_udp_are_read() {
        let v4 = "  512: 0100007F:12B7 00000000:0000 07 00000000:00000340 00:00000000 00000000  \
                  1000        0 88153 2 000000003d1d1f3b 7";
        let row = parse_row(v4).unwrap();
        assert_eq!((row.ip, row.port), (IpAddr::from([127, 0, 0, 1]), 4791));
        assert_eq!((row.inode, row.drops, row.queued_bytes), (88153, 7, 0x340));
        let v6 = "  513: 00000000000000000000000001000000:12B7 00000000000000000000000000000000:0000 \
                  0A 00000000:00000000 00:00000000 00000000     0        0 7 2 0000000000000000 0";
        let row = parse_row(v6).unwrap();
        assert_eq!((row.ip, row.port), (IpAddr::V6(Ipv6Addr::LOCALHOST), 4791));
        assert_eq!((row.inode, row.state), (7, 10));
        for bad in
            ["", "sl", "1: 0100007F 0", "1: zz:1 0 0 0 0 0 0 0 5", "1: é0100007:1 0 0 0 0 0 0 0 5"]
        {
            assert_eq!(parse_row(bad), None, "{bad}");
        }
    }

    #[test]
    fn wildcards_conflict_with_everything_of_their_family() {
        let [any, a, b] = [[0; 4], [10, 0, 0, 1], [10, 0, 0, 2]].map(IpAddr::from);
        let any6 = IpAddr::V6(Ipv6Addr::UNSPECIFIED);
        assert!(conflicts(any, a) && conflicts(a, a) && conflicts(any6, a) && conflicts(a, any));
        assert!(!conflicts(b, a) && !conflicts(any, IpAddr::V6(Ipv6Addr::LOCALHOST)));
    }

    #[test]
    fn own_sockets_are_found() {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let address = socket.local_addr().unwrap();
        let hint = hint(address.ip(), address.port());
        let pid = format!("pid {} (", std::process::id());
        assert!(hint.contains(&pid) && hint.contains("this process"), "{hint}");
        let held = sockets(address.port());
        let own = held.iter().find(|held| held.address == address).unwrap();
        assert!(own.holders.iter().any(|(pid, _)| *pid == std::process::id()), "{own:?}");
        drop(socket);
    }

    #[test]
    fn three_processes_are_named_and_others_counted() {
        let some = |count: u32| -> Vec<(u32, String)> {
            (1..=count).map(|pid| (pid, format!("p{pid}"))).collect()
        };
        let named = ["pid 1 (p1)", "pid 2 (p2)", "pid 3 (p3)"];
        for (count, expected) in [
            (0, String::new()),
            (1, named[0].to_owned()),
            (3, named.join(", ")),
            (4, format!("{} and 1 more", named.join(", "))),
            (7, format!("{} and 4 more", named.join(", "))),
        ] {
            assert_eq!(listed(&some(count)), expected);
        }
    }

    #[test]
    fn a_thread_on_its_way_out_is_told_from_others() {
        let stat = |state: &str, flags: u32| {
            format!("77 (a (b) c) {state} 1 77 77 0 -1 {flags} 100 0 0 0 0 0 0 0 20 0 2 0 1 0 0")
        };
        let status = |own: &str, shared: &str| {
            format!("Name:\tx\nState:\tR (running)\nSigPnd:\t{own}\nShdPnd:\t{shared}\n")
        };
        let (none, kill) = ("0000000000000000", "0000000000000100");
        for (stat, status, ends) in [
            (stat("S", 0x40_0040), status(none, none), false),
            (stat("R", 0x40_0044), status(none, none), true),
            (stat("D", 0x40_0040), status(kill, none), true),
            (stat("D", 0x40_0040), status(none, kill), true),
            (stat("S", 0x40_0040), status("0000000000000200", "0000000000000080"), false),
            (stat("Z", 0x40_0044), status(kill, kill), false),
            (String::new(), String::new(), false),
        ] {
            assert_eq!(thread_ends(&stat, &status), ends, "{stat}: {status}");
        }
        assert!(!is_ending(&[(std::process::id(), String::new())]), "this one is not");
    }

    /// The first thread of a process may end before the others: those that are killed end in any
    /// order, and a busy machine takes its time.
    #[test]
    fn a_process_without_its_first_thread_is_found() {
        let program = "import ctypes, socket, sys, threading, time\n\
                       s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n\
                       s.bind(('127.0.0.1', 0))\n\
                       print(s.getsockname()[1], flush=True)\n\
                       threading.Thread(target=lambda: time.sleep(600)).start()\n\
                       ctypes.CDLL(None).syscall(int(sys.argv[1]), 0)\n";
        let mut child = Command::new("python3")
            .args(["-c", program, &libc::SYS_exit.to_string()])
            .stdout(Stdio::piped())
            .spawn();
        let Ok(child) = &mut child else {
            return crate::testing::testns::skip(
                "holder::a_process_without_its_first_thread",
                &"no python3",
            );
        };
        let mut port = String::new();
        BufReader::new(child.stdout.take().expect("piped")).read_line(&mut port).expect("a line");
        let port: u16 = port.trim().parse().expect("a port");
        let gone = |pid: u32| {
            fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|it| it.contains(") Z "))
        };
        let end = Instant::now() + Duration::from_secs(60);
        while !gone(child.id()) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
        }
        let holders = of(Ipv4Addr::LOCALHOST.into(), port);
        let is_ending = is_ending(&holders);
        child.kill().expect("it runs");
        child.wait().expect("it ends");
        assert_eq!(holders.first().map(|(pid, _)| *pid), Some(child.id()), "{holders:?}");
        assert!(!is_ending, "it goes on without that thread");
    }

    #[test]
    fn listeners_are_found() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let found = tcp_listeners(address.ip(), address.port());
        assert!(found.iter().any(|(pid, _)| *pid == std::process::id()), "{found:?}");
        drop(listener);
        // Between fork and exec, another test's child has a copy of it.
        let end = Instant::now() + Duration::from_secs(20);
        let listeners = || tcp_listeners(address.ip(), address.port());
        while !listeners().is_empty() {
            assert!(Instant::now() < end, "{:?}", listeners());
        }
    }
}
