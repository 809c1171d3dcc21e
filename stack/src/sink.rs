//! The way out of the engine, which the caller provides.

use crate::wire::icrc::Summed;

/// Where packets go: a slot in a run of datagrams, a frame, an arena.
pub trait TxSink {
    /// Finds room for a packet of `len` bytes, BTH to ICRC, on `path` (as in
    /// [`PeerAddress::path`](crate::PeerAddress::path)). Then `fill` writes all of it but its last
    /// four bytes. Then the sink computes the ICRC and sends the packet: the ICRC covers the
    /// headers around the packet, which only the sink knows. `fill` returns the part of the packet
    /// of which it already knows the CRC-32, for
    /// [`Template::seal_around`](crate::wire::icrc::Template::seal_around).
    ///
    /// Returns `Ok(false)` if there is no room now; `fill` was not called then. The engine tries
    /// the same packet again, and no other before it. A sink that will never have room for the
    /// packet loses it, as a network may: it returns `Ok(true)` and need not call `fill`. Error:
    /// the error of `fill`; nothing is sent then.
    fn send<E>(
        &mut self,
        path: u32,
        len: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<Option<Summed>, E>,
    ) -> Result<bool, E>;
}
