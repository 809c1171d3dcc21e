//! The constant that taste chose. Another value breaks no standard and no interface.

/// Milliseconds in which the kernel finds the peer's address, and then the path. It asks neighbours
/// three times, a second apart. Less: it gives up before. Not measured.
pub(crate) const FINDING: i32 = 5000;
