//! Addresses and ports that no other test uses at the same time, for tests on loopback.
//!
//! A test with its own lab needs none of this.

use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicU32, Ordering};

/// A loopback address, 127.64.0.0 to 127.254.255.255. It differs from all others that this process
/// has given out, and from those of processes that run at the same time, as far as process ids
/// differ. A fixed port (4791) can be bound on it without clashes.
#[must_use]
pub fn loopback() -> Ipv4Addr {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    address(std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// 16 bits of the process id and the number modulo 191, as a host number. The loopback network is a
/// /8, so a last byte of 0 or 255 is an address as any other.
fn address(pid: u32, number: u32) -> Ipv4Addr {
    let [_, _, pid_high, pid_low] = pid.to_be_bytes();
    let [_, _, _, low] = (number % 191).to_be_bytes();
    Ipv4Addr::new(127, 64 + low, pid_high, pid_low)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::UdpSocket;

    #[test]
    fn addresses_differ_and_can_be_bound() {
        let (a, b) = (loopback(), loopback());
        assert_ne!(a, b);
        for address in [a, b] {
            assert!(address.is_loopback());
            UdpSocket::bind((address, 4791)).unwrap();
        }
    }

    #[test]
    fn neighbouring_processes_do_not_share() {
        assert_ne!(address(1000, 5), address(1001, 5));
        let of_256 = (0x1200..0x1300).map(|pid| address(pid, 0));
        assert_eq!(of_256.collect::<std::collections::BTreeSet<_>>().len(), 256);
    }
}
