//! A capture of whole frames, and of the beginnings of their datagrams.

use std::time::SystemTime;

use super::*;
use crate::testing::testns::without_capabilities;

/// Of capabilities(7).
const CAP_SYS_ADMIN: u32 = 21;
const CAP_BPF: u32 = 39;

const PATIENCE: Duration = Duration::from_secs(20);

fn index_in(ns: &NetNs) -> u32 {
    ns.run(|| Interface::by_name("v0").expect("the interface").index)
}

fn open_at(ns: &NetNs, wanted: &Wanted, snap: Option<u32>) -> Capture {
    let interface = index_in(ns);
    ns.run(|| Capture::open(interface, wanted, snap)).expect("a capture")
}

/// An error if the kernel refuses a program.
fn takes_programs(pair: &Pair) -> io::Result<()> {
    match open_at(&pair.a, &Wanted::All, Some(128)).whole_because() {
        None => Ok(()),
        Some(error) => Err(io::Error::other(error.to_string())),
    }
}

/// Adds the next frames' datagrams, each from its Ethernet header on; returns the number of frames.
fn take(capture: &mut Capture, to: &mut Vec<Vec<u8>>) -> usize {
    let mut frames = 0;
    let now = || SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after 1970");
    while let Some(time) = capture.next(|it| {
        let headers = if it.bytes[12..14] == [0x86, 0xdd] { 62 } else { 42 };
        let (headers, payload) = it.bytes.split_at(headers);
        let alone = Run { datagram: usize::MAX, apart: usize::MAX };
        let run = it.run.unwrap_or(alone);
        // An empty payload is a datagram.
        let pieces = payload.chunks(run.apart).chain(payload.is_empty().then_some(payload));
        to.extend(pieces.map(|it| [headers, &it[..it.len().min(run.datagram)]].concat()));
        it.time
    }) {
        assert!(time.abs_diff(now()) < PATIENCE, "{time:?}");
        frames += 1;
    }
    frames
}

/// Datagrams until there are `count`, and no more.
fn datagrams(capture: &mut Capture, count: usize) -> Vec<Vec<u8>> {
    let (mut all, end) = (Vec::new(), Instant::now() + PATIENCE);
    while all.len() < count {
        assert!(Instant::now() < end, "{} of {count}, {} lost", all.len(), capture.dropped());
        take(capture, &mut all);
    }
    assert_eq!((all.len(), capture.dropped()), (count, 0));
    all
}

#[test]
fn beginnings_are_those_of_whole_frames_in_both_directions() {
    let pair = or_skip!(Pair::new().and_then(|pair| takes_programs(&pair).map(|()| pair)));
    let (mut a, mut b) = ports(&pair);
    let lens: Vec<usize> = [
        vec![16, 4116, 0, 1, 2, 22, 23, 86, 87, 214, 215],
        vec![80; 60],
        [vec![4116; 14], vec![20]].concat(),
        [vec![1044; 70], vec![300, 300, 16], vec![4116; 4], vec![80; 17]].concat(),
        vec![250; 128],
    ]
    .concat();
    let snaps = [None, Some(64), Some(131), Some(256)];
    let mut captures: Vec<(Capture, Option<u32>)> = [&pair.a, &pair.b]
        .into_iter()
        .flat_map(|ns| snaps.map(|snap| (open_at(ns, &Wanted::All, snap), snap)))
        .collect();
    for (local, remote) in [(A4, B4), (A6, B6)] {
        let [to, back] =
            [path(&pair.a, &mut a, local, remote).id, path(&pair.b, &mut b, remote, local).id];
        for leaves in [true, false] {
            let (from, at) = if leaves { (&mut a, &mut b) } else { (&mut b, &mut a) };
            send(from, if leaves { to } else { back }, &lens);
            receive(at, lens.len());
            let mut whole = Vec::new();
            for (capture, snap) in &mut captures {
                assert!(capture.whole_because().is_none());
                let got = datagrams(capture, lens.len());
                match snap {
                    None => {
                        let headers = if local == A4 { 42 } else { 62 };
                        for (n, (got, len)) in got.iter().zip(&lens).enumerate() {
                            assert!(got[headers..] == payload(n, *len), "datagram {n}");
                        }
                        whole = got;
                    }
                    Some(snap) => {
                        for (n, (got, whole)) in got.iter().zip(&whole).enumerate() {
                            let kept = whole.len().min(*snap as usize);
                            assert_eq!(got, &whole[..kept], "datagram {n} of {}", whole.len());
                        }
                    }
                }
            }
        }
    }
}

/// A datagram of these numbers of queue pairs, in the BTH and behind the Q_Key of the DETH.
fn of(opcode: u8, to: u32, from: u32) -> Vec<u8> {
    let mut bytes = vec![0x5a; 900];
    bytes[0] = opcode;
    for (at, number) in [(4, to), (16, from)] {
        bytes[at..at + 4].copy_from_slice(&(number | 0xa5 << 24).to_be_bytes());
    }
    bytes
}

#[test]
fn beginnings_are_of_the_wanted_datagrams_alone() {
    let pair = or_skip!(Pair::new().and_then(|pair| takes_programs(&pair).map(|()| pair)));
    let (mut a, mut b) = ports(&pair);
    let peer = |peer: &str| {
        let of = |from_peer, to_qpn| Direction { peer: ip(peer), from_peer, to_qpn };
        Wanted::Directions([of(true, 0x11), of(false, 0x123_456)])
    };
    for (local, remote) in [(A4, B4), (A6, B6)] {
        let other = if local == A4 { B6 } else { B4 };
        // Their datagrams, by the indices below.
        let wanted: [(Wanted, &[usize]); 4] = [
            (peer(remote), &[0, 4]),
            (peer(other), &[]),
            (Wanted::Datagrams(0x23), &[2, 3, 6]),
            (Wanted::All, &[0, 1, 2, 3, 4, 5, 6, 7]),
        ];
        let mut captures: Vec<_> = wanted
            .iter()
            .flat_map(|(wanted, due)| {
                [None, Some(128)].map(|snap| (open_at(&pair.a, wanted, snap), *due))
            })
            .collect();
        let sent = [
            [of(4, 0x123_456, 9), of(4, 0x11, 9), of(0x64, 9, 0x23), of(0x64, 0x24, 9)],
            [of(4, 0x11, 9), of(4, 0x123_456, 9), of(0x65, 0x23, 9), of(0x24, 0x23, 9)],
        ];
        let [to, back] =
            [path(&pair.a, &mut a, local, remote).id, path(&pair.b, &mut b, remote, local).id];
        for (nth, path) in [to, back].into_iter().enumerate() {
            let (from, at) = if nth == 0 { (&mut a, &mut b) } else { (&mut b, &mut a) };
            for bytes in &sent[nth] {
                // Each is a frame: the filter sees the first datagram of a run alone.
                from.reserve(path, bytes.len()).expect("room").buf.copy_from_slice(bytes);
                from.commit();
                from.flush(crate::testing::no_failure);
            }
            receive(at, sent[nth].len());
        }
        let headers = if local == A4 { 42 } else { 62 };
        for (capture, due) in &mut captures {
            let got = datagrams(capture, due.len());
            for (got, due) in got.iter().zip(*due) {
                let due = &sent.as_flattened()[*due];
                let kept = (got.len() - headers).min(due.len());
                assert!(kept >= 66 && got[headers..] == due[..kept]);
            }
        }
    }
}

#[test]
fn what_finds_no_room_is_counted_and_later_frames_are_taken() {
    let pair = or_skip!(Pair::new().and_then(|pair| takes_programs(&pair).map(|()| pair)));
    let (mut a, _b) = ports(&pair);
    let to = path(&pair.a, &mut a, A6, B6).id;
    let [mut full, mut empty] = [(); 2].map(|()| open_at(&pair.a, &Wanted::All, Some(256)));
    let (mut sent, mut taken) = (0_u64, 0);
    let end = Instant::now() + PATIENCE;
    while full.dropped() == 0 {
        assert!(Instant::now() < end, "it has room for all");
        send(&mut a, to, &[80; 64]);
        sent += 1;
        // The other one is read meanwhile.
        taken += take(&mut empty, &mut Vec::new());
    }
    let mut all = Vec::new();
    let frames = take(&mut full, &mut all);
    assert!(frames > 100 && all.len() == frames * 64, "{frames}, {}", all.len());
    assert_eq!(frames as u64 + full.dropped(), sent);
    assert_eq!((taken as u64, empty.dropped()), (sent, 0));
    let lost = full.dropped();
    send(&mut a, to, &[80; 64]);
    assert_eq!((take(&mut full, &mut all), full.dropped()), (1, lost));
}

#[test]
fn a_frame_of_more_datagrams_than_a_record_holds_is_counted() {
    let pair = or_skip!(Pair::new().and_then(|pair| takes_programs(&pair).map(|()| pair)));
    let mut capture = open_at(&pair.a, &Wanted::All, Some(64));
    let spec = PathSpec { src_port: 0xc123, tos: 0, ..spec(A4, B4) };
    let template = FrameTemplate::new([2, 0, 0, 0, 9, 2], [2, 0, 0, 0, 9, 1], &spec, 0xc123);
    let template = template.expect("one family");
    let headers = template.header_len();
    let interface = index_in(&pair.a);
    let socket = pair.a.run(|| {
        let socket = PacketSocket::new()?;
        socket.set(libc::SOL_PACKET, libc::PACKET_VNET_HDR, 1)?;
        io::Result::Ok(socket)
    });
    let socket = socket.expect("a socket");
    let send = |count: usize| {
        let mut frame = vnet::outgoing(headers, headers - 8, true, Some(16)).to_vec();
        frame.resize(frame.len() + headers, 0);
        template.write(&mut frame[vnet::VNET_LEN..], 16 * count, 1);
        frame.resize(frame.len() + 16 * count, 7);
        socket.send_by(interface, &frame)
    };
    send(128).expect("sent");
    let mut got = Vec::new();
    take(&mut capture, &mut got);
    assert_eq!((got.len(), capture.dropped()), (128, 0));
    // Later kernels refuse such frames.
    let lost = match send(129) {
        Ok(()) => 1,
        Err(error) => {
            assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
            0
        }
    };
    take(&mut capture, &mut got);
    assert_eq!((got.len(), capture.dropped()), (128, lost));
}

#[test]
fn without_the_right_to_programs_frames_are_taken_whole() {
    let (pair, mut a, mut b) = or_skip!(pair_with_ports());
    let interface = index_in(&pair.a);
    let mut capture = pair.a.run(|| {
        without_capabilities(&[CAP_BPF, CAP_SYS_ADMIN], || {
            Capture::open(interface, &Wanted::All, Some(128)).expect("a capture")
        })
    });
    let mut more = open_at(&pair.a, &Wanted::All, Some(257));
    assert!(more.whole_because().is_none());
    let because = capture.whole_because().expect("no right to programs");
    assert_eq!(because.raw_os_error(), Some(libc::EPERM));
    let to = path(&pair.a, &mut a, A4, B4).id;
    send(&mut a, to, &[1000; 20]);
    receive(&mut b, 20);
    // The other one wants more than pays.
    for capture in [&mut capture, &mut more] {
        assert!(datagrams(capture, 20).iter().all(|it| it.len() == 1042));
    }
}

/// Queue pairs of a process share the path to an address, so that a super-packet has datagrams of
/// several.
#[test]
fn datagrams_of_several_queue_pairs_in_a_frame_are_told_apart() {
    let pair = or_skip!(Pair::new().and_then(|pair| takes_programs(&pair).map(|()| pair)));
    let (mut a, mut b) = ports(&pair);
    let wanted = Wanted::Datagrams(0x23);
    let mut captures = [None, Some(64), Some(128)].map(|snap| open_at(&pair.a, &wanted, snap));
    // To it and from it, and of others.
    let sent = [(9, 7), (0x23, 7), (9, 0x23), (0x24, 9), (8, 0x23)];
    for (local, remote, headers) in [(A4, B4, 42), (A6, B6, 62)] {
        let to = path(&pair.a, &mut a, local, remote).id;
        for (to_qpn, from_qpn) in sent {
            let bytes = of(0x64, to_qpn, from_qpn);
            a.reserve(to, bytes.len()).expect("room").buf.copy_from_slice(&bytes);
            a.commit();
        }
        a.flush(crate::testing::no_failure);
        receive(&mut b, sent.len());
        for capture in &mut captures {
            let got = datagrams(capture, sent.len());
            let has: Vec<bool> = got.iter().map(|it| wanted.has(&it[headers..])).collect();
            assert_eq!(has, [false, true, true, false, true]);
        }
    }
}
