//! The script sends requests, the subject responds: permitted requests, and their effects on memory
//! and receives.

use rocinante_stack::mem::Access;
use rocinante_stack::types::Key;
use rocinante_stack::verbs::WcStatus::{LocLenErr, LocProtErr, LocQpOpErr, WrFlushErr};
use rocinante_stack::verbs::{QpState, WcOpcode};
use rocinante_stack::wire::Opcode as Op;

use crate::departures;
use crate::packet::{atomic_eth, pattern, reth};
use crate::subject::{Options, Range, Remote, Step};
use crate::talk::{REGION, Talk};

/// A packet: headers behind the BTH and payload.
type Body = (Op, Vec<u8>);

/// Plays `before` and then a packet that is refused with a NAK of this code. Checks that nothing
/// was placed in region 0 from byte 2048 on.
fn refused(t: &mut Talk<'_>, before: &[Body], bad: &Body, code: &str) -> Step {
    let describe = |why| format!("{:?} with {} bytes: {why}", bad.0, bad.1.len());
    refuses(t, before, bad, code).map_err(describe)
}

fn refuses(t: &mut Talk<'_>, before: &[Body], (opcode, body): &Body, code: &str) -> Step {
    for (psn, (opcode, body)) in before.iter().enumerate() {
        t.ask_with(*opcode, psn as i64, &[body], false)?;
    }
    let psn = before.len();
    t.ask(*opcode, psn as i64, &[body])?;
    t.says(&[&format!("NAK #{psn} {code} msn 0")])?;
    t.becomes(QpState::Err)?;
    t.holds(2048, &[0; 1024])?;
    // The subject sends nothing from here on.
    t.once_more()?;
    t.quiet()
}

// ---- opcodes ----

fn send_rest() -> Vec<Body> {
    let (full, behind) = (vec![7; 256], [&[0; 4][..], &[7; 256]].concat());
    vec![
        (Op::RC_SEND_MIDDLE, full.clone()),
        (Op::RC_SEND_LAST, full),
        (Op::RC_SEND_LAST_WITH_IMMEDIATE, behind.clone()),
        (Op::RC_SEND_LAST_WITH_INVALIDATE, behind),
    ]
}

fn write_rest() -> Vec<Body> {
    vec![
        (Op::RC_RDMA_WRITE_MIDDLE, vec![7; 256]),
        (Op::RC_RDMA_WRITE_LAST, vec![7; 256]),
        (Op::RC_RDMA_WRITE_LAST_WITH_IMMEDIATE, vec![7; 260]),
    ]
}

/// All packets that begin a message.
fn beginnings(t: &Talk<'_>) -> Vec<Body> {
    let (long, whole) = (t.reth(2048, 512), t.reth(2048, 8));
    let atomic = t.atomic_eth(2048, 1, 0);
    vec![
        (Op::RC_SEND_FIRST, vec![7; 256]),
        (Op::RC_SEND_ONLY, vec![7; 8]),
        (Op::RC_SEND_ONLY_WITH_IMMEDIATE, vec![7; 12]),
        (Op::RC_SEND_ONLY_WITH_INVALIDATE, vec![7; 12]),
        (Op::RC_RDMA_WRITE_FIRST, [&long[..], &[7; 256]].concat()),
        (Op::RC_RDMA_WRITE_ONLY, [&whole[..], &[7; 8]].concat()),
        (Op::RC_RDMA_WRITE_ONLY_WITH_IMMEDIATE, [&whole[..], &[7; 12]].concat()),
        (Op::RC_RDMA_READ_REQUEST, whole.clone()),
        (Op::RC_COMPARE_SWAP, atomic.clone()),
        (Op::RC_FETCH_ADD, atomic),
        (Op::RC_ATOMIC_WRITE, [&whole[..], &[7; 8]].concat()),
    ]
}

/// No message is in progress: a packet that continues or ends one is wrong.
pub(crate) fn opcode_without_a_beginning(t: &mut Talk<'_>) -> Step {
    for bad in send_rest().iter().chain(&write_rest()) {
        t.begin(Options::default())?;
        t.post_recv(1, &[Talk::at(2048, 1024)])?;
        refused(t, &[], bad, "invalid")?;
        t.ends_as(1, &[WrFlushErr])?;
    }
    Ok(())
}

/// In the middle of a SEND, a packet is wrong if it begins a message, or continues or ends a WRITE.
pub(crate) fn opcode_in_the_middle_of_a_send(t: &mut Talk<'_>) -> Step {
    let first = (Op::RC_SEND_FIRST, vec![7; 256]);
    for bad in beginnings(t).iter().chain(&write_rest()) {
        t.begin(Options::default())?;
        t.post_recv(1, &[Talk::at(0, 1024)])?;
        refused(t, std::slice::from_ref(&first), bad, "invalid")?;
    }
    Ok(())
}

/// In the middle of a WRITE, a packet is wrong if it begins a message, or continues or ends a SEND.
pub(crate) fn opcode_in_the_middle_of_a_write(t: &mut Talk<'_>) -> Step {
    let header = t.reth(0, 1024);
    let first = (Op::RC_RDMA_WRITE_FIRST, [&header[..], &[7; 256]].concat());
    for bad in beginnings(t).iter().chain(&send_rest()) {
        t.begin(Options::default())?;
        t.post_recv(1, &[Talk::at(2048, 1024)])?;
        refused(t, std::slice::from_ref(&first), bad, "invalid")?;
    }
    Ok(())
}

/// Operations that the queue pair does not permit.
pub(crate) fn operation_not_permitted(t: &mut Talk<'_>) -> Step {
    let (header, atomic) = (t.reth(2048, 8), t.atomic_eth(2048, 1, 0));
    let rights = [
        (Access::REMOTE_WRITE, (Op::RC_RDMA_WRITE_ONLY, [&header[..], &[7; 8]].concat())),
        (Access::REMOTE_READ, (Op::RC_RDMA_READ_REQUEST, header)),
        (Access::REMOTE_ATOMIC, (Op::RC_FETCH_ADD, atomic)),
    ];
    for (i, (_, bad)) in rights.iter().enumerate() {
        for (j, (right, _)) in rights.iter().enumerate() {
            if i != j {
                let access = Access::LOCAL_WRITE | *right;
                t.begin(Options { access, ..Options::default() })?;
                refused(t, &[], bad, "invalid")?;
            }
        }
    }
    Ok(())
}

// ---- lengths ----

/// FIRST and MIDDLE carry exactly the path MTU, LAST at least one byte, ONLY at most the path MTU.
pub(crate) fn length_of_each_place(t: &mut Talk<'_>) -> Step {
    let write =
        |t: &Talk<'_>, len: u32, rest: usize| [&t.reth(2048, len)[..], &vec![7; rest]].concat();
    let send: Vec<Body> = vec![(Op::RC_SEND_FIRST, vec![7; 256])];
    let written: Vec<Body> =
        vec![(Op::RC_RDMA_WRITE_FIRST, [&t.reth(0, 1024)[..], &[7; 256]].concat())];
    let cases: Vec<(Vec<Body>, Body)> = vec![
        (vec![], (Op::RC_SEND_FIRST, vec![7; 255])),
        (vec![], (Op::RC_SEND_FIRST, vec![])),
        (vec![], (Op::RC_SEND_FIRST, vec![7; 257])),
        (vec![], (Op::RC_SEND_ONLY, vec![7; 257])),
        (vec![], (Op::RC_SEND_ONLY_WITH_IMMEDIATE, vec![7; 4 + 257])),
        (send.clone(), (Op::RC_SEND_MIDDLE, vec![7; 255])),
        (send.clone(), (Op::RC_SEND_MIDDLE, vec![7; 257])),
        (send.clone(), (Op::RC_SEND_LAST, vec![])),
        (send.clone(), (Op::RC_SEND_LAST, vec![7; 257])),
        (send, (Op::RC_SEND_LAST_WITH_IMMEDIATE, vec![7; 4])),
        (vec![], (Op::RC_RDMA_WRITE_FIRST, write(t, 600, 255))),
        (vec![], (Op::RC_RDMA_WRITE_FIRST, write(t, 600, 257))),
        (vec![], (Op::RC_RDMA_WRITE_ONLY, write(t, 257, 257))),
        (vec![], (Op::RC_RDMA_WRITE_ONLY_WITH_IMMEDIATE, write(t, 257, 4 + 257))),
        (written.clone(), (Op::RC_RDMA_WRITE_MIDDLE, vec![7; 255])),
        (written.clone(), (Op::RC_RDMA_WRITE_LAST, vec![])),
        (written, (Op::RC_RDMA_WRITE_LAST, vec![7; 257])),
    ];
    for (before, bad) in &cases {
        t.begin(Options::default())?;
        t.post_recv(1, &[Talk::at(0, 2048)])?;
        refused(t, before, bad, "invalid")?;
    }
    Ok(())
}

/// The payload of a WRITE has the length of its RETH.
pub(crate) fn length_of_a_write(t: &mut Talk<'_>) -> Step {
    let only = |t: &Talk<'_>, says: u32, has: usize| -> Body {
        (Op::RC_RDMA_WRITE_ONLY, [&t.reth(2048, says)[..], &vec![7; has]].concat())
    };
    let cases = [only(t, 10, 9), only(t, 10, 11), only(t, 1, 0), only(t, 8, 4)];
    for bad in &cases {
        t.begin(Options::default())?;
        refused(t, &[], bad, "invalid")?;
    }
    let first = |t: &Talk<'_>, says: u32| -> Body {
        (Op::RC_RDMA_WRITE_FIRST, [&t.reth(0, says)[..], &[7; 256]].concat())
    };
    let cases = [(500, 243), (500, 245), (600, 88), (512, 255)];
    for (says, has) in cases {
        t.begin(Options::default())?;
        let bad = (Op::RC_RDMA_WRITE_LAST, vec![7; has]);
        let before = first(t, says);
        refused(t, &[before], &bad, "invalid")?;
    }
    // More than its RETH says, which is 0.
    t.begin(Options::default())?;
    let bad = only(t, 0, 1);
    if t.departs(&departures::WRITE_OF_NOTHING_WITH_BYTES) {
        t.ask(bad.0, 0, &[&bad.1])?;
        t.says(&["NAK #0 access msn 0"])?;
        return t.becomes(QpState::Err);
    }
    refused(t, &[], &bad, "invalid")
}

/// No message is longer than 2^31 bytes.
pub(crate) fn longer_than_a_message_may_be(t: &mut Talk<'_>) -> Step {
    let header = t.reth(2048, 0x8000_0001);
    let cases: [Body; 2] = [
        (Op::RC_RDMA_READ_REQUEST, header.clone()),
        (Op::RC_RDMA_WRITE_FIRST, [&header[..], &[7; 256]].concat()),
    ];
    for bad in &cases {
        t.begin(Options::default())?;
        refused(t, &[], bad, "invalid")?;
    }
    Ok(())
}

/// READ requests and atomics have no payload.
pub(crate) fn payload_where_there_is_none(t: &mut Talk<'_>) -> Step {
    let cases = [
        (Op::RC_RDMA_READ_REQUEST, t.reth(2048, 8)),
        (Op::RC_COMPARE_SWAP, t.atomic_eth(2048, 1, 0)),
        (Op::RC_FETCH_ADD, t.atomic_eth(2048, 1, 0)),
    ];
    let cases = cases.iter().flat_map(|case| [1, 4, 256].map(|extra| (case, extra)));
    for ((opcode, header), extra) in cases {
        let bad = [&header[..], &vec![7; extra]].concat();
        t.begin(Options::default())?;
        if t.departs(&departures::PAYLOAD_OF_A_READ) {
            t.ask(*opcode, 0, &[&bad])?;
            let answer = match *opcode {
                Op::RC_RDMA_READ_REQUEST => "READ_ONLY #0 8B msn 1",
                _ => "ATOMIC_ACKNOWLEDGE #0 =0 msn 1",
            };
            t.says(&[answer])?;
        } else {
            refused(t, &[], &(*opcode, bad), "invalid")?;
        }
    }
    Ok(())
}

/// For empty requests of every kind, no key and no address is checked. They get responses like
/// other requests.
pub(crate) fn zero_length_everywhere(t: &mut Talk<'_>) -> Step {
    t.begin(Options::default())?;
    let (nowhere, imm) = (reth(0xdead_beef, Key(0x666), 0), [1, 2, 3, 4]);
    t.ask(Op::RC_RDMA_WRITE_ONLY, 0, &[&nowhere])?;
    t.says(&["ACK #0 msn 1"])?;
    t.ask(Op::RC_RDMA_READ_REQUEST, 1, &[&nowhere])?;
    t.says(&["READ_ONLY #1 0B msn 2"])?;
    (1..=3).try_for_each(|id| t.post_recv(id, &[]))?;
    t.ask(Op::RC_RDMA_WRITE_ONLY_WITH_IMMEDIATE, 2, &[&nowhere, &imm])?;
    t.says(&["ACK #2 msn 3"])?;
    t.received_as(1, WcOpcode::RecvRdmaWithImm, 0, Some(imm))?;
    t.ask(Op::RC_SEND_ONLY, 3, &[])?;
    t.says(&["ACK #3 msn 4"])?;
    t.received(2, 0, None)?;
    t.ask(Op::RC_SEND_ONLY_WITH_IMMEDIATE, 4, &[&imm])?;
    t.says(&["ACK #4 msn 5"])?;
    t.received(3, 0, Some(imm))?;
    // Duplicates of them.
    t.ask(Op::RC_RDMA_READ_REQUEST, 1, &[&nowhere])?;
    match t.departs(&departures::DUPLICATE_READ_OF_NOTHING) {
        true => t.quiet()?,
        false => drop(t.says(&["READ_ONLY #1 0B"])?),
    }
    t.ask(Op::RC_SEND_ONLY, 3, &[])?;
    t.says(&["ACK #4 msn 5"])?;
    t.nothing_ends()?;
    t.serves(5, 6)
}

// ---- keys ----

/// A WRITE, a READ and an atomic of eight bytes.
fn requests_to(at: Remote) -> [Body; 3] {
    let header = reth(at.address, at.rkey, 8);
    [
        (Op::RC_RDMA_WRITE_ONLY, [&header[..], &[0xff; 8]].concat()),
        (Op::RC_RDMA_READ_REQUEST, header),
        (Op::RC_FETCH_ADD, atomic_eth(at.address, at.rkey, 1, 0)),
    ]
}

fn all_refused(t: &mut Talk<'_>, at: Remote) -> Step {
    for bad in &requests_to(at) {
        t.begin(Options::default())?;
        refused(t, &[], bad, "access")?;
    }
    Ok(())
}

/// The key of a deregistered region, and the old key of a region that was registered again: both
/// stay invalid.
pub(crate) fn key_of_a_deregistered_region(t: &mut Talk<'_>) -> Step {
    let old = t.register(4096, Access::ALL, false)?;
    t.begin(Options::default())?;
    t.ask(Op::RC_RDMA_READ_REQUEST, 0, &[&reth(old.address, old.rkey, 8)])?;
    t.says(&["READ_ONLY #0 8B msn 1"])?;
    t.deregister(1)?;
    all_refused(t, old)?;
    let new = t.register(4096, Access::ALL, false)?;
    if new.rkey == old.rkey {
        return Err("the key is used again".into());
    }
    all_refused(t, old)?;
    t.begin(Options::default())?;
    t.ask(Op::RC_RDMA_READ_REQUEST, 0, &[&reth(new.address, new.rkey, 8)])?;
    t.says(&["READ_ONLY #0 8B msn 1"])?;
    t.serves(1, 2)
}

/// Keys that belong to no region.
pub(crate) fn key_of_nothing(t: &mut Talk<'_>) -> Step {
    let here = t.memory();
    for rkey in [Key(0), Key(0x1234_5678), Key(here.rkey.0 ^ 1), Key(u32::MAX)] {
        all_refused(t, Remote { rkey, ..here })?;
    }
    Ok(())
}

/// The key of a region of another protection domain.
pub(crate) fn key_of_a_foreign_region(t: &mut Talk<'_>) -> Step {
    let foreign = t.register(4096, Access::ALL, true)?;
    all_refused(t, foreign)
}

/// A right that the region was not registered with.
pub(crate) fn right_that_a_region_lacks(t: &mut Talk<'_>) -> Step {
    let rights = [Access::REMOTE_WRITE, Access::REMOTE_READ, Access::REMOTE_ATOMIC];
    for (i, right) in rights.into_iter().enumerate() {
        let region = t.register(4096, Access::LOCAL_WRITE | right, false)?;
        for (j, request) in requests_to(region).iter().enumerate() {
            t.begin(Options::default())?;
            if i == j {
                t.ask(request.0, 0, &[&request.1])?;
                let (line, _) = t.next(true)?.ok_or("nothing is answered")?;
                if line.contains("NAK") {
                    return Err(format!("{line}, though it is permitted"));
                }
            } else {
                refused(t, &[], request, "access")?;
            }
        }
    }
    Ok(())
}

/// A range outside of its region, also one that wraps at 2^64.
pub(crate) fn range_outside_of_its_region(t: &mut Talk<'_>) -> Step {
    let Remote { address, rkey } = t.memory();
    let end = address + REGION as u64;
    for address in [address - 8, end - 4, end, end + 8, u64::MAX - 3, u64::MAX - 7, 0] {
        let [write, read, atomic] = requests_to(Remote { address, rkey });
        let atomic = (address % 8 == 0).then_some(atomic);
        for bad in [Some(write), Some(read), atomic].into_iter().flatten() {
            t.begin(Options::default())?;
            refused(t, &[], &bad, "access")?;
        }
    }
    // A long range is checked whole before its first byte is placed.
    t.begin(Options::default())?;
    let header = t.reth(2048, REGION as u32);
    refused(t, &[], &(Op::RC_RDMA_WRITE_FIRST, [&header[..], &[7; 256]].concat()), "access")
}

/// A region that goes away in the middle of a WRITE.
pub(crate) fn region_gone_in_mid_write(t: &mut Talk<'_>) -> Step {
    t.begin(Options::default())?;
    let other = t.register(4096, Access::ALL, false)?;
    let header = reth(other.address, other.rkey, 600);
    t.ask_with(Op::RC_RDMA_WRITE_FIRST, 0, &[&header, &[1; 256]], true)?;
    t.says(&["ACK #0 msn 0"])?;
    t.deregister(1)?;
    t.ask(Op::RC_RDMA_WRITE_MIDDLE, 1, &[&[2; 256]])?;
    t.says(&["NAK #1 access msn 0"])?;
    t.becomes(QpState::Err)
}

/// Atomics at addresses that are not multiples of eight.
pub(crate) fn unaligned_atomics(t: &mut Talk<'_>) -> Step {
    for opcode in [Op::RC_FETCH_ADD, Op::RC_COMPARE_SWAP] {
        for offset in 1..8 {
            let bad = (opcode, t.atomic_eth(2048 + offset, 0xff, 0));
            t.begin(Options::default())?;
            refused(t, &[], &bad, "invalid")?;
        }
    }
    Ok(())
}

// ---- receives ----

/// SEND and WRITE with immediate wait for a receive, and consume it once.
pub(crate) fn immediate_without_a_receive(t: &mut Talk<'_>) -> Step {
    let imm = [9, 8, 7, 6];
    let header = t.reth(100, 4);
    let cases: [(Op, Vec<u8>, WcOpcode); 2] = [
        (Op::RC_SEND_ONLY_WITH_IMMEDIATE, [&imm[..], b"data"].concat(), WcOpcode::Recv),
        (
            Op::RC_RDMA_WRITE_ONLY_WITH_IMMEDIATE,
            [&header[..], &imm, b"data"].concat(),
            WcOpcode::RecvRdmaWithImm,
        ),
    ];
    for (opcode, body, completion) in &cases {
        t.begin(Options::default())?;
        for _ in 0..3 {
            t.ask(*opcode, 0, &[body])?;
            t.says(&["RNR #0 timer 12 msn 0"])?;
        }
        t.holds(100, &[0; 4])?;
        t.post_recv(7, &[Talk::at(0, 64)])?;
        t.ask(*opcode, 0, &[body])?;
        t.says(&["ACK #0 msn 1"])?;
        t.received_as(7, *completion, 4, Some(imm))?;
        t.once_more()?;
        t.says(&["ACK #0 msn 1"])?;
        t.nothing_ends()?;
    }
    Ok(())
}

/// A WRITE with immediate needs its receive only at its end.
pub(crate) fn immediate_of_a_long_write(t: &mut Talk<'_>) -> Step {
    t.begin(Options::default())?;
    let (header, imm, data) = (t.reth(0, 300), [4, 3, 2, 1], pattern(300, 1));
    t.ask(Op::RC_RDMA_WRITE_FIRST, 0, &[&header, &data[..256]])?;
    t.ask(Op::RC_RDMA_WRITE_LAST_WITH_IMMEDIATE, 1, &[&imm, &data[256..]])?;
    t.says(&["RNR #1 timer 12 msn 0"])?;
    t.post_recv(7, &[])?;
    t.once_more()?;
    t.says(&["ACK #1 msn 1"])?;
    t.received_as(7, WcOpcode::RecvRdmaWithImm, 300, Some(imm))?;
    t.holds(0, &data)
}

/// Requests behind one without a receive are out of order. A receive that is posted meanwhile
/// serves the repeated request.
pub(crate) fn send_without_a_receive(t: &mut Talk<'_>) -> Step {
    t.begin(Options::default())?;
    t.ask(Op::RC_SEND_FIRST, 0, &[&[1; 256]])?;
    t.says(&["RNR #0 timer 12 msn 0"])?;
    t.ask(Op::RC_SEND_LAST, 1, &[&[2; 10]])?;
    if t.departs(&departures::SEQUENCE_NAK_BEHIND_RNR) {
        t.says(&["NAK #0 sequence msn 0"])?;
    }
    t.quiet()?;
    t.post_recv(7, &[Talk::at(0, 300)])?;
    t.ask(Op::RC_SEND_FIRST, 0, &[&[1; 256]])?;
    t.ask(Op::RC_SEND_LAST, 1, &[&[2; 10]])?;
    t.says(&["ACK #1 msn 1"])?;
    t.received(7, 266, None)?;
    t.holds(0, &[vec![1; 256], vec![2; 10], vec![0; 10]].concat())?;
    t.serves(2, 2)
}

/// A SEND longer than its receive: detected at its beginning, and in its middle.
pub(crate) fn receive_too_small(t: &mut Talk<'_>) -> Step {
    let cases: [(usize, Vec<Body>, Body); 3] = [
        (0, vec![], (Op::RC_SEND_ONLY, vec![7; 10])),
        (9, vec![], (Op::RC_SEND_ONLY, vec![7; 10])),
        (300, vec![(Op::RC_SEND_FIRST, vec![7; 256])], (Op::RC_SEND_LAST, vec![7; 45])),
    ];
    for (room, before, bad) in &cases {
        t.begin(Options::default())?;
        t.post_recv(1, &[Talk::at(4096 - room, *room)])?;
        t.post_recv(2, &[Talk::at(0, 64)])?;
        let departs = t.departs(&departures::RECEIVE_TOO_SMALL);
        refused(t, before, bad, if departs { "operational" } else { "invalid" })?;
        t.holds(4096, &[0; 1024])?;
        t.ends(&[(1, if departs { LocQpOpErr } else { LocLenErr }), (2, WrFlushErr)])?;
    }
    Ok(())
}

/// A receive into memory that is no longer registered.
pub(crate) fn receive_into_memory_that_is_gone(t: &mut Talk<'_>) -> Step {
    t.begin(Options::default())?;
    t.register(4096, Access::ALL, false)?;
    t.post_recv(1, &[Range { region: 1, offset: 0, len: 64 }])?;
    t.deregister(1)?;
    t.ask(Op::RC_SEND_ONLY, 0, &[&[7; 10]])?;
    t.says(&["NAK #0 operational msn 0"])?;
    let status =
        if t.departs(&departures::RECEIVE_INTO_NO_MEMORY) { LocQpOpErr } else { LocProtErr };
    t.ends(&[(1, status)])
}

/// A SEND is scattered over the elements of its receive, in their order.
pub(crate) fn receive_of_several_elements(t: &mut Talk<'_>) -> Step {
    t.begin(Options::default())?;
    t.post_recv(1, &[Talk::at(0, 100), Talk::at(2000, 300), Talk::at(4000, 500)])?;
    let data = pattern(700, 1);
    t.ask(Op::RC_SEND_FIRST, 0, &[&data[..256]])?;
    t.ask(Op::RC_SEND_MIDDLE, 1, &[&data[256..512]])?;
    t.ask(Op::RC_SEND_LAST_WITH_IMMEDIATE, 2, &[&[9, 8, 7, 6], &data[512..]])?;
    t.says(&["ACK #2 msn 1"])?;
    t.received(1, 700, Some([9, 8, 7, 6]))?;
    t.holds(0, &data[..100])?;
    t.holds(2000, &data[100..400])?;
    t.holds(4000, &data[400..])?;
    t.holds(4300, &[0; 200])
}
