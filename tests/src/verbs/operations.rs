//! Every operation, at sizes around packet borders. All bytes are compared, also those around the
//! target.

use rocinante::device::{Backend, Provider};
use rocinante::verbs::{Mtu, SendOp, WcOpcode};
use rocinante::{Access, Mr, Qp, RecvWr};

use crate::harness::{Family, Harness, On, Setup, assert_same, pattern, wr};

/// Tests with addresses of one family and one path MTU.
macro_rules! cells {
    ($( $name:ident: $family:ident $mtu:ident; )*) => {$(
        #[doc = concat!("With ", stringify!($family), " and ", stringify!($mtu), ".")]
        ///
        /// Panics if something is otherwise than it should be.
        pub fn $name(on: On) {
            if let On::Kernel(device) = &on {
                crate::require!(device.address_of(Family::$family));
            }
            let cell = format!("ip{}_{}", stringify!($family), Mtu::$mtu);
            assert!(cell.eq_ignore_ascii_case(stringify!($name)), "{cell}");
            run(&Setup::new(on).family(Family::$family).mtu(Mtu::$mtu));
        }
    )*};
}

cells! {
    ipv4_256: V4 Mtu256;
    ipv4_1024: V4 Mtu1024;
    ipv4_4096: V4 Mtu4096;
    ipv6_256: V6 Mtu256;
    ipv6_1024: V6 Mtu1024;
    ipv6_4096: V6 Mtu4096;
}

/// An operation of a data length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Op {
    Send,
    SendImm,
    Write,
    WriteImm,
    Read,
}

const OPS: [Op; 5] = [Op::Send, Op::SendImm, Op::Write, Op::WriteImm, Op::Read];
const IMM: [u8; 4] = [0xde, 0xad, 0xbe, 0xef];
const LARGEST: usize = (1 << 20) + 3;
/// Bytes around the target that must not change.
const GUARD: usize = 64;

/// Every operation at every size. Panics if something is otherwise than it should be.
fn run(setup: &Setup) {
    let harness = Harness::new(setup);
    let [a, b] = &harness.sides;
    let qps = harness.pair();
    // Each side has two regions: one is the source, one the target. READ swaps the sides.
    let regions = [a, b].map(|side| {
        [Access::REMOTE_READ, Access::LOCAL_WRITE | Access::REMOTE_WRITE]
            .map(|access| side.pd.allocate(LARGEST + 2 * GUARD, access).unwrap())
    });
    let mtu = setup.connect.mtu.unwrap().bytes() as usize;
    let mut verified = 0;
    for (index, len) in [0, 1, mtu - 1, mtu, mtu + 1, LARGEST].into_iter().enumerate() {
        for op in OPS {
            let seed = (index * OPS.len() + op as usize) as u64;
            data(op, len, seed, &harness, &qps, &regions);
            verified += 1;
        }
    }
    assert_eq!(verified, 30);
    atomics(&harness, &qps[0]);
    for side in &harness.sides {
        assert_eq!(side.cq.poll_one().unwrap(), None);
        let counters = side.ctx.counters();
        let drops: Vec<_> = counters.drops.iter().filter(|(_, count)| *count > 0).collect();
        assert_eq!(drops, [], "nothing was lost or malformed: {counters:?}");
        match &setup.on {
            On::Software(backend) => assert_eq!(side.ctx.backend(), Some(*backend)),
            On::Encrypted => assert_eq!(side.ctx.backend(), Some(Backend::Udp)),
            On::Kernel(_) => assert_eq!(side.ctx.provider(), Provider::Hardware),
        }
    }
}

/// One message of `len` bytes, from and to unaligned addresses.
fn data(op: Op, len: usize, seed: u64, harness: &Harness, qps: &[Qp; 2], regions: &[[Mr; 2]; 2]) {
    let [a, b] = &harness.sides;
    let (from, to) = (seed as usize % 8, GUARD - seed as usize % 11);
    let (source, target) = match op {
        Op::Read => (&regions[1][0], &regions[0][1]),
        _ => (&regions[0][0], &regions[1][1]),
    };
    let bytes = pattern(len, seed + 1);
    source.write(from, &bytes);
    let mut expected = pattern(len + 2 * GUARD, !seed);
    target.write(0, &expected);
    expected[to..to + len].copy_from_slice(&bytes);

    let (remote, rkey) = (target.address() + to as u64, target.rkey());
    let request = match op {
        Op::Send => SendOp::Send { imm: None },
        Op::SendImm => SendOp::Send { imm: Some(IMM) },
        Op::Write => SendOp::Write { remote, rkey, imm: None },
        Op::WriteImm => SendOp::Write { remote, rkey, imm: Some(IMM) },
        Op::Read => SendOp::Read { remote: source.address() + from as u64, rkey: source.rkey() },
    };
    // In one element, in two, or in more.
    let local = |mr: &Mr, offset: usize| match seed % 3 {
        0 => vec![mr.sge(offset, len)],
        1 => vec![mr.sge(offset, len / 2), mr.sge(offset + len / 2, len - len / 2)],
        _ => vec![
            mr.sge(offset, len / 3),
            mr.sge(offset, 0),
            mr.sge(offset + len / 3, len - len / 3),
        ],
    };
    match op {
        Op::Send | Op::SendImm => {
            let sges = local(target, to);
            qps[1].post_recv(&[RecvWr { wr_id: seed, sges: &sges }]).unwrap();
        }
        Op::WriteImm => qps[1].post_recv(&[RecvWr { wr_id: seed, sges: &[] }]).unwrap(),
        Op::Write | Op::Read => {}
    }
    let sges = if op == Op::Read { local(target, to) } else { local(source, from) };
    qps[0].post_send(&[wr(1000 + seed, request, &sges)]).unwrap();

    let what = format!("{op:?} of {len} bytes");
    let sent = a.succeed(1000 + seed);
    assert_eq!(sent.opcode, request.completion(), "{what}");
    assert_eq!(sent.qpn, qps[0].qpn());
    if op == Op::Read {
        assert_eq!(sent.byte_len as usize, len, "{what}");
    }
    if matches!(op, Op::Send | Op::SendImm | Op::WriteImm) {
        let received = b.succeed(seed);
        let imm = if op == Op::Send { None } else { Some(IMM) };
        let opcode = if op == Op::WriteImm { WcOpcode::RecvRdmaWithImm } else { WcOpcode::Recv };
        assert_eq!((received.imm, received.opcode), (imm, opcode), "{what}");
        assert_eq!((received.byte_len as usize, received.qpn), (len, qps[1].qpn()), "{what}");
    }
    assert_same(&target.to_vec(0, len + 2 * GUARD), &expected, &what);
}

/// Compare-and-swap and fetch-and-add: the values found, the values left, and the words around
/// them.
fn atomics(harness: &Harness, qp: &Qp) {
    let [a, b] = &harness.sides;
    let words = b.pd.allocate(4096, Access::LOCAL_WRITE | Access::REMOTE_ATOMIC).unwrap();
    let results = a.pd.allocate(4096, Access::LOCAL_WRITE).unwrap();
    let fill = 0x1111_2222_3333_4444u64;
    for index in 0..512 {
        words.word(8 * index).store(fill, std::sync::atomic::Ordering::SeqCst);
    }
    let rkey = words.rkey();
    let mut model = vec![fill; 512];
    let numbers = pattern(8 * 400, 77);
    for (index, number) in numbers.chunks_exact(8).enumerate() {
        let value = u64::from_le_bytes(number.try_into().unwrap());
        let at = (value % 512) as usize;
        let remote = words.address() + 8 * at as u64;
        let found = model[at];
        let op = match index % 3 {
            0 => SendOp::FetchAdd { remote, rkey, add: value },
            1 => SendOp::CompareSwap { remote, rkey, compare: found, swap: value },
            // Does not match, except with probability 2^-64.
            _ => SendOp::CompareSwap { remote, rkey, compare: !found, swap: value },
        };
        model[at] = match index % 3 {
            0 => found.wrapping_add(value),
            1 => value,
            _ => found,
        };
        let (wr_id, result) = (index as u64, 8 * (index % 512));
        qp.post_send(&[wr(wr_id, op, &[results.sge(result, 8)])]).unwrap();
        let done = a.succeed(wr_id);
        assert_eq!((done.opcode, done.byte_len), (op.completion(), 8));
        assert_eq!(results.load_u64(result), found, "what operation {index} found");
    }
    let left: Vec<u64> = (0..512).map(|index| words.load_u64(8 * index)).collect();
    assert_eq!(left, model);
    // One-sided operations complete nothing at their target.
    assert_eq!(b.cq.poll_one().unwrap(), None);
}
