//! A device that shared its address with another one is gone without a word: the other one ends its
//! connections, by the notes.

use rocinante_stack::cm::{CmConfig, ConnectionManager, Ended, Note, Noted, Requested};
use rocinante_stack::types::Time;
use rocinante_stack::wire::cm::{CmMessage, CommId};

use crate::net::{A, B, Net, address, config, disconnected, released};

/// The slots of the one that goes, and of the one that stays.
const GONE: u8 = 3;
const HEIR: u8 = 4;

fn sharing(slot: u8) -> CmConfig {
    CmConfig { key: [u64::from(slot), 8], slot: Some(slot), ..config(A) }
}

/// A is one of several devices on its address.
fn shared() -> Net {
    Net::with(|side| if side == A { sharing(GONE) } else { config(side) }, 1)
}

/// The changes of A's notes.
fn noted(net: &mut Net) -> Vec<Noted> {
    std::iter::from_fn(|| net.cm[A].poll_note()).collect()
}

fn kept(net: &mut Net) -> Vec<Note> {
    let note = |noted: &Noted| match noted {
        Noted::Connection { note, .. } => *note,
        Noted::Request { .. } | Noted::Ending { .. } => None,
    };
    noted(net).iter().filter_map(note).collect()
}

/// A goes, and another device on its address has these notes.
fn go(net: &mut Net, notes: &[Note]) {
    net.cm[A] = ConnectionManager::new(sharing(HEIR));
    net.heard[A].clear();
    let now = net.now;
    notes.iter().for_each(|note| net.cm[A].end_for(now, address(A), note));
}

#[test]
fn a_note_says_what_the_peer_has_to_be_told() {
    let mut net = shared();
    net.listen(4);
    let (first, b) = net.connected(0x03_0011, 0x22);
    let (second, _) = net.connected(0x03_0012, 0x23);
    let all = noted(&mut net);
    let notes: Vec<Note> = all
        .iter()
        .zip([first, second])
        .map(|(noted, conn)| match noted {
            Noted::Connection { address: at, id, note: Some(note) } => {
                assert_eq!((*at, *id), (address(A), conn.0));
                *note
            }
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!((all.len(), notes.len()), (2, 2));
    assert!(notes.iter().all(|note| note.slot() == GONE));
    go(&mut net, &notes[..1]);
    net.run(1);
    // The heir has no queue pair of it, so the answer releases the connection. Its program hears of
    // nothing else.
    assert_eq!(net.one(A), released(first, 0));
    assert_eq!((net.cm[A].len(), net.cm[A].counters().ended_for_others), (0, 1));
    // The idle peer learns of it, and of no other connection's end.
    assert_eq!(net.one(B), disconnected(b, Ended::ByPeer));
    assert_eq!(net.sent().iter().filter(|(side, what)| (*side, *what) == (A, "DREQ")).count(), 1);
    net.run(500);
    assert_eq!(net.one(B), released(b, 0x22));
}

#[test]
fn notes_are_of_connections_that_a_peer_may_have() {
    let mut net = shared();
    // As the asker: from its RTU on until the DREP.
    net.listen(1);
    let (a, b) = net.asked(0x03_0011);
    assert_eq!(noted(&mut net), []);
    net.replied(b, 0x22);
    assert_eq!(noted(&mut net), []);
    net.cm[A].establish(a, b"").unwrap();
    assert_eq!(kept(&mut net).len(), 1);
    net.mute[B] = true;
    net.cm[A].disconnect(net.now, a, b"").unwrap();
    net.run(100);
    // Its DREQ may be lost; but the peer's queue pair may connect to another device.
    assert!(matches!(noted(&mut net)[..], [Noted::Ending { .. }]));
    net.mute[B] = false;
    net.run(500);
    assert_eq!(
        noted(&mut net)[..1],
        [Noted::Connection { address: address(A), id: a.0, note: None }]
    );
    // As the listener: from its REP on. Another one asks, and gets no note.
    let mut net = Net::with(|side| if side == B { sharing(GONE) } else { config(side) }, 1);
    net.listen(1);
    let (a, b) = net.asked(0x11);
    let (addresses, id) = ((address(B), address(A)), a.0);
    let request =
        |is_held| Noted::Request { addresses, requested: Requested::Connection(id), is_held };
    assert_eq!(net.cm[B].poll_note(), Some(request(true)));
    assert_eq!(net.cm[B].poll_note(), None);
    net.accept(b, 0x03_0022);
    let noted = net.cm[B].poll_note().unwrap();
    let Noted::Connection { address: at, id, note: Some(_) } = noted else { panic!("{noted:?}") };
    assert_eq!((at, id), (address(B), b.0));
    // The peer repeats its request until it has the answer.
    assert_eq!(net.cm[B].poll_note(), None);
    net.run(1);
    net.cm[A].establish(a, b"").unwrap();
    net.run(1);
    assert_eq!(net.cm[B].poll_note(), Some(request(false)));
    assert_eq!(net.cm[B].poll_note(), None);
    assert_eq!(net.cm[A].poll_note(), None, "it shares its address with no other");
}

#[test]
fn it_is_said_until_the_peer_answers_and_not_for_ever() {
    let mut net = shared();
    net.listen(4);
    let (_, b) = net.connected(0x03_0011, 0x22);
    let notes = kept(&mut net);
    // The heir's first messages are lost.
    net.mute[A] = true;
    go(&mut net, &notes);
    net.run(300);
    net.mute[A] = false;
    assert_eq!(net.take(B), []);
    net.run(300);
    assert_eq!(net.take(B)[0], disconnected(b, Ended::ByPeer));
    // The peer has gone, too.
    net.run(500);
    for side in [A, B] {
        net.take(side);
    }
    let (a, _) = net.connected(0x04_0011, 0x24);
    let later = kept(&mut net);
    net.mute[B] = true;
    net.cm[A] = ConnectionManager::new(sharing(GONE));
    net.sent();
    let now = net.now;
    later.iter().for_each(|note| net.cm[A].end_for(now, address(A), note));
    net.run(20_000);
    let times = net.sent().iter().filter(|sent| **sent == (A, "DREQ")).count();
    assert_eq!(times, 1 + usize::from(net.cm[A].config().max_retries));
    assert_eq!(net.take(A), [released(a, 0)]);
    assert_eq!(net.cm[A].len(), 0);
}

/// The heir dies before the peer has answered: the next one finds the note that it kept.
#[test]
fn an_heir_leaves_what_it_has_not_finished() {
    let mut net = shared();
    net.listen(4);
    let (_, b) = net.connected(0x03_0011, 0x22);
    let notes = kept(&mut net);
    net.mute[A] = true;
    go(&mut net, &notes);
    net.run(100);
    let again = kept(&mut net);
    assert_eq!(again, notes);
    net.mute[A] = false;
    net.cm[A] = ConnectionManager::new(sharing(HEIR + 1));
    net.cm[A].end_for(net.now, address(A), &again[0]);
    net.run(1);
    assert_eq!(net.take(B)[0], disconnected(b, Ended::ByPeer));
    net.run(500);
    let over = |noted: &Noted| matches!(noted, Noted::Connection { note: None, .. });
    assert!(noted(&mut net).iter().any(over), "then there is none");
}

/// A note may be forged.
#[test]
fn a_forged_note_ends_no_connection_of_ones_own_and_takes_half_of_the_room_at_most() {
    let mut net = shared();
    net.listen(4);
    let (a, _) = net.connected(0x03_0011, 0x22);
    let note = kept(&mut net)[0];
    let now = net.now;
    // Its own, from a page that another process has scribbled on.
    net.cm[A].end_for(now, address(A), &note);
    net.run(1_000);
    assert_eq!((net.take(A), net.take(B)), (vec![], vec![]));
    assert_eq!(net.cm[A].counters().ended_for_others, 0);
    // Of another family than the address, twice the same, and too many.
    let mut cm = ConnectionManager::new(CmConfig { max_connections: 20, ..sharing(HEIR) });
    cm.end_for(Time(1), "fd00::1".parse().unwrap(), &note);
    assert!(cm.is_empty());
    for _ in 0..3 {
        cm.end_for(Time(1), address(A), &note);
    }
    assert_eq!(cm.len(), 1);
    for id in 0..100_u32 {
        let mut bytes = note.to_bytes();
        bytes[16..20].copy_from_slice(&(0x0500_0001 + id).to_be_bytes());
        cm.end_for(Time(1), address(A), &Note::from_bytes(&bytes).unwrap());
    }
    assert_eq!(cm.len(), 10);
    let dreq = cm.poll_transmit().unwrap();
    assert!(
        matches!(CmMessage::parse(&dreq.mad).unwrap().1, CmMessage::Dreq(it) if it.local != CommId(0))
    );
    // A device that shares its address with no other ends no connection of others.
    let mut alone = ConnectionManager::new(config(A));
    alone.end_for(Time(1), address(A), &note);
    assert!(alone.is_empty() && alone.poll_transmit().is_none());
    let _ = a;
}
