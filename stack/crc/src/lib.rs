//! CRC-32 (the Ethernet polynomial) for the ICRC of RoCEv2: starting from any state, over short
//! packets, with one byte of the BTH set to ones because routers change it.
//!
//! Libraries are made for long inputs: for 80 bytes, they spend most of the time on examining the
//! processor and choosing a method. Here that happens once ([`Summer::detect`]), and a packet goes
//! through one loop of carry-less multiplications. Long inputs are left to `crc32fast`.

#[cfg(target_arch = "x86_64")]
pub mod folding;
mod polynomial;
mod summer;

use crc32fast::Hasher;

pub use polynomial::{ONE, multiply, power, times_x};
pub use summer::{BTH_LEN, PACKET_MIN, Summer};

/// The CRC-32 of an input followed by `bytes`; `before` is the CRC-32 of that input.
#[must_use]
pub fn update(before: u32, bytes: &[u8]) -> u32 {
    let mut hasher = Hasher::new_with_initial(before);
    hasher.update(bytes);
    hasher.finalize()
}
