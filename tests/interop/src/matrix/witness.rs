//! A cell on the wire, as seen by another program. All packets are captured at the guest's tap,
//! decoded by tshark, and compared with the requests.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rocinante_tests::tshark::{Capture, number};

use super::Bench;
use super::cell::{Cell, Requester, Setting};
use super::node::{Node, SEND, Step, at, signaled};
use super::scenario::SCENARIOS;
use crate::agent::proto::{LOCAL_WRITE, MW_BIND, Op, REMOTE_WRITE, Range};

/// The path MTU of the captured connection.
const MTU: u32 = 1024;
/// The counter's value before rxe adds to it.
const COUNTER: u64 = 0x0102_0304_0506_0708;

/// A field of a packet, by tshark's name without `infiniband.`.
type Fields = BTreeMap<&'static str, u64>;

/// The fields to check.
#[rustfmt::skip]
const FIELDS: [&str; 15] = [
    "bth.opcode", "bth.destqp", "bth.psn", "bth.p_key", "bth.tver", "bth.m", "reth.va", "reth.r_key", "reth.dmalen",
    "atomiceth.swapdt", "atomiceth.cmpdt", "aeth.syndrome", "aeth.msn", "atomicacketh.origremdt",
    "ieth",
];

/// Ends a capture once it has this number of packets of `from`, and returns tshark's view of it.
fn decode(capture: &mut Capture, from: &Node, packets: usize) -> Step<Vec<(bool, Fields)>> {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        // tshark writes packets with a delay, and the last one perhaps only in part.
        let ours =
            read(capture, from).map_or(0, |seen| seen.iter().filter(|it| is_request(it)).count());
        if ours >= packets || Instant::now() > deadline {
            capture.stop()?;
            return read(capture, from);
        }
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// Whether a packet is one of ours, and not the question on QP1 that a peer gets once.
fn is_request((ours, fields): &(bool, Fields)) -> bool {
    *ours && fields.get("bth.destqp") != Some(&1)
}

/// Each captured packet: whether it is of `from`, and its fields.
fn read(capture: &Capture, from: &Node) -> Step<Vec<(bool, Fields)>> {
    let wanted = FIELDS.map(|field| format!("infiniband.{field}"));
    let mut names = vec!["ip.src", "ipv6.src"];
    names.extend(wanted.iter().map(String::as_str));
    let source = from.address().to_string();
    let packet = |columns: Vec<String>| {
        let fields = FIELDS.iter().zip(&columns[2..]);
        let fields = fields.filter_map(|(name, text)| Some((*name, value(name, text)?)));
        (columns[..2].contains(&source), fields.collect())
    };
    Ok(capture.packets(&names)?.into_iter().map(packet).collect())
}

/// tshark's text of a field as a number: IETH is printed as bytes, other fields as numbers.
fn value(name: &str, text: &str) -> Option<u64> {
    match name {
        "ieth" => u64::from_str_radix(&text.replace(':', ""), 16).ok(),
        _ => number(text),
    }
}

impl Bench {
    /// Both sides do all kinds of requests. tshark's view of Rocinante's packets is compared with
    /// the requests: opcode, QPN, PSN, RETH, AtomicETH, AETH and IETH. No packet of either side may
    /// be malformed. Error: the first deviation.
    pub fn witness(&self, setting: Setting) -> Step {
        let scenario = SCENARIOS.iter().find(|scenario| scenario.name == "psn_wraps");
        let scenario = scenario.ok_or("there is no scenario with wrapping PSNs")?;
        let setting = Setting { requester: Requester::Ours, mtu: MTU, ..setting };
        let mut session = self.session(&Cell { scenario, setting })?;
        let mut capture = Capture::start(self.lab.host(), self.guest.network().tap())?;
        let [our_psn, rxe_psn] = session.plan.psns;
        let (ours, rxe) = (&mut session.active, &mut session.passive);
        let mut wanted = requests(ours, rxe, our_psn)?;
        wanted.extend(responses(ours, rxe, rxe_psn)?);
        for fields in &mut wanted {
            fields.extend([("bth.destqp", rxe.qpn().into()), ("bth.p_key", 0xffff)]);
            fields.extend([("bth.tver", 0), ("bth.m", 1)]);
        }
        let seen = decode(&mut capture, ours, wanted.len())?;
        let questions = seen.iter().filter(|it| it.0 && !is_request(it)).count();
        if questions > 1 {
            return Err(format!("the peer was asked {questions} times who it is"));
        }
        compare(&wanted, seen.into_iter().filter(is_request).map(|(_, f)| f))
    }
}

/// Does all kinds of requests to rxe; returns the packets that must be seen.
fn requests(ours: &mut Node, rxe: &mut Node, first: u32) -> Step<Vec<Fields>> {
    let (va, rkey) = rxe.remote(0x100);
    let reth = |len: u64| {
        Fields::from([("reth.va", va), ("reth.r_key", rkey.into()), ("reth.dmalen", len)])
    };
    rxe.receive(0, &[at(0x8000, 4096); 3])?;
    ours.perform(0, Op::Send { imm: Some(0xcafe) }, &[at(0, 2500)])?;
    ours.perform(1, SEND, &[at(0, 10)])?;
    ours.perform(2, rxe.write_to(0x100, None), &[at(0, 2100)])?;
    ours.perform(3, rxe.write_to(0x100, Some(5)), &[at(0, 4)])?;
    ours.perform(4, rxe.read_from(0x100), &[at(0x4000, 3000)])?;
    let (remote, compare, swap) = (va, 0x1111_2222_3333_4444, 0x5555_6666_7777_8888);
    ours.perform(5, Op::CompareSwap { remote, rkey, compare, swap }, &[at(0x4000, 8)])?;
    ours.perform(6, Op::FetchAdd { remote, rkey, add: 3 }, &[at(0x4000, 8)])?;
    ours.perform(7, rxe.write_to(0x100, None), &[])?;
    rxe.completions(3)?;
    // Two windows, which two SENDs invalidate: one of several packets, and one of one.
    rxe.region(4096, LOCAL_WRITE | MW_BIND)?;
    let keys = [(0, 8, 1500), (1, 9, 20)].map(|(window, wr_id, len)| -> Step<u32> {
        rxe.window(2)?;
        let part = Range { region: 1, offset: 0, len: 64 };
        let rkey = rxe.bind(0, window, part, REMOTE_WRITE)?.rkey;
        rxe.receive(wr_id, &[at(0x8000, 4096)])?;
        ours.perform(wr_id, Op::SendInv { rkey }, &[at(0, len)])?;
        let wc = rxe.ends(wr_id, "SUCCESS")?;
        rxe.expect(&wc.invalidated, &Some(rkey), "the invalidated key").map(|()| rkey)
    });
    let [first_key, second_key] = keys;
    let (first_key, second_key) = (first_key?, second_key?);
    let ieth = |rkey: u32| Fields::from([("ieth", rkey.into())]);
    // Opcodes of ib_pack.h, each with its number of PSNs and its headers.
    let atomic = |swap: u64, compare: u64| {
        let mut fields = reth(0);
        fields.remove("reth.dmalen");
        fields.extend([("atomiceth.swapdt", swap), ("atomiceth.cmpdt", compare)]);
        fields
    };
    let nothing = Fields::new;
    Ok(numbered(
        first,
        vec![
            (0x00, 1, nothing()),
            (0x01, 1, nothing()),
            (0x03, 1, nothing()),
            (0x04, 1, nothing()),
            (0x06, 1, reth(2100)),
            (0x07, 1, nothing()),
            (0x08, 1, nothing()),
            (0x0b, 1, reth(4)),
            (0x0c, 3, reth(3000)),
            (0x13, 1, atomic(swap, compare)),
            (0x14, 1, atomic(3, 0)),
            (0x0a, 1, reth(0)),
            (0x00, 1, nothing()),
            (0x16, 1, ieth(first_key)),
            (0x17, 1, ieth(second_key)),
        ],
    ))
}

/// Lets rxe do all kinds of requests, and at last one that is refused; returns the packets that
/// must be seen.
fn responses(ours: &mut Node, rxe: &mut Node, first: u32) -> Step<Vec<Fields>> {
    ours.store(0x40, COUNTER)?;
    let (remote, rkey) = ours.remote(0x40);
    rxe.perform(0, ours.write_to(0x400, None), &[at(0, 100)])?;
    rxe.perform(1, ours.read_from(0x400), &[at(0x400, 2500)])?;
    rxe.perform(2, Op::FetchAdd { remote, rkey, add: 1 }, &[at(0x4000, 8)])?;
    rxe.post(&[signaled(3, Op::Write { remote, rkey: rkey ^ 1, imm: None }, &[at(0, 8)])])?;
    rxe.ends(3, "REM_ACCESS_ERR")?;
    // Without a shared queue, and without credits: "no limit".
    let aeth =
        |syndrome: u64, msn: u64| Fields::from([("aeth.syndrome", syndrome), ("aeth.msn", msn)]);
    let mut found = aeth(0x1f, 3);
    found.insert("atomicacketh.origremdt", COUNTER);
    Ok(numbered(
        first,
        vec![
            (0x11, 1, aeth(0x1f, 1)),
            (0x0d, 1, aeth(0x1f, 2)),
            (0x0e, 1, Fields::new()),
            (0x0f, 1, aeth(0x1f, 2)),
            (0x12, 1, found),
            (0x11, 1, aeth(0x62, 3)),
        ],
    ))
}

/// Gives packets their opcodes and PSNs.
fn numbered(first: u32, packets: Vec<(u64, u32, Fields)>) -> Vec<Fields> {
    let mut psn = first;
    let mut all = Vec::new();
    for (opcode, count, mut fields) in packets {
        fields.extend([("bth.opcode", opcode), ("bth.psn", (psn & 0xff_ffff).into())]);
        all.push(fields);
        psn += count;
    }
    all
}

/// Each wanted packet must be seen, in order. On a slow machine retransmitted packets are seen
/// again.
fn compare(wanted: &[Fields], seen: impl Iterator<Item = Fields>) -> Step {
    let mut next = 0;
    for fields in seen {
        match wanted.get(next) {
            Some(wanted) if *wanted == fields => next += 1,
            _ if wanted[..next].contains(&fields) => {}
            wanted => {
                let wanted = wanted.map_or_else(|| "nothing".to_owned(), |w| format!("{w:x?}"));
                return Err(format!("tshark sees {fields:x?} instead of {wanted}"));
            }
        }
    }
    match wanted.get(next) {
        None => Ok(()),
        Some(missing) => Err(format!("tshark does not see {missing:x?}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_as_tshark_prints_them() {
        assert_eq!(number("0x0000ff"), Some(255));
        assert_eq!((number("12"), number("True"), number("")), (Some(12), Some(1), None));
    }

    #[test]
    fn a_key_is_read_as_tshark_prints_it() {
        assert_eq!(value("ieth", "00:00:12:fe"), Some(0x12fe));
        assert_eq!((value("ieth", "000012fe"), value("ieth", "")), (Some(0x12fe), None));
    }

    #[test]
    fn what_is_sent_again_may_be_seen_again_and_nothing_may_be_missing() {
        let packets = numbered(0xff_ffff, vec![(4, 1, Fields::new()), (5, 1, Fields::new())]);
        assert_eq!(packets[1]["bth.psn"], 0);
        let [a, b] = [packets[0].clone(), packets[1].clone()];
        assert_eq!(compare(&packets, [a.clone(), a.clone(), b.clone()].into_iter()), Ok(()));
        assert!(compare(&packets, [a.clone()].into_iter()).is_err());
        assert!(compare(&packets, [b, a].into_iter()).is_err());
    }
}
