//! tcx: the number of programs at its hooks, and a program that drops and counts UDP datagrams to
//! two ports, in the place of policies written in eBPF; [`TcxDepartures`] is another.

mod departures;

use std::io;

pub use self::departures::TcxDepartures;
use crate::kernel::bpf::asm::{Asm, Cond, Helper, Insn, Label, Reg, Size, net_u16};
use crate::kernel::bpf::{self, Link, Map, Program, TCX_DROP, TCX_NEXT};

/// Where the program copies the headers to: bytes below the frame pointer.
const FRAME: i16 = -64;
/// Where it builds the counter's key.
const KEY: i16 = -72;
const ETH_TYPE: i16 = FRAME + 12;
const IP: i16 = FRAME + 14;
const V4_HEADERS: i32 = 14 + 20 + 8;
const V6_HEADERS: i32 = 14 + 40 + 8;
const UDP: u32 = 17;

/// The number of programs on a tcx hook of an interface, in the calling thread's network namespace;
/// 0 if the kernel has no tcx (before 6.6). Error: `EPERM` without `CAP_NET_ADMIN` over the
/// machine.
pub fn tcx_programs(ifindex: u32, ingress: bool) -> io::Result<u32> {
    match bpf::programs(ifindex, ingress, &mut []) {
        Err(e) if matches!(e.raw_os_error(), Some(libc::EINVAL | libc::ENOSYS)) => Ok(0),
        count => count,
    }
}

/// A program on an interface that drops and counts UDP datagrams to either port, of IPv4 without
/// options and IPv6 without extension headers. It leaves the interface when this is dropped or the
/// process ends.
#[derive(Debug)]
pub struct TcxDrop {
    _link: Link,
    dropped: Map,
}

impl TcxDrop {
    /// Attaches the program to the ingress (`ingress`) or egress of the interface with this index,
    /// in the calling thread's network namespace. Error: `EPERM` without `CAP_BPF` and
    /// `CAP_NET_ADMIN` over the machine; `EINVAL` before Linux 6.6.
    pub fn attach(ifindex: u32, ingress: bool, ports: [u16; 2]) -> io::Result<Self> {
        let dropped = Map::numbers("roce_dropped", 1)?;
        let program = Program::load_classifier("roce_drop", &code(&dropped, ports))?;
        Ok(Self { _link: program.attach_tcx(ifindex, ingress)?, dropped })
    }

    /// The number of packets (skbs) dropped so far. Error: the error of bpf(2).
    pub fn dropped(&self) -> io::Result<u64> {
        self.dropped.value(&[0; 4]).map(u64::from)
    }
}

fn code(dropped: &Map, ports: [u16; 2]) -> Vec<Insn> {
    use Reg::{R0, R1, R2, R5, R6, R10};
    let mut asm = Asm::default();
    let [next, v4, port, hit, out] = [(); 5].map(|()| asm.label());

    asm.mov(R6, R1);
    copy(&mut asm, V4_HEADERS, next);
    asm.load(Size::H, R5, R10, ETH_TYPE);
    asm.jump32_if_imm(Cond::Eq, R5, net_u16(0x0800), v4);
    asm.jump32_if_imm(Cond::Ne, R5, net_u16(0x86dd), next);

    copy(&mut asm, V6_HEADERS, next);
    asm.load(Size::B, R5, R10, IP + 6);
    asm.jump32_if_imm(Cond::Ne, R5, UDP, next);
    asm.load(Size::H, R5, R10, IP + 40 + 2);
    asm.jump(port);

    asm.bind(v4);
    asm.load(Size::B, R5, R10, IP);
    asm.jump32_if_imm(Cond::Ne, R5, 0x45, next);
    asm.load(Size::B, R5, R10, IP + 9);
    asm.jump32_if_imm(Cond::Ne, R5, UDP, next);
    asm.load(Size::H, R5, R10, IP + 20 + 2);

    asm.bind(port);
    asm.jump32_if_imm(Cond::Eq, R5, net_u16(ports[0]), hit);
    asm.jump32_if_imm(Cond::Ne, R5, net_u16(ports[1]), next);

    asm.bind(hit);
    asm.store_imm(Size::W, R10, KEY, 0);
    asm.load_map(R1, dropped.raw_fd());
    asm.mov(R2, R10);
    asm.add_imm(R2, i32::from(KEY));
    asm.call(Helper::MapLookupElem);
    asm.jump_if_imm(Cond::Eq, R0, 0, out);
    asm.load(Size::W, R1, R0, 0);
    asm.add_imm(R1, 1);
    asm.store(Size::W, R0, 0, R1);
    asm.bind(out);
    asm.mov_imm(R0, TCX_DROP);
    asm.exit();

    asm.bind(next);
    asm.mov_imm(R0, TCX_NEXT);
    asm.exit();
    asm.assemble()
}

/// Copies the first `len` bytes of the packet to the stack. Jumps to `short` if it has fewer.
fn copy(asm: &mut Asm, len: i32, short: Label) {
    asm.mov_imm(Reg::R2, 0);
    asm.copy_packet(FRAME, len, short);
}

#[cfg(test)]
mod tests {

    use super::*;
    use crate::kernel::interface::Interface;
    use crate::testing::testns::{self, Pair};

    const PORTS: [u16; 2] = [4790, 4791];

    fn frame(v6: bool, protocol: u8, port: u16) -> Vec<u8> {
        let mut frame = vec![2; 12];
        if v6 {
            frame.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 24, protocol, 64]);
            frame.extend([0xfd; 32]);
        } else {
            frame.extend([0x08, 0x00, 0x45, 0, 0, 44, 0, 0, 0x40, 0, 64, protocol, 0, 0]);
            frame.extend([192, 0, 2, 1, 192, 0, 2, 2]);
        }
        frame.extend([0xc0, 0]);
        frame.extend(port.to_be_bytes());
        frame.extend([0, 24, 0, 0]);
        frame.extend([0x55; 16]);
        frame
    }

    #[test]
    fn datagrams_to_both_ports_are_dropped_and_counted() {
        let dropped = testns::or_skip!("tcx::datagrams_to_both_ports", Map::numbers("test", 1));
        let loaded = Program::load_classifier("test", &code(&dropped, PORTS));
        let program = testns::or_skip!("tcx::datagrams_to_both_ports", loaded);
        let verdict = |frame: &[u8]| program.test_run(frame).expect("BPF_PROG_TEST_RUN");
        let mut due = 0;
        for v6 in [false, true] {
            for port in PORTS {
                assert_eq!(verdict(&frame(v6, 17, port)), TCX_DROP.cast_unsigned());
                due += 1;
                assert_eq!(dropped.value(&[0; 4]).unwrap(), due);
            }
            for other in [frame(v6, 17, 4792), frame(v6, 17, 4789), frame(v6, 6, 4791)] {
                assert_eq!(verdict(&other), TCX_NEXT.cast_unsigned());
            }
            // Cut in the middle of the UDP header.
            let short = if v6 { 14 + 40 + 4 } else { 14 + 20 + 4 };
            let short = verdict(&frame(v6, 17, 4791)[..short]);
            assert_eq!(short, TCX_NEXT.cast_unsigned());
        }
        assert_eq!(dropped.value(&[0; 4]).unwrap(), due);
        assert!(dropped.value(&[1, 0, 0, 0]).is_err(), "there is one counter");
    }

    #[test]
    fn programs_on_tcx_are_counted() {
        let pair = testns::or_skip!("tcx::programs_on_tcx_are_counted", Pair::new_seeing());
        pair.a.run(|| {
            let iface = Interface::by_name("v0").expect("v0");
            for ingress in [true, false] {
                let count = || tcx_programs(iface.index, ingress).expect("readable");
                assert_eq!(count(), 0);
                let attached = TcxDrop::attach(iface.index, ingress, PORTS);
                let attached = testns::or_skip!("tcx::programs_on_tcx_are_counted", attached);
                assert_eq!(count(), 1);
                let rules = crate::choose::policy::audit(&iface).rules;
                assert_eq!(rules.len(), 1, "{rules:?}");
                assert_eq!(rules[0].packet_bypasses, ingress, "egress binds a packet socket");
                drop(attached);
                // A child that another thread is just forking holds the descriptors too, until it
                // executes a program.
                testns::wait_until("it is detached", || count() == 0);
            }
        });
    }
}
