//! The kernel's counts of interfaces.

use std::collections::HashMap;
use std::fs;
use std::io;

use serde::Serialize;

/// The counts of an interface since it is there. At a host's end the kernel receives what the
/// container sent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct LinkCounts {
    /// Bytes received.
    pub received_bytes: u64,
    /// Packets received.
    pub received_packets: u64,
    /// Bytes sent.
    pub sent_bytes: u64,
    /// Packets sent.
    pub sent_packets: u64,
}

/// Those of all interfaces of the calling thread's network namespace, by their names. Error: there
/// is no `/proc`.
pub fn link_counts() -> io::Result<HashMap<String, LinkCounts>> {
    Ok(parse(&fs::read_to_string("/proc/thread-self/net/dev")?))
}

/// Two lines of headings, and then one for each interface: eight columns for received packets and
/// eight for sent ones.
fn parse(text: &str) -> HashMap<String, LinkCounts> {
    let line = |line: &str| {
        // A name has no space. It may have a colon; a number has none.
        let (name, counts) = line.rsplit_once(':')?;
        let counts: Vec<u64> =
            counts.split_ascii_whitespace().map_while(|it| it.parse().ok()).collect();
        let at = |column: usize| counts.get(column).copied();
        let counts = LinkCounts {
            received_bytes: at(0)?,
            received_packets: at(1)?,
            sent_bytes: at(8)?,
            sent_packets: at(9)?,
        };
        Some((name.trim().to_owned(), counts))
    };
    text.lines().skip(2).filter_map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_columns_are_those_of_their_headings() {
        let text = "Inter-|   Receive          |  Transmit\n face |bytes packets errs drop ...\n\
                    \x20   lo: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16\n\
                    \x20v:0:4096000000000 2 0 0 0 0 0 0 9 10 0 0 0 0 0 0\n short: 1 2\n\n:\nx: y\n";
        let counts = parse(text);
        let of = |received_bytes, received_packets, sent_bytes, sent_packets| LinkCounts {
            received_bytes,
            received_packets,
            sent_bytes,
            sent_packets,
        };
        assert_eq!(counts["lo"], of(1, 2, 9, 10));
        assert_eq!(counts["v:0"], of(4_096_000_000_000, 2, 9, 10));
        assert_eq!(counts.len(), 2);
        let own = link_counts().expect("a table");
        assert!(own.contains_key("lo"), "{own:?}");
    }
}
