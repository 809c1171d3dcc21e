//! A program that says when each packet leaves: what bandwidth managers in eBPF do (EDT, earliest
//! departure time).

use std::io;

use crate::kernel::bpf::asm::{Asm, Cond, Helper, Insn, Reg, Size};
use crate::kernel::bpf::{Link, Map, Program, TCX_NEXT};

/// Offsets of `tstamp` and `wire_len` in `struct __sk_buff`. The second counts the headers of each
/// segment of a super-packet.
const CTX_TSTAMP: i16 = 152;
const CTX_WIRE_LEN: i16 = 160;

/// A program that gives all packets that leave an interface a departure time, one behind the other
/// at a rate. A queueing discipline that obeys, such as fq, must be the interface's. The program
/// leaves the interface when this is dropped or the process ends.
#[derive(Debug)]
pub struct TcxDepartures {
    _link: Link,
    #[cfg_attr(not(test), expect(dead_code, reason = "the tests read it"))]
    next: Map,
}

impl TcxDepartures {
    /// Attaches the program to the interface with this index, in the calling thread's network
    /// namespace: a byte takes `ns_per_byte` nanoseconds. Error: `EPERM` without `CAP_BPF` and
    /// `CAP_NET_ADMIN` over the machine; `EINVAL` before Linux 6.6.
    pub fn attach(ifindex: u32, ns_per_byte: u16) -> io::Result<Self> {
        let next = Map::counters("edt_next", 1)?;
        let program = Program::load_classifier("edt", &code(&next, ns_per_byte))?;
        Ok(Self { _link: program.attach_tcx(ifindex, false)?, next })
    }
}

/// Like a bandwidth manager's, the program takes no lock: two processors at once may give the same
/// time.
fn code(next: &Map, ns_per_byte: u16) -> Vec<Insn> {
    use Reg::{R0, R1, R2, R3, R6};
    let mut asm = Asm::default();
    let departs = asm.label();

    asm.mov(R6, R1);
    asm.call(Helper::KtimeGetNs);
    asm.load_map_value(R1, next.raw_fd());
    asm.load(Size::Dw, R2, R1, 0);
    asm.jump_if(Cond::Gt, R2, R0, departs);
    asm.mov(R2, R0);
    asm.bind(departs);
    asm.store(Size::Dw, R6, CTX_TSTAMP, R2);

    asm.load(Size::W, R3, R6, CTX_WIRE_LEN);
    asm.multiply_imm(R3, ns_per_byte.into());
    asm.add(R3, R2);
    asm.store(Size::Dw, R1, 0, R3);
    asm.mov_imm(R0, TCX_NEXT);
    asm.exit();
    asm.assemble()
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;
    use crate::kernel::interface::Interface;
    use crate::testing::testns::{self, Pair};

    /// A datagram takes milliseconds: the next one is sent before its departure.
    const NS_PER_BYTE: u16 = 50_000;
    const PAYLOAD: usize = 1000;
    const WIRE: u64 = 14 + 20 + 8 + PAYLOAD as u64;

    #[test]
    fn datagrams_depart_one_behind_the_other() {
        let pair = testns::or_skip!("tcx::datagrams_depart", Pair::new_seeing());
        pair.a.run(|| {
            let index = Interface::by_name("v0").expect("v0").index;
            let attached = TcxDepartures::attach(index, NS_PER_BYTE);
            let attached = testns::or_skip!("tcx::datagrams_depart", attached);
            let socket = UdpSocket::bind("10.9.0.1:0").expect("a socket");
            let next = || attached.next.count(0).expect("the map");
            let send = || {
                let before = next();
                for _ in 0..3 {
                    socket.send_to(&[7; PAYLOAD], "10.9.0.2:4791").expect("sent");
                }
                next() - before
            };
            let due = 3 * WIRE * u64::from(NS_PER_BYTE);
            // Neighbour discovery sends, too.
            testns::wait_until("three datagrams took that long", || send() == due);
        });
    }
}
