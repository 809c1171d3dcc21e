//! Tests of all backends alike, and the network namespaces that tests run in.

mod groups;
pub(crate) mod parts;
mod paths;
mod rails;
mod scarcity;
pub(crate) mod sides;
pub(crate) mod testns;

use std::io;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU8, Ordering};

use crate::port::contract::{Port, RxDatagram, TxFailure};

/// An address in 127.64.0.0/10 and above that no other test has, of this process or of another:
/// all use UDP/4791.
pub(crate) fn loopback() -> IpAddr {
    static NEXT: AtomicU8 = AtomicU8::new(64);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    assert!(number >= 64, "more addresses than a process has");
    let [_, _, high, low] = std::process::id().to_be_bytes();
    IpAddr::from([127, number, high, low])
}

/// For `flush`: a closure at each call would be compiled with a copy of each backend's sending.
pub(crate) fn no_failure(failure: TxFailure) {
    panic!("{failure:?}");
}

/// Receiving for a sink of one type: a closure at each call would be compiled with a copy of the
/// backend's receiving.
pub(crate) trait ReceiveBy: Port + Sized {
    fn receive_by(
        &mut self,
        budget: usize,
        sink: &mut dyn FnMut(RxDatagram<'_>),
    ) -> io::Result<usize> {
        self.receive(budget, sink)
    }
}

impl<P: Port> ReceiveBy for P {}
