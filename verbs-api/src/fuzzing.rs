//! For fuzz targets only.

/// Reads a peer's hello of [`Exchange`](crate::Exchange), and what was understood again.
pub fn hello(line: &str) {
    crate::exchange::try_parse(line);
}
