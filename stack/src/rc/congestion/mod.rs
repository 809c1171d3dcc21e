//! What the path takes: how many packets may be in flight, how long the peer needs to answer, what
//! marks by switches mean.

pub(super) mod ecn;
pub(super) mod rtt;
pub(super) mod window;
