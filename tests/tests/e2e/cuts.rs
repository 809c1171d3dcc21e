//! WRITEs of several packets, posted one behind the other. Where the port sends super-packets, they
//! leave as messages of one packet each (`stack/src/rc/requester/split.rs`). The tests check the
//! bytes on the wire, that each byte arrives under loss, and the bytes written of a range that is
//! only partly permitted.

use std::time::{Duration, Instant};

use rocinante::device::Backend;
use rocinante::verbs::{Mtu, SendOp};
use rocinante::{Access, WcStatus};
use rocinante_lab::Match;
use rocinante_tests::harness::{Harness, Setup, assert_same, pattern, wr};
use rocinante_tests::oracles::Oracle;
use rocinante_tests::{on_backends, on_each_backend};

on_each_backend!(
    they_leave_in_equal_packets_where_the_port_sends_super_packets,
    without_split_writes_each_is_one_message,
    what_is_before_the_end_of_a_region_is_written
);

/// WRITEs of a list; each has two full packets.
const LIST: usize = 64;
const LEN: usize = 8192;
/// BTH and ICRC; RETH.
const HEADERS: u64 = 12 + 4;
const RETH: u64 = 16;
/// The longest wait for an event of a test.
const PATIENCE: Duration = Duration::from_secs(60);

/// Posts lists of WRITEs until one of them has left without a retransmission, and compares the
/// data. Returns the bytes of that list on the wire.
fn list_on_the_wire(setup: &Setup) -> u64 {
    let harness = Harness::new(setup);
    let [a, b] = &harness.sides;
    let [qp, _peer] = harness.pair();
    let source = a.pd.allocate(LIST * LEN, Access::NONE).unwrap();
    let target = b.pd.allocate(LIST * LEN, Access::ALL).unwrap();
    let deadline = Instant::now() + PATIENCE;
    let mut round = 0;
    while Instant::now() < deadline {
        round += 1;
        let bytes = pattern(LIST * LEN, round);
        source.write(0, &bytes);
        let before = a.ctx.counters().port;
        let lists: Vec<_> = (0..LIST).map(|at| [source.sge(at * LEN, LEN)]).collect();
        let requests: Vec<_> = (0..LIST)
            .map(|at| {
                let remote = target.address() + (at * LEN) as u64;
                let op = SendOp::Write { remote, rkey: target.rkey(), imm: None };
                wr(at as u64, op, &lists[at])
            })
            .collect();
        qp.post_send(&requests).unwrap();
        for at in 0..LIST {
            a.succeed(at as u64);
        }
        assert_same(&target.to_vec(0, LIST * LEN), &bytes, "all of it");
        let after = a.ctx.counters().port;
        // Nothing was retransmitted, and no probe was sent.
        if after.tx_datagrams - before.tx_datagrams == 2 * LIST as u64 {
            return after.tx_bytes - before.tx_bytes;
        }
    }
    panic!("in each of {round} rounds something went twice: {:?}", a.ctx.counters());
}

/// Bytes of the list on the wire if each WRITE is one message.
const AS_MESSAGES: u64 = LIST as u64 * (LEN as u64 + 2 * HEADERS + RETH);

fn they_leave_in_equal_packets_where_the_port_sends_super_packets(backend: Backend) {
    let bytes = list_on_the_wire(&Setup::new(backend));
    if backend == Backend::Xdp {
        assert_eq!(bytes, AS_MESSAGES, "there are no super-packets to fill");
    } else {
        // The first WRITE leaves alone, and so may others that find the send queue empty, but where
        // the peer has admitted one to that range before, in an earlier round.
        let cut = (bytes - AS_MESSAGES) / RETH;
        assert!((LIST as u64 / 2..=LIST as u64).contains(&cut), "{cut} of {LIST}");
    }
}

fn without_split_writes_each_is_one_message(backend: Backend) {
    assert_eq!(list_on_the_wire(&Setup { cut_writes: false, ..Setup::new(backend) }), AS_MESSAGES);
}

/// The request fails as if it were alone, and nothing outside of the region is written. If it was
/// split, the packets before the first refused one are written; else none is.
fn what_is_before_the_end_of_a_region_is_written(backend: Backend) {
    let harness = Harness::new(&Setup::new(backend).mtu(Mtu::Mtu1024));
    if backend == Backend::Xdp {
        for round in 0..5 {
            assert_eq!(written_before_the_end(&harness, round), 1, "round {round}");
        }
        return;
    }
    // The WRITE is not split if the one before it is acknowledged already.
    let deadline = Instant::now() + PATIENCE;
    let mut round = 0;
    loop {
        match written_before_the_end(&harness, round) {
            2048 => return,
            written => assert_eq!(written, 1, "round {round}"),
        }
        round += 1;
        assert!(Instant::now() < deadline, "never in {round} rounds");
    }
}

/// Posts a WRITE of one byte, and behind it one of four packets to a region that ends within the
/// third. Returns the number of bytes of the region that were written.
fn written_before_the_end(harness: &Harness, round: u64) -> usize {
    let [a, b] = &harness.sides;
    let [qp, _peer] = harness.pair();
    let source = a.pd.allocate(4096, Access::NONE).unwrap();
    // No byte is zero, which the region holds before.
    let bytes: Vec<u8> = pattern(4096, round).iter().map(|byte| byte | 1).collect();
    source.write(0, &bytes);
    let target = b.pd.allocate(3000, Access::ALL).unwrap();
    let op = SendOp::Write { remote: target.address(), rkey: target.rkey(), imm: None };
    let lists = [[source.sge(0, 1)], [source.sge(0, 4096)]];
    qp.post_send(&[wr(1, op, &lists[0]), wr(2, op, &lists[1])]).unwrap();
    a.succeed(1);
    a.complete(2, WcStatus::RemAccessErr);
    let found = target.to_vec(0, 3000);
    let written = found.iter().rposition(|&byte| byte != 0).map_or(0, |last| last + 1);
    assert_same(&found[..written], &bytes[..written], "the bytes written");
    written
}

on_backends! {
    udp_with_losses_of_super_packets: Udp + nft + ethtool => everything_arrives(Backend::Udp, true);
    udp_with_losses_of_datagrams: Udp + nft + ethtool => everything_arrives(Backend::Udp, false);
    packet_with_losses_of_super_packets: Packet + nft + ethtool =>
        everything_arrives(Backend::Packet, true);
    packet_with_losses_of_datagrams: Packet + nft + ethtool =>
        everything_arrives(Backend::Packet, false);
}

/// The fewest of the kernel's packets that the network must drop.
const DROPS_MIN: u64 = 30;
/// The longest WRITE, and the number of places that WRITEs go to.
const LONGEST: usize = 12 * 1024;
const PLACES: usize = 32;

/// WRITEs of one to twelve packets, each to its own place, many times over. In the end each place
/// holds the last WRITE posted to it.
fn everything_arrives(backend: Backend, whole: bool) {
    let mut setup = Setup::new(backend)
        .mtu(Mtu::Mtu1024)
        .may_break(Oracle::Retransmissions, "the bridge drops packets");
    setup.segmentation = whole;
    // 0.3 s, eight times: on a busy machine a side may not run for long.
    setup.connect = setup.connect.timeout(16).retry_cnt(7);
    let harness = Harness::new(&setup);
    let [a, b] = &harness.sides;
    let lose = harness.lab().lose(&Match::roce(), 2.0).expect("a rule");
    let [qp, _peer] = harness.pair();
    let source = a.pd.allocate(PLACES * LONGEST, Access::NONE).unwrap();
    let target = b.pd.allocate(PLACES * LONGEST, Access::ALL).unwrap();
    let mut model = vec![0; PLACES * LONGEST];
    let deadline = Instant::now() + PATIENCE;
    let mut round = 0_u64;
    while lose.counter().expect("a counter").packets < DROPS_MIN {
        assert!(Instant::now() < deadline, "too few drops in {round} rounds");
        round += 1;
        let bytes = pattern(PLACES * LONGEST, round);
        source.write(0, &bytes);
        let len = |place: usize| match (round as usize * 7 + place * 5) % 16 {
            packets @ 1..=12 => packets * 1024 - usize::from(place.is_multiple_of(3)) * (place + 1),
            _ => 2048,
        };
        for place in 0..PLACES {
            let (at, len) = (place * LONGEST, len(place));
            let remote = target.address() + at as u64;
            let op = SendOp::Write { remote, rkey: target.rkey(), imm: None };
            qp.post_send(&[wr(place as u64, op, &[source.sge(at, len)])]).unwrap();
            model[at..at + len].copy_from_slice(&bytes[at..at + len]);
        }
        for place in 0..PLACES {
            a.succeed(place as u64);
        }
        assert_same(&target.to_vec(0, model.len()), &model, "the last WRITE posted");
    }
    let [a, b] = harness.sides.each_ref().map(|side| side.ctx.counters());
    assert!(a.transport.retransmitted_pkts > 0, "{a:?}");
    // Each packet has a BTH and an ICRC, the first of a message a RETH, and the last of a request
    // up to three bytes of padding.
    let again = a.transport.retransmitted_pkts + a.transport.tail_probes;
    let messages_max = round * PLACES as u64 + again;
    let more = a.port.tx_bytes - a.transport.sent_bytes - HEADERS * a.port.tx_datagrams;
    assert!(more > (RETH + 3) * messages_max, "nothing was cut: {a:?}");
    assert_eq!((a.drops.icrc, b.drops.icrc), (0, 0));
}
