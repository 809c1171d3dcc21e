//! CRC-32 (the Ethernet polynomial) as the ICRC of RoCEv2 needs it: from any state on, of packets that are short, with the byte of the BTH that routers change set
//! to ones.
//!
//! Libraries are made for long inputs: of 80 bytes most of what they do is to look at the processor and to choose. Here that is chosen once
//! ([`Summer::detect`]), and a packet goes through one loop of carry-less multiplications. What is long is left to `crc32fast`.

#[cfg(target_arch = "x86_64")]
pub mod folding;
mod polynomial;
mod summer;

use crc32fast::Hasher;

pub use polynomial::{ONE, multiply, power, times_x};
pub use summer::{BTH_LEN, PACKET_MIN, Summer};

/// The CRC-32 of something of which it was `before`, and `bytes` behind it.
#[must_use]
pub fn update(before: u32, bytes: &[u8]) -> u32 {
    let mut hasher = Hasher::new_with_initial(before);
    hasher.update(bytes);
    hasher.finalize()
}
