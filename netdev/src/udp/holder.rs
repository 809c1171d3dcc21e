//! Who holds a UDP port: for the message of a bind that failed.

use std::fmt::Write as _;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The most processes that a hint names.
const NAMED_MAX: usize = 3;

/// What to do about `EADDRINUSE` for UDP `address`:`port`: names the processes that hold it, as far
/// as `/proc` shows them.
pub(super) fn hint(address: IpAddr, port: u16) -> String {
    let inodes = inodes(address, port);
    let holders = holders(&inodes);
    if holders.is_empty() {
        return format!(
            "UDP/{port} is held by a process that is not visible from here, or by the kernel (the \
             rdma_rxe module holds it for all addresses: `rdma link` shows its devices): find it \
             with `ss -ulpn 'sport = :{port}'` as root, or use another address"
        );
    }
    let mut hint = format!("UDP/{port} is held by ");
    for (i, (pid, command)) in holders.iter().take(NAMED_MAX).enumerate() {
        let comma = if i == 0 { "" } else { ", " };
        let _ = write!(hint, "{comma}pid {pid} ({command})");
    }
    if holders.len() > NAMED_MAX {
        let _ = write!(hint, " and {} more", holders.len() - NAMED_MAX);
    }
    if holders.iter().any(|(pid, _)| *pid == std::process::id()) {
        hint.push_str(": this process has it open already: close that device first");
    } else {
        hint.push_str(": stop it, or use another address");
    }
    hint
}

/// The inodes of the sockets of this network namespace that are in the way of `address`:`port`.
fn inodes(address: IpAddr, port: u16) -> Vec<u64> {
    // Not /proc/net, which is that of the process's first thread: a thread can be in another
    // namespace.
    ["/proc/thread-self/net/udp", "/proc/thread-self/net/udp6"]
        .iter()
        .filter_map(|path| fs::read_to_string(path).ok())
        .flat_map(|table| {
            let rows = table.lines().skip(1).filter_map(parse_row);
            rows.filter(|(ip, p, _)| *p == port && conflicts(*ip, address))
                .map(|(_, _, inode)| inode)
                .collect::<Vec<_>>()
        })
        .collect()
}

/// Whether a socket bound to `bound` keeps another from binding `wanted` (same port).
fn conflicts(bound: IpAddr, wanted: IpAddr) -> bool {
    match (bound, wanted) {
        // A socket on :: takes IPv4 too unless it is IPv6-only, which /proc does not tell.
        (IpAddr::V6(b), IpAddr::V4(_)) => b.is_unspecified(),
        (IpAddr::V4(_), IpAddr::V6(_)) => false,
        (b, w) => b == w || b.is_unspecified() || w.is_unspecified(),
    }
}

/// Local address, local port and inode of a row of /proc/net/udp or udp6: fields 2 and 10 of
/// `sl local_address rem_address st tx:rx tr:tm->when retrnsmt uid timeout inode …`.
fn parse_row(row: &str) -> Option<(IpAddr, u16, u64)> {
    let mut fields = row.split_ascii_whitespace();
    let (ip, port) = fields.nth(1)?.split_once(':')?;
    let inode = fields.nth(7)?.parse().ok()?;
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
    Some((ip, u16::from_str_radix(port, 16).ok()?, inode))
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
    // Fails for other users' processes: those are not visible.
    let Ok(descriptors) = fs::read_dir(format!("/proc/{pid}/fd")) else { return false };
    descriptors
        .filter_map(|entry| fs::read_link(entry.ok()?.path()).ok())
        .any(|link| link.to_str().is_some_and(|link| links.iter().any(|l| l == link)))
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
    // It comes from another process and goes to a terminal.
    let printable = name.trim().chars().map(|c| if c.is_control() { '?' } else { c });
    let mut short: String = printable.clone().take(CHARS_MAX).collect();
    if printable.count() > CHARS_MAX {
        short.push('…');
    }
    short
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_proc_net_udp_are_read() {
        let v4 = "  512: 0100007F:12B7 00000000:0000 07 00000000:00000000 00:00000000 00000000  \
                  1000        0 88153 2 000000003d1d1f3b 0";
        assert_eq!(parse_row(v4), Some((IpAddr::from([127, 0, 0, 1]), 4791, 88153)));
        let v6 = "  513: 00000000000000000000000001000000:12B7 00000000000000000000000000000000:0000 \
                  07 00000000:00000000 00:00000000 00000000     0        0 7 2 0000000000000000 0";
        assert_eq!(parse_row(v6), Some((IpAddr::V6(Ipv6Addr::LOCALHOST), 4791, 7)));
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
        assert!(conflicts(any, a) && conflicts(a, a) && conflicts(any6, a));
        assert!(!conflicts(b, a) && !conflicts(any, IpAddr::V6(Ipv6Addr::LOCALHOST)));
    }

    #[test]
    fn own_sockets_are_found() {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let address = socket.local_addr().unwrap();
        let hint = hint(address.ip(), address.port());
        let pid = format!("pid {} (", std::process::id());
        assert!(hint.contains(&pid) && hint.contains("this process"), "{hint}");
        drop(socket);
    }
}
