//! The kernel's counters for RoCEv2 in this network namespace, for all programs.
//!
//! The transport's own counters (retransmissions, NAKs, drops by reason) belong to the process that
//! has a device open. No other process can read them.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::net::SocketAddr;

use rocinante::device::Interface;
use rocinante_netdev::{ROCE_PORT, holder};
use serde::Serialize;

use super::columns::Columns;

/// Counters of the kernel's.
#[derive(Debug, Serialize)]
pub struct KernelCounters {
    /// Counters of each interface, for all of its traffic.
    interfaces: BTreeMap<String, InterfaceCounters>,
    /// Counters of all UDP sockets of the namespace, IPv4 and IPv6 together, by their names in
    /// /proc/net/snmp.
    udp: BTreeMap<String, u64>,
    /// The sockets on UDP/4791.
    roce_sockets: Vec<RoceSocket>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct InterfaceCounters {
    rx_bytes: u64,
    rx_packets: u64,
    rx_dropped: u64,
    tx_bytes: u64,
    tx_packets: u64,
    tx_dropped: u64,
}

#[derive(Debug, Serialize)]
struct RoceSocket {
    address: SocketAddr,
    queued_bytes: u64,
    /// Datagrams that the kernel dropped there, or, if `guards`, copies of a packet socket's
    /// frames.
    drops: u64,
    /// Whether its process reads frames from a packet socket, as the backend `packet` does.
    guards: bool,
    processes: Vec<Process>,
}

#[derive(Debug, Serialize)]
struct Process {
    pid: u32,
    command: String,
}

impl KernelCounters {
    /// Reads the counters, those of interfaces only for `interfaces`. Leaves out any that cannot be
    /// read.
    #[must_use]
    pub fn read(interfaces: &[Interface]) -> Self {
        // Not /proc/net, which shows the namespace of the process's first thread.
        let read =
            |name| fs::read_to_string(format!("/proc/thread-self/net/{name}")).unwrap_or_default();
        let wanted = |name: &str| interfaces.iter().any(|interface| interface.name == name);
        let mut udp = parse_snmp(&read("snmp"));
        for (name, count) in parse_snmp6(&read("snmp6")) {
            *udp.entry(name).or_default() += count;
        }
        let sockets = holder::sockets(ROCE_PORT).into_iter();
        Self {
            interfaces: parse_dev(&read("dev")).into_iter().filter(|(n, _)| wanted(n)).collect(),
            udp,
            roce_sockets: sockets
                .map(|socket| RoceSocket {
                    address: socket.address,
                    queued_bytes: socket.queued_bytes,
                    drops: socket.drops,
                    guards: socket.guards,
                    processes: socket
                        .holders
                        .into_iter()
                        .map(|(pid, command)| Process { pid, command })
                        .collect(),
                })
                .collect(),
        }
    }
}

/// Reads /proc/net/dev: after the name, eight columns received and eight sent.
fn parse_dev(table: &str) -> BTreeMap<String, InterfaceCounters> {
    let rows = table.lines().filter_map(|row| {
        let (name, counts) = row.split_once(':')?;
        let counts: Vec<u64> =
            counts.split_ascii_whitespace().map_while(|count| count.parse().ok()).collect();
        let [
            rx_bytes,
            rx_packets,
            _,
            rx_dropped,
            _,
            _,
            _,
            _,
            tx_bytes,
            tx_packets,
            _,
            tx_dropped,
            ..,
        ] = *counts.as_slice()
        else {
            return None;
        };
        let counters = InterfaceCounters {
            rx_bytes,
            rx_packets,
            rx_dropped,
            tx_bytes,
            tx_packets,
            tx_dropped,
        };
        Some((name.trim().to_owned(), counters))
    });
    rows.collect()
}

/// Reads the two lines `Udp:` of /proc/net/snmp: names, then values.
fn parse_snmp(table: &str) -> BTreeMap<String, u64> {
    let mut lines = table.lines().filter_map(|line| line.strip_prefix("Udp:"));
    let (Some(names), Some(values)) = (lines.next(), lines.next()) else { return BTreeMap::new() };
    let values = values.split_ascii_whitespace().map(|value| value.parse().unwrap_or(0));
    names.split_ascii_whitespace().map(str::to_owned).zip(values).collect()
}

/// Reads /proc/net/snmp6: `Udp6InDatagrams 7`.
fn parse_snmp6(table: &str) -> Vec<(String, u64)> {
    let rows = table.lines().filter_map(|row| {
        let (name, count) = row.strip_prefix("Udp6")?.split_once(char::is_whitespace)?;
        Some((name.to_owned(), count.trim().parse().ok()?))
    });
    rows.collect()
}

impl fmt::Display for KernelCounters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "kernel counters of this network namespace")?;
        let mut rows = Columns::of_numbers(&[
            "interface",
            "rx packets",
            "rx bytes",
            "rx dropped",
            "tx packets",
            "tx bytes",
            "tx dropped",
            "",
        ]);
        for (name, counters) in &self.interfaces {
            let InterfaceCounters { rx_bytes, rx_packets, rx_dropped, .. } = *counters;
            let InterfaceCounters { tx_bytes, tx_packets, tx_dropped, .. } = *counters;
            let counts = [rx_packets, rx_bytes, rx_dropped, tx_packets, tx_bytes, tx_dropped];
            let counts = counts.into_iter().map(|count| count.to_string());
            rows.push([name.clone()].into_iter().chain(counts).collect());
        }
        writeln!(f, "{rows}")?;
        let mut rows = Columns::of_numbers(&["UDP, all sockets", "count", ""]);
        for (name, count) in self.udp.iter().filter(|(_, count)| **count > 0) {
            rows.push(vec![name.clone(), count.to_string()]);
        }
        writeln!(f, "{rows}")?;
        let mut rows = Columns::of_numbers(&["UDP socket", "bytes queued", "dropped", "held by"]);
        for RoceSocket { address, queued_bytes, drops, processes, .. } in &self.roce_sockets {
            let holders: Vec<String> = processes
                .iter()
                .map(|Process { pid, command }| format!("pid {pid} ({command})"))
                .collect();
            let holders = if holders.is_empty() {
                "a process that is not visible from here, or the kernel".to_owned()
            } else {
                holders.join(" ")
            };
            rows.push(vec![
                address.to_string(),
                queued_bytes.to_string(),
                drops.to_string(),
                holders,
            ]);
        }
        if self.roce_sockets.is_empty() {
            writeln!(f, "UDP/{ROCE_PORT}: no socket")?;
        } else {
            writeln!(f, "{rows}")?;
        }
        let guards = self.roce_sockets.iter().filter(|socket| socket.guards);
        let guards: Vec<String> = guards.map(|socket| socket.address.to_string()).collect();
        if !guards.is_empty() {
            writeln!(
                f,
                "{}: frames are read from a packet socket. The UDP socket keeps the port and drops its copies: each counts \
                 as dropped and as InErrors, and nothing is lost.",
                guards.join(", ")
            )?;
        }
        write!(
            f,
            "What the transport counts (packets sent again, NAKs, drops by reason) belongs to the process that has a device \
             open: `--counters` of the commands with two sides prints theirs, a program asks Context::counters."
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_of_the_kernel_are_read() {
        let dev = "Inter-|   Receive                                                |  Transmit\n \
                   face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls \
                   carrier compressed\n    lo:     100       2    0    3    0     0          0         0      400       5    \
                   0    6    0     0       0          0\n";
        let parsed = parse_dev(dev);
        let lo = InterfaceCounters {
            rx_bytes: 100,
            rx_packets: 2,
            rx_dropped: 3,
            tx_bytes: 400,
            tx_packets: 5,
            tx_dropped: 6,
        };
        assert_eq!(parsed, BTreeMap::from([("lo".to_owned(), lo)]));
        let snmp =
            "Tcp: A B\nTcp: 1 2\nUdp: InDatagrams RcvbufErrors\nUdp: 7 8\nUdpLite: X\nUdpLite: 9\n";
        assert_eq!(parse_snmp(snmp)["RcvbufErrors"], 8);
        assert_eq!(
            parse_snmp6("Ip6InReceives 5\nUdp6InErrors   \t 4\n"),
            [("InErrors".to_owned(), 4)]
        );
        for torn in ["", "Udp: A", "lo: 1 2", "Udp6", "Udp6X"] {
            assert!(parse_dev(torn).is_empty() && parse_snmp6(torn).is_empty());
            assert!(parse_snmp(torn).is_empty());
        }
    }

    #[test]
    fn sockets_that_only_keep_the_port_are_explained_once() {
        let socket = |address: &str, guards| RoceSocket {
            address: address.parse().unwrap(),
            queued_bytes: 0,
            drops: 7,
            guards,
            processes: Vec::new(),
        };
        let text = |roce_sockets| {
            let (interfaces, udp) = (BTreeMap::new(), BTreeMap::new());
            KernelCounters { interfaces, udp, roce_sockets }.to_string()
        };
        let [v4, v6] = ["10.0.0.1:4791", "[fd00::1]:4791"];
        let both = text(vec![socket(v4, true), socket("10.0.0.2:4791", false), socket(v6, true)]);
        assert_eq!(both.matches("nothing is lost").count(), 1, "{both}");
        assert!(both.contains(&format!("\n{v4}, {v6}: frames are read")), "{both}");
        assert!(!text(vec![socket(v4, false)]).contains("nothing is lost"));
    }
}
