//! For fuzz targets only.

/// Parses a peer's hello of [`Exchange`](crate::exchange::Exchange); formats and parses a valid one
/// again.
pub fn hello(line: &str) {
    crate::exchange::try_parse(line);
}
